"""A store in whose transactions something happens: others write at that moment, or the answer is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bagua_agent.base.errors import OutcomeUnknown
from bagua_agent.etcd.client import Compare, Put, Store, Transaction
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.key_range import KeyRange


class Meddled(Store):
    """Before each transaction, and after it, something happens."""

    before: Callable[[], object] = staticmethod(lambda: None)
    after: Callable[[], object] = staticmethod(lambda: None)
    transactions = 0

    def transact(
        self,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        timeout_s: float | None = None,
        delete_ranges: Sequence[KeyRange] = (),
        repeatable: bool = False,
    ) -> Transaction:
        self.transactions += 1
        self.before()
        done = super().transact(compares, puts, deletes, timeout_s, delete_ranges, repeatable)
        self.after()
        return done


def no_answer() -> None:
    raise OutcomeUnknown("no answer, as the test wants")


def with_long_timeouts(store: Store) -> StoreConfig:
    """A transaction without an answer within the usual second is repeated, as the one of the tests is."""
    return replace(store.config, request_timeout_s=60.0, attempt_timeout_s=60.0)
