"""One stream of changes of some ranges of keys from one endpoint, with a check that the stream is alive.

Requests a progress notification when the stream is silent, and ends the stream when none comes: a frozen endpoint or a
silent cut would otherwise look like a quiet store for ever. Does not know state or retries.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from bagua_agent.etcd.connection import Connection
from bagua_agent.etcd.failures import CallFailed, Failure, Trouble, classify
from bagua_agent.etcd.key_range import KeyRange
from bagua_contract import etcd_pb2 as pb


class WatchStream:
    """A stream of the changes of ranges. Iterate over it for responses; `close` ends the iteration from any thread.

    ranges: with the first revision to watch; each is confirmed by a response of its own (`created`). silence_s: after
    this long without a message a sign of life is asked for; after as long again the stream ends with CallFailed. Time
    that the reader takes over a message does not count.
    """

    def __init__(
        self, connection: Connection, ranges: Sequence[tuple[KeyRange, int]], silence_s: float
    ) -> None:
        self._ranges = tuple(ranges)
        self._silence_s = silence_s
        self._changed = threading.Condition()
        self._ended = False
        self._frozen = False
        self._waiting_since = time.monotonic()
        self._reading = False
        # gRPC runs _requests in a thread of its own, which so serves as the watchdog.
        self._call: Any = None
        self._call = connection.watch(self._requests(), timeout_s=silence_s)

    def __iter__(self) -> Iterator[pb.WatchResponse]:
        """Yields the responses. Raises CallFailed when the stream breaks; ends quietly after `close`."""
        while True:
            with self._changed:
                if self._ended:
                    return
                self._waiting_since = time.monotonic()
                self._reading = True
                self._changed.notify_all()
            try:
                response = next(self._call)
            except StopIteration:
                raise CallFailed(Failure(Trouble.MAYBE_DONE, "etcd ended the watch")) from None
            except grpc.RpcError as error:
                with self._changed:
                    if self._frozen:
                        raise CallFailed(
                            Failure(Trouble.MAYBE_DONE, f"no sign of life for {2 * self._silence_s:g} s")
                        ) from error
                    if self._ended:
                        return
                raise CallFailed(classify(error.code(), error.details())) from error
            finally:
                with self._changed:
                    self._reading = False
            yield response

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._call is not None:
            self._call.cancel()

    def _requests(self) -> Iterator[pb.WatchRequest]:
        for keys, start_revision in self._ranges:
            yield pb.WatchRequest(
                create_request=pb.WatchCreateRequest(
                    key=keys.start, range_end=keys.end, start_revision=start_revision
                )
            )
        asked_for: float | None = None  # the silence, by its start, about which etcd was asked
        while True:
            with self._changed:
                silent_s = time.monotonic() - self._waiting_since if self._reading else 0.0
                asked = asked_for == self._waiting_since
                limit_s = 2 * self._silence_s if asked else self._silence_s
                if self._ended:
                    return
                if silent_s < limit_s:
                    self._changed.wait(limit_s - silent_s)
                    continue
                if asked:
                    self._frozen = True
                else:
                    asked_for = self._waiting_since
            if self._frozen:
                self.close()
                return
            yield pb.WatchRequest(progress_request=pb.WatchProgressRequest())
