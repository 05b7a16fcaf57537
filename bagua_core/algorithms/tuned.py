"""Decides which algorithm a model uses under the settings of a generation. Pure.

All workers decide alike: the settings are the generation's, and the declared algorithm is part of the fingerprint.
"""

from __future__ import annotations

from bagua_contract.step_settings import StepSettings
from bagua_core.algorithms.algorithm import Algorithm
from bagua_core.algorithms.bytegrad import ByteGrad
from bagua_core.algorithms.gradient_allreduce import GradientAllreduce

Switchable = GradientAllreduce | ByteGrad
_BY_NAME: dict[str, type[GradientAllreduce] | type[ByteGrad]] = {
    kind.name: kind for kind in (GradientAllreduce, ByteGrad)
}


def tuned(declared: Algorithm, settings: StepSettings) -> Switchable | None:
    """The algorithm that takes the place of `declared`, the script's own.

    None: `declared` keeps state from step to step, or is a class of the script's, so settings do not concern it.
    """
    if type(declared) not in _BY_NAME.values():
        return None
    assert isinstance(declared, GradientAllreduce | ByteGrad)
    kind = _BY_NAME[settings.algorithm] if settings.algorithm else type(declared)
    hierarchical = settings.hierarchical
    if hierarchical is None:
        hierarchical = declared.hierarchical if kind is type(declared) else kind().hierarchical
    return kind(hierarchical=hierarchical, average=declared.average)
