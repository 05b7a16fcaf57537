"""Decides which algorithm a model uses under the settings of a generation. Pure.

All workers decide alike: the settings are the generation's, the declared algorithm is part of the fingerprint, and so
are the types of the optimizers.
"""

from __future__ import annotations

from bagua_contract.step_settings import QADAM_TAKES_NO_FROZEN, QADAM_TAKES_NO_SHARDS, StepSettings
from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.algorithms.bytegrad import ByteGrad
from bagua_core.algorithms.gradient_allreduce import GradientAllreduce
from bagua_core.algorithms.qadam import QAdam
from bagua_core.algorithms.qadam_optimizer import QAdamOptimizer
from bagua_core.model.sharded_tensors import is_sharded

Switchable = GradientAllreduce | ByteGrad | QAdam
_BY_NAME: dict[str, type[Switchable]] = {kind.name: kind for kind in (GradientAllreduce, ByteGrad, QAdam)}


def tuned(declared: Algorithm, settings: StepSettings) -> Switchable | None:
    """Returns the algorithm that takes the place of `declared`, the script's own.

    None: `declared` keeps state that cannot be dropped, or is a class of the script's, so settings do not concern it.
    """
    if type(declared) not in _BY_NAME.values():
        return None
    assert isinstance(declared, GradientAllreduce | ByteGrad | QAdam)
    kind = _BY_NAME[settings.algorithm] if settings.algorithm else type(declared)
    hierarchical = settings.hierarchical
    if hierarchical is None:
        hierarchical = declared.hierarchical if kind is type(declared) else kind().hierarchical
    if kind is QAdam:
        own = declared if isinstance(declared, QAdam) else QAdam()
        return QAdam(own.optimizer, hierarchical, own.bits)
    assert issubclass(kind, GradientAllreduce | ByteGrad)
    return kind(hierarchical=hierarchical, average=isinstance(declared, QAdam) or declared.average)


def cannot_take(
    declared: Algorithm, settings: StepSettings, attachment: Attachment, wraps_frozen: bool
) -> str:
    """Returns why a model that can switch cannot use the algorithm of the settings; empty: it can, or takes no
    settings.

    wraps_frozen: some parameters were frozen when the model was wrapped. The script may unfreeze them later, as long as
    its own algorithm is in force.
    """
    if settings.algorithm != QAdam.name or type(declared) not in (GradientAllreduce, ByteGrad):
        return ""
    assert isinstance(declared, GradientAllreduce | ByteGrad)
    optimizers = attachment.optimizers
    stepped = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    if len(optimizers) != 1 or not isinstance(optimizers[0], QAdamOptimizer):
        return "qadam needs bagua.algorithms.QAdamOptimizer as the only optimizer of the model"
    if not stepped.issuperset(map(id, attachment.parameters)):
        return "some of the model's parameters are not its QAdamOptimizer's"
    if any(map(is_sharded, attachment.parameters)):
        return QADAM_TAKES_NO_SHARDS
    if wraps_frozen:
        return QADAM_TAKES_NO_FROZEN
    return "" if declared.average else "qadam averages gradients, and the script asks for their sum"
