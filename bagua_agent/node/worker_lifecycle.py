"""The interface between a node's membership and the ways of running its workers.

Above it are the store, the leader and the records; below it are two ways of following them: live_workers.py keeps
processes and informs them over their sessions, restarted_workers.py starts scripts again for each generation.
"""

from __future__ import annotations

from typing import Protocol

from bagua_contract import session_pb2
from bagua_contract.records import Generation

# While workers here can't go on: the leader may be lost after it was found alive, or its successor may.
LEADER_AGAIN_S = 0.5


class WorkerWay(Protocol):
    """Called from the loop's thread only; nothing here waits."""

    # -- what the job says

    def begin(self) -> None:
        """The job is joined: workers may begin."""

    def follow(self, generation: Generation) -> None:
        """There is a newer record; called once for each."""

    def close_joins(self) -> None:
        """Every worker of the job has committed its last step."""

    def refuse(self, worker_id: str, difference: str) -> None:
        """The leader does not let this worker in; it may be another node's."""

    def follow_replicas(self, now_s: float) -> None:
        """Replicas may have changed, or nodes that hold parts of one leave. Live mode alone has replicas."""

    def lost_touch(self, agent_id: str, now_s: float) -> None:
        """An agent that holds a part of a replica of this node does not answer this host."""

    def met(self, generation: int, address: str) -> None:
        """Where the workers of a RESTART generation meet."""

    def leave(self) -> str:
        """This node leaves, as JobSeen says. Returns when its workers go, for people."""

    def interrupt(self) -> None:
        """A second Ctrl-C: the scripts get it at once."""

    # -- what the workers do

    def said(self, worker_id: str, message: session_pb2.WorkerMessage, now_s: float) -> None: ...

    def exited(self, worker_id: str, returncode: int, now_s: float) -> None: ...

    def progress_of(self, worker_id: str) -> session_pb2.Progress | None:
        """Its last report; None before the first, and in restart mode."""

    @property
    def awaits_generation(self) -> bool:
        """A worker here takes no step before another generation: a loss ended the one in force."""

    # -- what the node's end depends on

    @property
    def ready_workers(self) -> frozenset[str]:
        """Those that have a member key."""

    @property
    def trained(self) -> bool:
        """A worker here confirmed the last commit."""

    @property
    def exit_code(self) -> int:
        """What the newest unexpected end of a worker says; 0 without one."""
