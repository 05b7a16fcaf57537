"""What the script gives to the job's steps: its models, its loader, and the seed of its random numbers."""

from __future__ import annotations

import torch

from bagua_core.communication.step_interface import DataSource, Model, StepEngine
from bagua_core.communication.transports.gpu_in_use import gpus_of
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.state.committed_state import CommittedState
from bagua_core.errors import UserError
from bagua_core.optimizers.optimizer_gate import release


class SecondLoaderError(UserError, RuntimeError):
    """Two loaders in one job: one of them defines the steps."""


class Given:
    """member None: a world of one."""

    def __init__(self, state: CommittedState, member: Member | None) -> None:
        self._state = state
        self._registry = state.registry
        self._member = member
        self.models: list[Model] = []
        self.source: DataSource | None = None
        self.seed: int | None = None  # the script's; None until the first boundary

    def attach_source(self, source: DataSource, *, has_begun: bool) -> None:
        """has_begun: some step has. Raises SecondLoaderError."""
        if self.source is source:
            return
        if self.source is not None and has_begun:
            raise SecondLoaderError(
                "a second ElasticDataLoader was iterated; one loader defines the job's steps. "
                "Use a plain torch DataLoader for evaluation, and bagua.shutdown() before another training"
            )
        self.source = source
        self.seed = int(source.fingerprint().get("seed", "0"))
        if has_begun:
            source.seek(self._state.position)
        else:
            # a script may begin elsewhere than at the first batch
            self._state.position = dict(source.position())

    def attach_model(self, model: Model) -> None:
        self.models.append(model)
        self._registry.add_model(
            model.module, model.optimizers, model.travelling, model.equal_states, model.put_gradient
        )
        if self._member is not None:
            self._member.rendezvous.lanes |= model.lanes
            self.note_gpus(self._member)

    def detach_model(self, model: Model) -> None:
        self.models.remove(model)
        self._registry.remove_model(model.module, [o for other in self.models for o in other.optimizers])

    def release(self, engine: StepEngine) -> None:
        """The training is over: models, optimizers and registered objects are the script's alone again."""
        optimizers, registered = list(self._registry.optimizers), list(self._registry.registered.values())
        for model in list(self.models):
            model.detach()
        for gated in (*optimizers, *registered):
            release(gated, engine)
        if self.source is not None:
            self.source.training_over()

    def note_gpus(self, member: Member) -> None:
        """What generations that are built from now on should reach."""
        member.rendezvous.gpus = gpus_of(
            p for model in self._registry.models for p in model.module.parameters()
        )

    def fingerprint(self) -> dict[str, str]:
        self._registry.check_travels()
        source = self.source.fingerprint() if self.source is not None else {"loader": "none"}
        return {
            **self._registry.fingerprint(),
            **source,
            "algorithm": ", ".join(m.algorithm_name for m in self.models) or "none",
            "torch": ".".join(torch.__version__.split(".")[:2]),
        }

    def parameters(self) -> list[torch.nn.Parameter]:
        """What must be the same on all ranks: the very ones, whatever memory a script gives them later."""
        if not self._registry.equal_states:
            return []
        return [p for model in self._registry.models for p in model.module.parameters()]
