"""The place of this worker in the job, as its script sees it: its rank, its replica's, and its shard's.

A call that returns a rank or a size first joins the job if the worker has not joined, so it never returns a
provisional one.
"""

from __future__ import annotations

from bagua_contract.environment import WorkerEnvironment
from bagua_core.communication.step_interface import StepPlan
from bagua_core.elastic.script_collectives.before_loop import BeforeLoop
from bagua_core.elastic.step.round_end import RoundEnd


class ScriptRanks(RoundEnd):
    """Adds the places of this worker, as the script sees them, to RoundEnd."""

    def __init__(self, environment: WorkerEnvironment | None) -> None:
        super().__init__(environment)
        self.replica_size_asked = environment.replica_size if environment else 1
        """As the job was started; `replica_size` is 1 before this worker has a replica."""
        self._before_loop: BeforeLoop | None = None
        self._places_asked: set[tuple[int, int]] | None = None
        """By the script since next_step(); None in a loop with the loader, which divides the data itself."""
        self._says_places = True
        # of the newest step in which the script asked for the world size
        self._size_asked_in: StepPlan | None = None
        self._says_left_out = True

    def asked_place(self) -> tuple[int, int]:
        """Returns place_of_script(), and notes that the script asked."""
        place = self.place_of_script()
        if self._places_asked is not None:
            self._places_asked.add(place)
        return place

    def asked_size(self) -> int:
        """Returns the world size of asked_place(), by which the script may divide data."""
        if self.in_step:
            self._size_asked_in = self.plan
        return self.asked_place()[1]

    def joiner_left_out(self) -> None:
        """Warns once of a collective in the step under way that leaves out what a joiner brings, if the script divides
        data in the loop body: the world size counts the joiner."""
        if self._says_left_out and self._size_asked_in is self.plan:
            self._says_left_out = False
            self._say(
                f"warning: in step {self.plan.step} the script asked for the world size and called a collective, and a "
                "worker joins in that step. The world size counts it, and the collective leaves out what it brings. If "
                "the script divided data (an evaluation), the result lacks the joiner's part: call "
                "loader.end_step(confirmed=True) before, or do it between two epochs"
            )

    def _forward_in_step(self) -> None:
        """Warns once, as another forward of a step under way begins, of what a script loses that divided the data
        between two forwards: in a joiner's first step ranks count it from the first forward on, and its part is not
        used."""
        asked, plan = self._places_asked, self.plan
        if (
            self._says_places
            and asked is not None
            and len(asked) > 1
            and plan.global_rank not in plan.healing
        ):
            self._says_places = False
            self._say(
                f"warning: in step {plan.step} the script asked for rank and world size before the first forward "
                "and between two forwards, and a worker joined in it. If it divided data both times, the part that it "
                "gave to the joiner is not used. Ask once, between next_step() and the first forward"
            )

    def place_of_script(self) -> tuple[int, int]:
        """Returns rank and world size as the script should see them: between steps, those of the collectives that it
        can take part in there. These leave joiners out until their first step; a joiner has the rank behind the others
        until then. Before the loop, see before_loop.py."""
        if self._before_loop is not None:
            self._before_loop.join()
            late = self._before_loop.place()
            if late is not None:
                return late
        replica_rank, replicas = self.replica_place()
        shard_rank, size = self.shard_place()
        return replica_rank * size + shard_rank, replicas * size

    def shard_place(self) -> tuple[int, int]:
        """Returns this worker's place in its replica, and the number of the replica's workers. Joins the job."""
        self.join_before_loop()
        replica = self.member.replica if self.member is not None else None
        return (0, 1) if replica is None else replica.place

    def replica_place(self) -> tuple[int, int]:
        """Returns the rank of this worker's replica and the number of replicas, as place_of_script does for workers.
        Joins the job."""
        if self._before_loop is not None:
            self._before_loop.join()
            late = self._before_loop.place()
            if late is not None:
                return late[0] // self.replica_size, late[1] // self.replica_size
        left_out = None if self.member is None else self.member.place_left_out
        if left_out is not None:
            return left_out
        if self.in_step or not self.newcomers:
            return self.global_rank, self.world_size
        others = self.world_size - len(self.newcomers)
        if self.global_rank in self.newcomers:
            return others, others + 1  # behind the others, so it does nothing that rank 0 does for all
        before = sum(1 for r in self.newcomers if r < self.global_rank)
        return self.global_rank - before, others

    def join_before_loop(self) -> None:
        """Joins the job, if this process was launched, so that the worker has ranks from now on."""
        if self._before_loop is not None:
            self._before_loop.join()
