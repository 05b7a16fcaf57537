"""Does it pay to cut large parameters into blocks? Steps of both kinds are timed, and the quicker kind stays.

It depends on how often the optimizer passes over memory, and on the machine's caches; results are the same either way.
Knows no clock.
"""

from __future__ import annotations

STEPS_OF_A_KIND = 4  # the first of which lays out, and is not counted
_WORTH_IT = 0.98  # what cutting takes of the time of not cutting, at most


class CutOrNot:
    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self.cuts = True
        self.is_settled = False

    def took(self, seconds: float) -> bool:
        """A step as `cuts` says has taken so long. Returns whether `cuts` is another from now on."""
        if self.is_settled:
            return False
        of_its_kind = self._seconds[self.cuts]
        of_its_kind.append(seconds)
        if len(of_its_kind) < STEPS_OF_A_KIND:
            return False
        if self.cuts:
            self.cuts = False
            return True
        self.is_settled = True
        cut_s, whole_s = (min(self._seconds[kind][1:]) for kind in (True, False))
        self.cuts = cut_s <= _WORTH_IT * whole_s
        return self.cuts
