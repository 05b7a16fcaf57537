"""Decides which generation this worker enters next. Pure.

Knows nothing of communicators, heals or the store. `floor` is the newest generation that this worker can't
use any more: it failed to enter it, or was in it and it broke.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from bagua_contract.records import Generation, GenerationKind


class Move(Enum):
    STAY = "stay"  # the generation in force goes on
    ENTER = "enter"
    WAIT = "wait"  # for another record
    STEP_OUT = "step out"  # a generation without this worker took effect: it holds nothing now
    REPORT_MISSED = "report missed"  # the others wait for it in a generation whose record it never saw
    END = "end"  # exit code 0


class FollowingSituation(NamedTuple):
    worker_id: str
    current: Generation | None  # in force here
    broken: bool  # its communicator can't be used any more
    agreed: Generation | None  # all members brought this pending generation
    newest: Generation | None
    floor: int = 0
    leaving: bool = False
    closed: bool = False


class NextMove(NamedTuple):
    move: Move
    reason: str
    generation: Generation | None = None


_STAY = NextMove(Move.STAY, "nothing new")


def decide(s: FollowingSituation) -> NextMove:
    """Decides what this worker does at a boundary, or while it waits for one."""
    if s.current is None:
        return _newcomer(s)
    if s.current.is_gathering:
        return _gathered(s, s.current)
    if (
        s.newest is not None
        and s.newest.kind is GenerationKind.FAILOVER
        and s.newest.number > s.current.number
    ):
        return _towards(s, s.newest)
    if s.newest is not None and s.newest.base > (s.agreed or s.current).number:
        return _missed(s.current, s.newest, s.worker_id)
    if s.broken:
        if s.closed:
            return NextMove(Move.END, "the job is closing and its last generation broke")
        return NextMove(Move.WAIT, f"generation {s.current.number} is broken; waiting for the next")
    if s.agreed is not None:
        return _towards(s, s.agreed)
    return _STAY


def _gathered(s: FollowingSituation, current: Generation) -> NextMove:
    """Decides before the loop. The first generation follows once all members are at their first step boundary."""
    if s.closed:
        return NextMove(Move.END, "the job is closing and needs no more workers")
    if s.newest is not None and s.newest.number > current.number:
        if s.newest.is_gathering:
            return NextMove(Move.WAIT, "the job's first workers start again: the agent ends this one")
        return NextMove(Move.STEP_OUT, f"generation {s.newest.number} begins the loop", s.newest)
    if s.leaving:
        return NextMove(Move.END, "the node leaves before the first step")
    return NextMove(Move.WAIT, "waiting for all workers to come to their first step")


def _newcomer(s: FollowingSituation) -> NextMove:
    newest = s.newest
    placement = newest.placement_of(s.worker_id) if newest is not None else None
    if newest is not None and placement is not None and newest.number > s.floor:
        if newest.kind is GenerationKind.PLANNED and 0 < placement.since_generation <= newest.base:
            return NextMove(
                Move.REPORT_MISSED, f"generation {newest.base} listed this worker, which never saw it", newest
            )
        return NextMove(Move.ENTER, f"generation {newest.number} lists this worker", newest)
    if s.closed:
        return NextMove(Move.END, "the job is closing and needs no more workers")
    if s.leaving:
        return NextMove(Move.END, "the node leaves and no generation in force lists this worker")
    return NextMove(Move.WAIT, "waiting to be listed in a generation")


def _missed(current: Generation, newest: Generation, worker_id: str) -> NextMove:
    """Decides after a planned record that follows a generation that this worker never entered: a record was missed, for
    the watch was away meanwhile and shows only the newest one."""
    placement = newest.placement_of(worker_id)
    if placement is None or placement.since_generation > current.number:
        return NextMove(Move.STEP_OUT, f"generation {newest.base} left this worker out", newest)
    return NextMove(
        Move.REPORT_MISSED, f"generation {newest.base} listed this worker, which never saw it", newest
    )


def _towards(s: FollowingSituation, generation: Generation) -> NextMove:
    placement = generation.placement_of(s.worker_id)
    assert s.current is not None
    if placement is not None and placement.since_generation > s.current.number and generation is not s.agreed:
        return NextMove(
            Move.STEP_OUT, f"a generation before {generation.number} left this worker out", generation
        )
    if placement is None:
        return NextMove(Move.STEP_OUT, f"generation {generation.number} leaves this worker out", generation)
    if generation.number <= s.floor:
        return NextMove(
            Move.WAIT, f"generation {generation.number} could not be entered; waiting for the next"
        )
    return NextMove(Move.ENTER, f"generation {generation.number} takes effect", generation)


def is_superseded(entering: Generation, newest: Generation | None, *, newcomer: bool) -> bool:
    """Tells whether to stop entering `entering`. A joiner follows any newer record; a member of the generation before,
    having switched with all others, only a loss: a newer planned one cannot have been agreed without it. One that
    follows a later generation than `entering` shows that a loss was missed."""
    if newest is None or newest.number <= entering.number:
        return False
    return newcomer or newest.kind is GenerationKind.FAILOVER or newest.base > entering.number
