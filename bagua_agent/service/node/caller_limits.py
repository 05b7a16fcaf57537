"""Limits what one caller takes of a daemon's threads, so that none keeps the others from reading logs.

A caller reads a number of logs at once. A call whose request does not come ends soon, and a caller has a number of
those at once: gRPC gives each call a thread before its request is there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from bagua_agent.base.errors import UserError
from bagua_agent.rpc.first_message import first_of

# `logs --follow` reads two streams of each worker on the node: 24 workers.
MOST_OF_A_CALLER = 48
MOST_READERS = 240  # of all callers; each takes a thread
MOST_AWAITED = MOST_OF_A_CALLER + 16  # of a caller: all its readers may come at once
REQUEST_TIMEOUT_S = 5.0  # a client sends the request with the call


class TooManyReaders(UserError):
    """The error of a caller that is refused because of a limit; its text says which one. of_caller: it is the caller's
    own limit, not that of all callers."""

    def __init__(self, text: str, *, of_caller: bool) -> None:
        super().__init__(text)
        self.of_caller = of_caller


class CallerLimits:
    """Counts the logs that each caller reads, and limits them. Any thread may call. callers: how many logs each reads
    now."""

    def __init__(self, most_of_a_caller: int = MOST_OF_A_CALLER, most: int = MOST_READERS) -> None:
        self._most_of_a_caller = most_of_a_caller
        self._most = most
        self._lock = threading.Lock()
        self.callers: Counter[str] = Counter()

    @contextmanager
    def reading(self, caller: str) -> Iterator[None]:
        """Counts one more log that the caller reads while the context is open. Raises TooManyReaders."""
        with self._lock:
            if self.callers[caller] >= self._most_of_a_caller:
                raise TooManyReaders(
                    f"{caller!r} reads {self._most_of_a_caller} logs here, and one caller may read no more at once; "
                    "end another `logs --follow`, or follow one rank",
                    of_caller=True,
                )
            if self.callers.total() >= self._most:
                raise TooManyReaders(
                    f"{self._most} logs are read here, and no more may be at once; try again later",
                    of_caller=False,
                )
            self.callers[caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self.callers[caller] -= 1
                self.callers += Counter()  # without those that read nothing


class AwaitedRequests(grpc.ServerInterceptor):  # type: ignore[misc]
    """Ends calls of methods with one request whose request does not come, and refuses a caller more than MOST_AWAITED
    of them at once."""

    def __init__(self) -> None:
        self._limits = CallerLimits(MOST_AWAITED, MOST_READERS)

    def intercept_service(
        self, continuation: Callable[[Any], grpc.RpcMethodHandler | None], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        method = handler.unary_stream or handler.unary_unary

        # gRPC calls a method of a request stream at once, and one of a single request when that is there.
        def behaviour(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            return method(self._request(requests, context), context)

        kind = "stream_stream" if handler.response_streaming else "stream_unary"
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            behaviour,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _request(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        caller = caller_name(context.auth_context(), context.peer())
        try:
            with self._limits.reading(caller):
                request = first_of(requests, context, REQUEST_TIMEOUT_S)
        except TooManyReaders as error:
            who = f"{caller!r} has" if error.of_caller else "callers have"
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{who} too many calls here without a request; try again later",
            )
        if request is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
        return request


def caller_name(auth_context: Mapping[str, Sequence[bytes]], peer: str) -> str:
    """Returns the name in the caller's certificate; without one, its address. Pure. peer: as gRPC gives it, with a
    port."""
    names = auth_context.get("x509_common_name")
    return names[0].decode("utf-8", "backslashreplace") if names else peer.rpartition(":")[0]
