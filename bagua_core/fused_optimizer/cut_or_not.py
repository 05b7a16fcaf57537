"""Does it pay to cut large parameters into blocks? Steps of both kinds are timed, and the quicker kind stays.

It depends on how often the optimizer passes over memory, and on the machine's caches; results are the same either way.
The kinds take turns, so that something else that keeps the machine busy for a while does not decide. Knows no clock.
"""

from __future__ import annotations

STEPS_OF_A_TURN = 3  # the first of which lays out, and is not counted
TURNS = 4  # cut, whole, cut, whole
STEPS_TO_SETTLE = TURNS * STEPS_OF_A_TURN
_WORTH_IT = 0.98  # what cutting takes of the time of not cutting, at most


class CutOrNot:
    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._steps = 0
        self.cuts = True

    @property
    def is_settled(self) -> bool:
        return self._steps == STEPS_TO_SETTLE

    def took(self, seconds: float) -> bool:
        """A step as `cuts` says has taken so long. Returns whether `cuts` is another from now on."""
        if self.is_settled:
            return False
        if self._steps % STEPS_OF_A_TURN:
            self._seconds[self.cuts].append(seconds)
        self._steps += 1
        if self._steps % STEPS_OF_A_TURN:
            return False
        did = self.cuts
        if self.is_settled:
            cut_s, whole_s = (min(self._seconds[kind]) for kind in (True, False))
            self.cuts = cut_s <= _WORTH_IT * whole_s
        else:
            self.cuts = not did
        return self.cuts is not did
