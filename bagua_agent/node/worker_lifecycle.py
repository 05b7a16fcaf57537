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


class WorkerLifecycle(Protocol):
    """One way of running a node's workers. All methods are called from the loop's thread only, and none waits."""

    # -- what the job says

    def begin(self) -> None:
        """Lets workers begin: the job is joined."""

    def follow(self, generation: Generation) -> None:
        """Follows a newer record; called once for each."""

    def close_joins(self) -> None:
        """Ends joining: every worker of the job has committed its last step."""

    def refuse(self, worker_id: str, difference: str) -> None:
        """Refuses a worker that the leader does not let in; it may be another node's."""

    def follow_replicas(self, now_s: float) -> None:
        """Follows replicas that may have changed, or nodes that leave with parts of one. Live mode alone has
        replicas."""

    def lost_touch(self, agent_id: str, now_s: float) -> None:
        """Handles that an agent with a part of a replica of this node does not answer this host."""

    def met(self, generation: int, address: str) -> None:
        """Takes the address at which the workers of a RESTART generation meet."""

    def leave(self) -> str:
        """Begins the leave of this node, as LocalJobState describes it. Returns when its workers go, for people."""

    def interrupt(self) -> None:
        """Passes a second Ctrl-C to the scripts at once."""

    # -- what the workers do

    def said(self, worker_id: str, message: session_pb2.WorkerMessage, now_s: float) -> None: ...

    def exited(self, worker_id: str, returncode: int, now_s: float) -> None: ...

    def progress_of(self, worker_id: str) -> session_pb2.Progress | None:
        """Returns the worker's last report; None before the first, and in restart mode."""

    @property
    def awaits_generation(self) -> bool:
        """Whether a worker here takes no step before another generation: a loss ended the one in force."""

    # -- what the node's end depends on

    @property
    def ready_workers(self) -> frozenset[str]:
        """The workers here that have a member key."""

    @property
    def trained(self) -> bool:
        """Whether a worker here confirmed the last commit."""

    @property
    def exit_code(self) -> int:
        """The exit code of the newest unexpected end of a worker; 0 without one."""
