"""Runs the writes of a leader, or of a candidate, in one thread, so that the agent's loop never waits for etcd.

Each operation ends in exactly one report, whatever it raises (background.py); what a failure means is `ends_leading`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bagua_agent.base.background import Background, Failed, OperationEnd
from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.base.failpoints import Failpoints
from bagua_agent.etcd.client import Compare, Put, Store
from bagua_agent.etcd.keys import JobKeys, Removal, check_id
from bagua_agent.leadership.reports import Act, Report, WriteFailed


def ends_leading(error: BaseException) -> bool:
    """Tells whether an agent whose write failed with `error` should give the leadership up; pure.

    An outage passes, and the lease decides who leads after it. A right that was withdrawn, a request that etcd refuses,
    or a bug fails each time: the key would stay, kept by the lease, and no decision of the job would be carried out.
    """
    return not isinstance(error, InfrastructureLost)


def keys_of_workers(keys: JobKeys, worker_ids: Sequence[str]) -> list[str]:
    """Returns the keys that go with the part of these workers' agent in the job."""
    folders = keys.removed(Removal.WITH_AGENTS_WORKERS)
    return [folder + check_id("worker", w) for w in worker_ids for folder in folders]


class LeaderWrites:
    """The thread of a leader's writes. fence: create revision of the leadership key that this agent holds; 0: none."""

    def __init__(self, store: Store, report: Callable[[Report], None]) -> None:
        self.fence = 0
        self.failpoints = Failpoints.from_environment()
        self._store = store
        self._report = report
        self._writer = Background("bagua-leader")

    def transact(
        self,
        act: Act,
        compares: Sequence[Compare],
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        timeout_s: float | None = None,
        generation: int = 0,
    ) -> str:
        """Does one transaction. Returns an empty string if it was done, else which comparison failed. Raises what the
        store raises.

        act: names the failpoints. generation: the number being written.
        """
        self.failpoints.reach(f"{act.value}.before", generation)
        succeeded = self._store.transact(compares, puts, deletes, timeout_s).succeeded
        self.failpoints.reach(f"{act.value}.after", generation)
        return "" if succeeded else "a comparison failed"

    def run(self, act: Act, what: str, operation: Callable[[], Report]) -> None:
        def ended(end: OperationEnd[Report]) -> None:
            if isinstance(end, Failed):
                self._report(WriteFailed(act, what, end.reason, ends_leading(end.error)))
            else:
                self._report(end.value)

        self._writer.run(what, operation, ended)

    def stop(self) -> None:
        """Ends the thread."""
        self._writer.stop()
