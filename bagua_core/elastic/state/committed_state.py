"""The committed state of this worker, its name, and the form in which it travels.

Owns the name, the loader's position, the history, the results of collectives outside steps and the optimizer steps that
are final, beside the registry's models and optimizers. Knows no peers: heal_plan.py decides which worker copies from
which, and the engine when a step commits. Invariant: while the state
has a name, `remains` is UNTOUCHED.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from bagua_contract.records import StateName
from bagua_core.elastic.state import state_codec
from bagua_core.elastic.state.commit_history import History, Line, Roster
from bagua_core.elastic.state.state_guard import StateGuard
from bagua_core.elastic.state.state_registry import StateRegistry
from bagua_core.elastic.waiting.operations import OperationLog
from bagua_core.model.sharded_tensors import local_bytes
from bagua_core.optimizers.state_copy import state_bytes


class Remains(IntEnum):
    """What the tensors of a worker hold while its state has no name. Of several values the greatest counts: of two
    events on one worker, and of the shards of a replica."""

    UNTOUCHED = 0  # what the script built
    HALF_INITIAL = 1  # a part of the job's initial state: a copy in place failed
    LEFT_OUT = 2  # what this worker trained in the job, which then went on without it
    # A part of a state that the job has committed: a copy in place failed. The greatest: the job does not begin anew
    # beside it.
    HALF_COMMITTED = 3


class CommittedState:
    def __init__(self) -> None:
        self.registry = StateRegistry()
        self.guard = StateGuard()  # of all that is here
        self.operations = OperationLog()
        self.name = StateName()
        self.position = {"epoch": 0, "batch": 0}
        self.history = History()
        self.run = 0  # of the checkpoints that go with this state; 0 if none is known
        self.final_parts = 0  # optimizer steps of the step under way that are final, even if it fails later
        self.final_exchanges = 0  # exchanges of weights in the step under way that are
        self.remains = Remains.UNTOUCHED
        # The last commit ended an epoch, and not all workers are known to have it yet.
        self.owes_epoch_end = False
        # A checkpoint of the last commit is due once the script begins its next step.
        self.owes_checkpoint = False
        # The registry's snapshot is of the step under way, or of the one that next_step() announced.
        self.resume_point_is_current = False
        self._script_step = 0  # the step after which the script asked for what `operations` holds

    def step_committed(self, generation: int) -> None:
        self.name = StateName(generation, self.name.step + 1, 0)
        self._script_step = self.name.step
        self.final_parts = self.final_exchanges = 0
        self.operations.clear()

    def part_committed(self, generation: int, part: int) -> None:
        """Records a state between two steps: further than the last commit, behind the next."""
        self.final_parts = part
        self.name = StateName(generation, self.name.step, self.name.operations + 1)

    def exchange_committed(self, generation: int) -> None:
        """Records a state between two steps, as part_committed does; no optimizer has stepped."""
        self.final_exchanges += 1
        self.name = StateName(generation, self.name.step, self.name.operations + 1)

    def operation_committed(self, generation: int, index: int) -> None:
        self.name = StateName(generation, self.name.step, index + 1)

    def forget(self) -> None:
        """Drops the name: this worker's state is not the job's any more."""
        with self.guard.held():
            if not self.name.is_none:
                self.remains = Remains.LEFT_OUT
            self._be_none()
            self._script_step = 0

    def declare_stateless(self, remains: Remains) -> None:
        """Drops the name, because a copy begins to write over the live state.

        The script's place, maybe in a collective, stays.
        """
        with self.guard.held():
            self._be_none()
            self.remains = max(self.remains, remains)

    def _be_none(self) -> None:
        self.name = StateName()
        self.history = History()
        self.operations.forget()
        self.final_parts = self.final_exchanges = 0
        self.owes_epoch_end = self.owes_checkpoint = False

    # -- travelling

    @property
    def size_bytes(self) -> int:
        """The approximate size of a copy of this state; the small things beside the tensors are left out."""
        total = 0
        for tensors in self.registry.capture_modules():
            total += sum(map(local_bytes, tensors.values()))
        return total + sum(map(state_bytes, self.registry.optimizers))

    def bulk(self, *, with_gradients: bool) -> dict[str, Any]:
        """Returns the part of the state that no step changes before its first optimizer step.

        The tensors are the live ones, to be read before that optimizer step. with_gradients: also what .grad holds;
        only between two steps.
        """
        bulk = self.registry.bulk()
        if with_gradients:
            bulk["gradients"] = self.registry.gradients()
        return bulk

    def layout(self) -> int:
        """Returns a digest of the layout of `bulk`: holders that agree in it may send stripes of one state."""
        manifest, _ = state_codec.encode(self.bulk(with_gradients=True))
        return state_codec.layout_of(manifest)

    def rest(self, *, at_resume_point: bool, with_gradients: bool = False) -> dict[str, Any]:
        """Returns everything but `bulk`, as copies.

        at_resume_point: as it was where a failed step would go back to, because the script has gone on since then by a
        way that the receiver takes itself. with_gradients: also what .grad holds now.
        """
        rest = self.registry.rest(at_resume_point=at_resume_point)
        if with_gradients:
            rest["gradients"] = [{n: g.clone() for n, g in m.items()} for m in self.registry.gradients()]
        return {"rest": rest, **self.log()}

    def log(self) -> dict[str, Any]:
        """Returns the record of what the job did last, without the state that resulted from it."""
        return {
            "name": [self.name.generation, self.name.step, self.name.operations],
            "history": self.history.encode(),
            "operations": self.operations.results(),
            "final_parts": self.final_parts,
            "final_exchanges": self.final_exchanges,
            "owes": [self.owes_epoch_end, self.owes_checkpoint],
        }

    def restore(self, state: dict[str, Any], worker_id: str, roster: Roster) -> tuple[Line, ...]:
        """Takes over what was captured: a whole state, `bulk` with `rest`, or `log` alone.

        Returns the ledger lines to write now (see History.copied).
        """
        with self.guard.held():
            if "bulk" in state:
                self.registry.restore_parts(state["bulk"], state["rest"])
            elif "modules" in state:
                self.registry.restore(state)
            self.name = StateName(*state["name"])
            self.remains = Remains.UNTOUCHED
            self.final_parts = state["final_parts"]
            # A checkpoint has none: no worker missed it
            self.final_exchanges = state.get("final_exchanges", 0)
            self.owes_epoch_end, self.owes_checkpoint = state["owes"]
            self.history, due = History.decode(state["history"]).copied(worker_id, roster)
            self.operations.replace(state["operations"], same_step=self._script_step == self.name.step)
            self._script_step = self.name.step
        return due
