"""The picture that the metrics show of a job, as one agent sees it at one moment.

The agent's loop makes a picture when a scrape asks for one, so a scrape reads no state that changes meanwhile.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import dataclass, field

from bagua_contract import session_pb2

WAYS_TO_END = ("ok", "error", "signal")


def how_it_ended(returncode: int) -> str:
    """Returns how a worker exited, one of WAYS_TO_END: by itself, by an error of its own, or by a signal."""
    return "ok" if returncode == 0 else "error" if returncode > 0 else "signal"


@dataclass(frozen=True, slots=True)
class WorkerPicture:
    """A worker of this node at one moment. global_rank: None outside the generation in force. progress: its last
    report; None before the first. replica_rank, shard_rank: in a job with replicas of several workers, in the
    generation in force; else None. worker_id: empty where only numbers are wanted."""

    slot: int
    pid: int
    global_rank: int | None
    progress: session_pb2.Progress | None
    replica_rank: int | None = None
    shard_rank: int | None = None
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class JobPicture:
    """A job at one moment.

    generation: the newest record's number; 0: none yet. nodes: in it. wanted: the least and the most nodes.
    generations: that this agent saw, by kind. exits: of its workers, by slot and how_it_ended. store_away_s: all
    outages of etcd, the present one included. replica_size: workers of a replica. present_nodes: whose agents are in
    the job, at the leader, which alone sees them all in a large job; None elsewhere. restarts: the job is in restart
    mode.
    """

    job_id: str
    node_name: str
    leads: bool
    generation: int
    world_size: int
    nodes: int
    wanted: tuple[int, int]
    workers: tuple[WorkerPicture, ...]
    generations: Mapping[str, int]
    exits: Mapping[tuple[int, str], int]
    store_answers: bool
    store_outages: int
    store_away_s: float
    trials: int = 0  # of the study under way, at the leader; as the next two
    best_steps_per_s: float = 0.0  # 0: not known
    trials_lost_s: float = 0.0
    replica_size: int = 1
    present_nodes: int | None = None
    restarts: bool = False

    @property
    def replicas(self) -> int:
        """The number of replicas in the newest generation."""
        return self.world_size // self.replica_size


@dataclass(frozen=True, slots=True)
class PictureAsked:
    """A scrape asks the loop for a picture; `answer` takes it."""

    answer: queue.SimpleQueue[JobPicture] = field(default_factory=queue.SimpleQueue)
