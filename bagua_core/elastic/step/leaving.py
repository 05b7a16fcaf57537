"""Leaves the job: at a step boundary in the script's thread, or, where none comes in time, in late_leave.py's.

Says to late_leave_plan.py how the step under way stands, and has the last checkpoint written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bagua_contract import membership_pb2
from bagua_contract.records import Generation
from bagua_core.communication.step_interface import Model
from bagua_core.elastic.checkpoint.job_checkpoints import JobCheckpoints
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.state.committed_state import Remains
from bagua_core.elastic.step.late_leave_plan import FIRST_WRITE_S, Form, LeaveSituation, part_of
from bagua_core.elastic.step.round_end import RoundEnd
from bagua_core.elastic.step.step_states import Phase


class Leaving:
    """Leaves the job, and has the last checkpoint written. commit_here: the part of a commit that needs no other
    worker; called under the guard."""

    def __init__(
        self,
        step: RoundEnd,
        member: Member,
        checkpoints: JobCheckpoints,
        models: Sequence[Model],
        commit_here: Callable[[], None],
    ) -> None:
        self._step = step
        self._member = member
        self._checkpoints = checkpoints
        self._models = models
        self._commit_here = commit_here
        self._leaves = False  # the script's thread leaves by itself

    @property
    def generation_number(self) -> int:
        return self._member.number

    def stepped_out(self, left: Generation, *, keeps_state: bool, together: bool) -> None:
        """Forgets the state, or begins to write the last checkpoint of it. Call it under the guard. The last checkpoint
        is cut in stripes if all members have the same state, else each that is left writes the whole. See host.Host."""
        state = self._step.state
        if left.is_gathering:
            state.operations.clear()
        elif not keeps_state:
            state.forget()
        else:
            place = left.placement_of(self._step.worker_id)
            stripes = place is not None and together and not self._step.newcomers
            replicas = left.world_size // left.replica_size
            part = (place.global_rank // left.replica_size, replicas) if place and stripes else (0, 1)
            with self._step.at_round_begin():
                self._checkpoints.step_aside(left, *part, self._member.session.news.leave_by_s)

    def before_leaving(self) -> membership_pb2.LastCheckpoint | None:
        with self._step.state.guard.held():
            self._leaves = True
        return self._checkpoints.before_leaving(self._member.session.news.leave_by_s)

    def late_situation(self, left_s: float) -> tuple[LeaveSituation, bool]:
        """Returns the situation of this worker, and whether the expected duration of a write was measured. Called while
        the state is read."""
        step, state, member = self._step, self._step.state, self._member
        news, current = member.session.news, member.generation
        newest = news.generation
        goes_on_without = 0
        if newest is not None and newest.members and newest.placement_of(step.worker_id) is None:
            goes_on_without = newest.number if newest.number > member.number else 0
        # Local steps of a round that is not final are not in the state: the models give it back (at_round_begin).
        has_parts = step.in_step and (step.rounds is None or step.is_final)
        expected_s = self._checkpoints.expected_write_s
        situation = LeaveSituation(
            left_s=left_s,
            expected_write_s=expected_s or FIRST_WRITE_S,
            saves=self._checkpoints.is_on,
            over=news.close or self._leaves or step.states.phase is Phase.ENDED,
            at_boundary=member.at_boundary and current is None,
            committed=not state.name.is_none and not step.joining,
            trained=state.name.step > 0,
            joining=step.joining or (current is not None and current.base > 0),
            goes_on_without=goes_on_without,
            phase=step.states.phase,
            resume_point=state.resume_point_is_current,
            backward_open=any(model.is_unfinished for model in self._models),
            stepping=state.guard.stepping,
            provisional=state.guard.provisional,
            parts=max(state.final_parts, step.part if has_parts else 0),
            most_parts=step.most_parts,
            only_optimizers_change=all(model.optimizers for model in self._models)
            and (step.registry.boundary.is_kept or not step.registry.boundary.is_moved()),
        )
        return situation, bool(expected_s)

    def begin_last_write(self, form: Form, leave_by_s: float) -> None:
        """Copies this worker's part of the last checkpoint and has it written. Called while the state is read."""
        step, member = self._step, self._member
        assert member.generation is not None
        if form is Form.AFTER_COMMIT:
            self._commit_here()
        current = member.generation
        part = part_of(
            step.worker_id,
            current,
            member.session.news.generation,
            broken=member.broken,
            copied=bool(step.newcomers),
        )
        at_resume_point = form is Form.AT_RESUME_POINT
        with self._step.at_round_begin():
            self._checkpoints.step_aside(current, *part, leave_by_s, at_resume_point=at_resume_point)

    def end_last_write(self, leave_by_s: float, problem: str) -> membership_pb2.LastCheckpoint | None:
        """Waits for the end of the last write. problem: why it was not begun. Returns None if this worker holds no
        state of the job."""
        return self._checkpoints.before_leaving(leave_by_s, problem)

    def without_write(self) -> membership_pb2.LastCheckpoint | None:
        """Returns the message to the agent if nothing is to be saved. A worker that holds no state says so: there may
        be records, but nothing was committed."""
        state = self._step.state
        never_had_any = state.name.is_none and state.remains in (Remains.UNTOUCHED, Remains.LEFT_OUT)
        return membership_pb2.LastCheckpoint() if never_had_any else None
