"""Provides torch's Store on etcd, by which torchrun's agents exchange the master's address, roles and a run's end.

Values are bytes under one prefix. Waiting reads the keys again at growing intervals, at most half a second: agents wait
here for seconds at most, at a start and at the end. Workers do not use it: they have a TCPStore of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from bagua_agent.base.errors import InfrastructureLost, OutcomeUnknown
from bagua_agent.etcd.client import mod_revision_is
from bagua_torchrun.run_lease import LeasedKeys

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5


class AgentsStore(Store):
    """A torch Store on etcd. Thread-safe.

    Every method raises DistStoreError if etcd is away for the client's whole time limit.
    """

    def __init__(self, keys: LeasedKeys, prefix: str) -> None:
        super().__init__()  # the C++ part holds the timeout
        self._keys = keys
        self._prefix = prefix
        # Called with the keys that a wait still misses, before each further reading. What it raises ends the wait.
        self.while_waiting: Callable[[Sequence[str]], None] | None = None

    def set(self, key: str, value: str | bytes) -> None:
        try:
            self._keys.put(self._prefix + key, _bytes(value))
        except InfrastructureLost as error:
            raise _lost(key, error) from error

    def get(self, key: str) -> bytes:
        """Returns the value, as soon as there is one. Raises DistStoreError after the store's timeout."""
        self.wait([key])
        value = self._read(key)
        if value is None:
            raise DistStoreError(f"{key!r} was removed from etcd; the run's keys have expired")
        return value[0]

    def add(self, key: str, amount: int) -> int:
        """Adds to a decimal number; an absent one is 0. Returns the sum. Each call counts once, whatever etcd does."""
        while True:
            read = self._read(key)
            total = int(read[0]) + amount if read else amount
            compare = mod_revision_is(self._prefix + key, read[1] if read else 0)
            try:
                if self._keys.put_if(compare, self._prefix + key, str(total).encode()):
                    return total
            except OutcomeUnknown as error:
                # a repetition could count twice, and a barrier would open too early
                raise DistStoreError(f"etcd did not say whether {key!r} was counted: {error}") from error
            except InfrastructureLost as error:
                raise _lost(key, error) from error

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all keys are there. Raises DistStoreError naming those that are not after `timeout`."""
        limit: timedelta = timeout or self.timeout  # type: ignore[attr-defined]  # torch's stub lacks it
        deadline_s = time.monotonic() + limit.total_seconds()
        missing, pause_s = list(keys), FIRST_PAUSE_S
        while True:
            missing = [key for key in missing if self._read(key) is None]
            left_s = deadline_s - time.monotonic()
            if not missing:
                return
            if left_s <= 0:
                raise DistStoreError(f"not in etcd after {limit.total_seconds():g} s: {', '.join(missing)}")
            if self.while_waiting is not None:
                self.while_waiting(missing)
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._read(key) is not None for key in keys)

    def _read(self, key: str) -> tuple[bytes, int] | None:
        """Returns the value and its mod revision; None if there is none."""
        try:
            read = self._keys.store.get(self._prefix + key)
        except InfrastructureLost as error:
            raise _lost(key, error) from error
        return None if read is None else (read.value, read.mod_revision)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _lost(key: str, error: InfrastructureLost) -> DistStoreError:
    return DistStoreError(f"etcd is away, needed for {key!r}: {error}")
