"""What is committed on this worker, under which name, and how does it travel as one value?

Owns the name, the loader's position, the history, the results of collectives outside steps and the optimizer steps
that are final, beside the registry's models and optimizers. Knows no peers: who copies from whom is heal_plan.py's,
when a step commits the engine's. Invariant: while `half` says so, the name is none.
"""

from __future__ import annotations

from typing import Any

from bagua_contract.records import StateName
from bagua_core.elastic.commit_history import History, Line, Roster
from bagua_core.elastic.heal_plan import HalfCopy
from bagua_core.elastic.operations import OperationLog
from bagua_core.elastic.state_registry import StateRegistry


class CommittedState:
    def __init__(self) -> None:
        self.registry = StateRegistry()
        self.operations = OperationLog()
        self.name = StateName()
        self.position = {"epoch": 0, "batch": 0}
        self.history = History()
        self.final_parts = 0  # optimizer steps of the step under way that are final, even if it fails later
        self.half = HalfCopy.NONE
        self._script_step = 0  # the step after which the script asked for what `operations` holds

    def step_committed(self, generation: int) -> None:
        self.name = StateName(generation, self.name.step + 1, 0)
        self._script_step = self.name.step
        self.final_parts = 0
        self.operations.clear()

    def part_committed(self, generation: int, part: int) -> None:
        """A state between two steps: further than the last commit, behind the next."""
        self.final_parts = part
        self.name = StateName(generation, self.name.step, self.name.operations + 1)

    def operation_committed(self, generation: int, index: int) -> None:
        self.name = StateName(generation, self.name.step, index + 1)

    def forget(self) -> None:
        """What this worker holds is not the job's any more."""
        self._be_none()
        self._script_step = 0

    def declare_stateless(self, half: HalfCopy) -> None:
        """A copy begins to write over the live state. The script's place, maybe in a collective, stays."""
        self._be_none()
        self.half = max(self.half, half)

    def _be_none(self) -> None:
        self.name = StateName()
        self.history = History()
        self.operations.forget()
        self.final_parts = 0

    # -- travelling

    @property
    def size_bytes(self) -> int:
        """About what a copy of it takes; the small things beside the tensors are left out."""
        total = 0
        for tensors in self.registry.capture_modules():
            total += sum(t.nbytes for t in tensors.values())
        for optimizer in self.registry.optimizers:
            for of_one in optimizer.state.values():
                total += sum(getattr(value, "nbytes", 0) for value in of_one.values())
        return total

    def live(self) -> dict[str, Any]:
        """The part of `capture` that is live memory: parameters, buffers and optimizers."""
        captured = self.registry.capture()
        return {"modules": captured["modules"], "optimizers": captured["optimizers"]}

    def capture(self) -> dict[str, Any]:
        """All of it as nested plain values and tensors. Parameters and optimizer state are the live ones: whoever
        reads them does so before the next optimizer step."""
        state = self.registry.capture()
        # A forward pass may change buffers while the copy is under way; parameters wait for it.
        state["modules"] = [
            {n: t.clone() if n.startswith("buffer.") else t for n, t in tensors.items()}
            for tensors in state["modules"]
        ]
        state["name"] = [self.name.generation, self.name.step, self.name.operations]
        state["history"] = self.history.encode()
        state["operations"] = self.operations.results()
        state["final_parts"] = self.final_parts
        return state

    def restore(self, state: dict[str, Any], worker_id: str, roster: Roster) -> tuple[Line, ...]:
        """Take over a captured state. Returns the ledger lines to write now (see History.copied)."""
        self.registry.restore(state)
        self.name = StateName(*state["name"])
        self.half = HalfCopy.NONE
        self.final_parts = state["final_parts"]
        self.history, due = History.decode(state["history"]).copied(worker_id, roster)
        self.operations.replace(state["operations"], same_step=self._script_step == self.name.step)
        self._script_step = self.name.step
        return due
