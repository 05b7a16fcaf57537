"""Holds what the script gives to the job's steps: its models, its loader, and the seed of its random numbers."""

from __future__ import annotations

import sys

import torch

from bagua_contract.step_settings import AS_SCRIPTED, StepSettings
from bagua_core.communication.step_interface import DataSource, Model, StepEngine
from bagua_core.communication.transports.gpu_in_use import gpus_of
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.replica import rehearsal
from bagua_core.elastic.state.committed_state import CommittedState
from bagua_core.elastic.step.deterministic_worker import deterministic_fingerprint
from bagua_core.errors import UserError
from bagua_core.optimizers.optimizer_gate import release


class SecondLoaderError(UserError, RuntimeError):
    """The script iterated a second loader, but only one loader of a job defines its steps."""


class ScriptInputs:
    """Holds the script's models, loader and seed. member None: a world of one."""

    def __init__(self, state: CommittedState, member: Member | None, virtual_shards: int = 0) -> None:
        self._virtual_shards = virtual_shards
        self._state = state
        self._registry = state.registry
        self._member = member
        self.models: list[Model] = []
        self.source: DataSource | None = None
        self.seed: int | None = None  # the script's; None until the first boundary
        self._settings = AS_SCRIPTED  # of the generation in force
        self._told_order: tuple[int, ...] = ()
        self._told_times: tuple[tuple[int, float], ...] = ()
        self._unused = ""  # what was said of settings without effect
        self._is_rehearsed = False

    def attach_source(self, source: DataSource, *, has_begun: bool) -> None:
        """Makes `source` the loader of the job. has_begun: a step has begun before. Raises SecondLoaderError."""
        if self.source is source:
            return
        if self.source is not None:  # also before the first step: its epochs may be under way
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

    @property
    def place_in_replica(self) -> tuple[int, int]:
        """The place of this worker among those of its replica that get samples of their own, and their number; (0, 1)
        without a loader. See DataSource."""
        return (0, 1) if self.source is None else self.source.place_in_replica

    def generation_entered(self, settings: StepSettings) -> None:
        """Has every model use the generation's communicator and settings from now on."""
        self._settings = settings
        for model in self.models:
            self._tune(model)
            model.communicator_changed()

    def _tune(self, model: Model) -> None:
        unused = model.use_settings(self._settings)
        if unused and unused != self._unused:
            self._unused = unused
            print(f"bagua: settings without effect ({self._settings}): {unused}", file=sys.stderr, flush=True)

    def new_order(self) -> tuple[int, ...]:
        """Returns the measured order of the gradients of the model that was wrapped first, once for each measurement;
        empty if there is nothing new."""
        order = self.models[0].readiness if self.models else ()
        if order == self._told_order:
            return ()
        self._told_order = order
        return order

    def new_bucket_times(self) -> tuple[tuple[int, float], ...]:
        """Returns the measured times of the same model's buckets, once for each measurement; empty if there is nothing
        new."""
        times = self.models[0].bucket_times if self.models else ()
        if times == self._told_times:
            return ()
        self._told_times = times
        return times

    def attach_model(self, model: Model) -> None:
        self._tune(model)
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
        """Gives models, optimizers and registered objects back to the script alone, since the training is over."""
        optimizers, registered = list(self._registry.optimizers), list(self._registry.registered.values())
        for model in list(self.models):
            model.detach()
        for gated in (*optimizers, *registered):
            release(gated, engine)
        if self.source is not None:
            self.source.training_over()

    def note_gpus(self, member: Member) -> None:
        """Notes the GPUs that generations that are built from now on should reach."""
        member.rendezvous.gpus = gpus_of(p for model in self._registry.models for p in model.parameters())

    def prepare_entry(self, member: Member) -> None:
        """Notes the GPUs at a boundary before a generation is entered, since models may have been moved. A worker of a
        replica that is about to report that it is ready to join prepares what others would wait for in its first
        step."""
        self.note_gpus(member)
        if self._is_rehearsed or member.generation is not None or member.replica is None:
            return
        self._is_rehearsed = True
        for reason in rehearsal.rehearse(self._registry.optimizers).failed:
            print(f"bagua: an optimizer's first step is not rehearsed: {reason}", file=sys.stderr, flush=True)

    def fingerprint(self) -> dict[str, str]:
        self._registry.check_travels()
        source = self.source.fingerprint() if self.source is not None else {"loader": "none"}
        return {
            **self._registry.fingerprint(),
            **source,
            "algorithm": ", ".join(m.algorithm_name for m in self.models) or "none",
            "torch": ".".join(torch.__version__.split(".")[:2]),
            **deterministic_fingerprint(self._virtual_shards),
        }

    def parameters(self) -> list[torch.Tensor]:
        """Returns what must be the same on all ranks: the very parameters, whatever memory a script gives them
        later."""
        if not self._registry.equal_states:
            return []
        return self._registry.parameters()
