"""Decides what a worker does that was asked to leave and has not come to a step boundary. Pure.

A worker leaves at a boundary if it reaches one in time. One that evaluates, compiles or waits for a peer that does so
is ended by its agent when the grace period is over. Shortly before that a thread of the runtime (late_leave.py) leaves
in its place, as decided here: it saves the committed state, or says why it can't.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bagua_contract.records import Generation, GenerationKind
from bagua_core.elastic.step.step_states import IN_STEP, Phase

MARGIN_S = 2.0
"""Between the expected end of the write and the time at which the worker has to be gone. The write may take longer than
expected, and the script's handlers run after it."""
FIRST_WRITE_S = 5.0
"""How long a part is expected to take before this worker has written one."""


class Act(Enum):
    WAIT = "wait"  # for a boundary, or until the state can be read
    STAND_BACK = "stand back"  # the script's thread leaves by itself, or the job is over
    LEAVE = "leave"  # there is nothing to save
    SAVE = "save"  # then leave
    GIVE_UP = "give up"  # leave without having saved the state


class Form(Enum):
    """Says which values in memory are the committed state."""

    AS_IT_IS = "as it is"  # between two steps
    AT_RESUME_POINT = "at the resume point"  # in a step before its first optimizer step
    AFTER_COMMIT = "after the commit"  # all optimizer steps of the step are done: commit it first


@dataclass(frozen=True, slots=True)
class LeaveSituation:
    """A worker that its agent asked to leave.

    left_s: until it has to be gone. expected_write_s: of its part of the last checkpoint.
    """

    left_s: float
    expected_write_s: float
    saves: bool = True  # there is a checkpoint directory
    over: bool = False  # the job is closing, or this worker has stepped aside or ended
    at_boundary: bool = False  # the script waits there, in no generation
    committed: bool = True  # it has the job's state, if only what collectives before the first step gave
    trained: bool = True  # at least one step is committed
    joining: bool = False  # it is to copy the job's state from others
    goes_on_without: int = 0  # number of a newer generation, not empty, that leaves it out; 0: none
    phase: Phase = Phase.BETWEEN
    resume_point: bool = False  # the snapshot is of the step under way, or of the announced one
    backward_open: bool = False  # a backward of the step began and was not finished
    stepping: bool = False  # an optimizer is changing parameters
    provisional: bool = False  # an exchange of weights has changed them, and may be undone
    parts: int = 0  # optimizer steps of the step under way that are final
    most_parts: int = 0  # in any step that this worker committed; 0: none was seen
    only_optimizers_change: bool = True  # each model has an optimizer, so nothing else is known to change it


@dataclass(frozen=True, slots=True)
class Plan:
    act: Act
    reason: str
    form: Form = Form.AS_IT_IS


def decide(s: LeaveSituation) -> Plan:
    """Decides what to do now. Called again until it returns anything but WAIT."""
    if s.over:
        return Plan(Act.STAND_BACK, "the script's thread leaves by itself")
    if s.at_boundary:
        return Plan(Act.WAIT, "the script waits at a boundary and is in no generation: it leaves from there")
    if not s.committed and not s.joining:
        return Plan(Act.LEAVE, "the node leaves before the first step, so there is nothing to save")
    awaits_boundary = s.trained or s.joining
    writes = s.saves and s.committed and not s.goes_on_without
    if awaits_boundary and s.left_s > (s.expected_write_s if writes else 0.0) + MARGIN_S:
        return Plan(Act.WAIT, "the script may reach a boundary in time")
    if s.goes_on_without:
        return Plan(
            Act.LEAVE, f"the node leaves, and generation {s.goes_on_without} goes on without this worker"
        )
    if not s.committed:
        return Plan(Act.LEAVE, "the node leaves, and this worker holds no state of the job yet")
    if not s.saves:
        return Plan(Act.LEAVE, "the node leaves, and there is no --checkpoint-dir")
    problem, form = _form(s)
    if not problem:
        return Plan(Act.SAVE, "the script did not reach a step boundary in time", form)
    return unreadable(s.left_s, problem)


def unreadable(left_s: float, problem: str) -> Plan:
    """Returns the plan while the state, or the situation, can't be read."""
    return Plan(Act.WAIT if left_s > MARGIN_S else Act.GIVE_UP, problem)


def _form(s: LeaveSituation) -> tuple[str, Form]:
    """Returns why the committed state is not in memory, empty if it is, and the form in which it is."""
    if s.stepping:
        return "an optimizer is changing the parameters", Form.AS_IT_IS
    if s.phase not in IN_STEP:
        if s.parts:
            return "the first optimizer steps of a step are done and the others are not", Form.AS_IT_IS
        return "", Form.AT_RESUME_POINT if s.resume_point else Form.AS_IT_IS
    if s.phase is Phase.FINAL and not s.backward_open and 0 < s.most_parts <= s.parts:
        return "", Form.AFTER_COMMIT
    if s.parts:
        return f"{s.parts} optimizer steps of a step are done, and more may follow in it", Form.AS_IT_IS
    if s.provisional:
        return "the weights have been exchanged in a step that is not final", Form.AS_IT_IS
    if s.phase is Phase.FINAL and not s.only_optimizers_change:
        return "a model without an optimizer may have been changed since its last step", Form.AS_IT_IS
    return "", Form.AT_RESUME_POINT


def part_of(
    worker_id: str, current: Generation, newest: Generation | None, *, broken: bool, copied: bool
) -> tuple[int, int]:
    """Returns this worker's place among those that write the state, and how many these are.

    Each writes a stripe if all members of `current` do. It writes the whole if some may have another state, after a
    loss, or none; or if they need not save theirs, because a newer generation goes on without them.
    broken: the communicator of `current`. copied: a member of it copies the state.
    """
    place = current.placement_of(worker_id)
    if place is None or broken or copied:
        return 0, 1
    if newest is not None and newest.number > current.number:
        lists_all = all(newest.placement_of(m.worker_id) is not None for m in current.members)
        if newest.kind is GenerationKind.FAILOVER or (newest.members and not lists_all):
            return 0, 1
    return place.global_rank, current.world_size


def grace_warning(s: LeaveSituation, *, measured: bool) -> str:
    """Returns a warning for the moment of the request to leave, if the state could not be written within the grace
    period; empty if it could."""
    if not s.saves or not s.committed or s.left_s >= s.expected_write_s + MARGIN_S:
        return ""
    known = "as the last one did" if measured else "assumed, since none was written yet"
    return (
        f"the grace period is short: this worker has {max(0.0, s.left_s):.1f} s to leave, and its part of a checkpoint "
        f"takes about {s.expected_write_s:.1f} s ({known}), so a leave outside the loop may not save the state; "
        "give a longer --shutdown-timeout"
    )
