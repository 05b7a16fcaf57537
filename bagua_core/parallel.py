"""Provides DistributedDataParallel, which wraps a script's model: the counterpart of torch's.

Owns the wiring of one model: its algorithm's reducer, its buffers, the gates on its optimizers. The engine decides
when a step begins, commits or fails.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from bagua_contract.step_settings import AS_SCRIPTED, StepSettings, frozen_note
from bagua_core import tracing
from bagua_core.algorithms import Algorithm, Attachment, find_algorithm
from bagua_core.algorithms.qadam_optimizer import QAdamOptimizer
from bagua_core.algorithms.tuned import cannot_take, tuned
from bagua_core.communication.communicator import CollectiveFailed, Communicator, Lane
from bagua_core.communication.reduction.buckets import DEFAULT_BUCKET_CAP_MB
from bagua_core.communication.reduction.buffer_broadcast import broadcast_buffers as share_buffers
from bagua_core.communication.reduction.contributions import SparseGradientError
from bagua_core.communication.reduction.model_turns import model_turns_of
from bagua_core.communication.step_interface import StepEngine
from bagua_core.errors import TrainingOver
from bagua_core.model import torch_ddp_names
from bagua_core.model.backward_begin import announce_backward, scale_gradients
from bagua_core.model.filler_buffers import FillerBuffers
from bagua_core.model.module_buffers import ModuleBuffers
from bagua_core.model.optimizer_steps import optimizer_steps_of
from bagua_core.model.sharded_modules import (
    check_unsynchronized,
    drop_gathered,
    drop_unsynchronized,
    sharded_modules,
)
from bagua_core.model.sharded_tensors import is_sharded
from bagua_core.optimizers.optimizer_gate import gate_optimizer
from bagua_core.optimizers.script_checks import checked_optimizers, checks_of
from bagua_core.optimizers.step_rates import StepRates
from bagua_core.shard_model import ModelOfShards
from bagua_core.sync_batchnorm import SyncBatchNorm

_NO_FILLERS = nullcontext()


class DistributedDataParallel(nn.Module):
    """Wraps `module`, which all workers of the job train together.

    algorithm: how gradients or weights are shared: a name of algorithms.algorithm_names(), or an Algorithm with
    arguments of its own.
    bucket_cap_mb: MiB of a bucket, the unit in which gradients are sent.
    optimizers: those that step on its parameters; their step() does nothing when the job's step failed, and joiners
    receive their state. None: no torch optimizer steps on this model.
    broadcast_buffers: rank 0's buffers are used by all from the start of each training forward.
    find_unused_parameters: one that took part on no rank keeps a .grad of None instead of zero, for optimizers that
    move a parameter whose gradient is zero (weight decay, momentum).
    engine: this process's if None.
    unknown: arguments of torch's that this one lacks, for an error that names what replaces each.
    Raises ValueError (nothing to train, no optimizers, unknown algorithm, layers of torch.nn.SyncBatchNorm), TypeError
    and SparseGradientError.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] | None = (),
        algorithm: str | Algorithm = "gradient_allreduce",
        bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        engine: StepEngine | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise TypeError(torch_ddp_names.unknown_arguments(list(unknown)))
        _check_trainable(module)
        chosen = find_algorithm(algorithm)
        if engine is None:
            from bagua_core.elastic.step import runtime

            engine = runtime.engine()
        self.module = module
        self.optimizers = checked_optimizers(optimizers)
        self.algorithm = chosen
        self.broadcast_buffers = broadcast_buffers
        self._module_buffers = ModuleBuffers(module)
        self._had_buffers = bool(self._module_buffers.current())  # when it was wrapped
        self._sharded = sharded_modules(module)
        self._gathered_in: object = None  # the plan of the step that has begun with sharded parameters alone
        self.is_detached = False
        self._reductions_before: int | None = 0  # when the step under way began
        self.require_backward_grad_sync = True
        self._engine = engine
        self._optimizer_steps = optimizer_steps_of(engine)
        if not chosen.equal_states:
            self._optimizer_steps.leave_uncompared()
        parameters = {id(p): p for p in module.parameters() if p.requires_grad}
        self._reduced_ids = frozenset(parameters)
        self._candidates = tuple(module.named_parameters())
        self._module_parameters = [p for _, p in self._candidates]
        self._choice = self._wrapped_with = bytes([p.requires_grad for p in self._module_parameters])
        if not parameters:
            raise ValueError("no parameter requires a gradient; there is nothing to train")
        if optimizers is not None and not self.optimizers:
            raise ValueError(
                "optimizers is empty, so a failed step would still change the parameters, and workers that join would "
                "not receive the optimizer's state; pass optimizers=[optimizer], or optimizers=None if no torch "
                "optimizer steps on this model"
            )
        if chosen.round_steps is not None and self._has_sync_batch_norm:
            raise ValueError(
                "SyncBatchNorm communicates in every forward, and in a round each worker is at another place; use "
                'torch.nn.BatchNorm1d and the like, or the algorithm with unit="step"'
            )
        checks_of(engine).check_unshared(self, parameters.values())
        tensors = [*module.parameters(), *module.buffers()]
        if any(is_sharded(t) for t in tensors):
            engine.share_in_replica([t for t in tensors if not is_sharded(t)])
        self._rates = StepRates(self.optimizers)
        self._shards = ModelOfShards(module, chosen) if engine.virtual_shards else None
        self._bucket_cap_bytes = int(bucket_cap_mb * 1024 * 1024)
        self._settings = AS_SCRIPTED
        self._attachment = Attachment(
            tuple(parameters.values()),
            self.optimizers,
            engine,
            self._bucket_cap_bytes,
            find_unused_parameters,
            None if self._shards is None else self._shards.buffers,
        )
        self._exchange = chosen.attach(self._attachment)
        self._turns = model_turns_of(engine)
        self._number = self._turns.add(type(module).__name__)
        self._exchange.be_model(self._number)
        for optimizer in self.optimizers:
            gate_optimizer(optimizer, engine)
        checks_of(engine).add(self)
        engine.attach_model(self)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Returns what the module returns. With gradients enabled it begins a micro-batch of the step."""
        if self.is_detached:
            return self._forward_alone(*inputs, **keywords)
        engine = self._engine
        if torch.is_grad_enabled():
            engine.forward_begins()
            if self._sharded and self._gathered_in is not engine.plan:
                self._gathered_in = engine.plan
                if engine.communicator() is not None and not engine.step_failed:
                    check_unsynchronized(self._sharded)
                drop_gathered(self._sharded)
            # decided here and not in backward, as torch does: no_sync must cover the forward
            self._exchange.synced = self.require_backward_grad_sync
            runs = not engine.step_failed
            if runs:
                self._note_trained()
            each_forward = self.training and self.broadcast_buffers and self.require_backward_grad_sync
            shares_buffers = each_forward and self.round_steps is None and self._shards is None
            if runs and engine.in_step:
                self._take_turn(shares_buffers)
                if not engine.step_failed:
                    self._rates.check(engine.plan, engine.micro_batch)
                    self._exchange.forward_begins()
            if shares_buffers:
                self._broadcast_buffers()
                if self._sharded and engine.in_step:
                    # its workers may have trained on different samples; all of them come here, whatever has failed
                    engine.share_in_replica(self._module_buffers.current())
        elif self._shards is not None and engine.in_step:
            self._shards.buffers.check_without_gradients()
        fillers = self.filler_buffers()
        with tracing.span("forward"), _NO_FILLERS if fillers is None else fillers.kept():
            outputs = self.module(*inputs, **keywords)
        if torch.is_grad_enabled() and engine.in_step:
            announce_backward(outputs, engine.backward_begins)
            if fillers is not None:
                announce_backward(outputs, fillers.backward_begins)
            if self._sharded and engine.micro_batch.part != 1.0:
                scale_gradients(outputs, engine.micro_batch.part)
        return outputs

    def detach(self) -> None:
        """Takes the module out of the job between two steps, so that it can be wrapped anew. All workers must call it
        at the same place; this object trains nothing any more. Doing it twice is harmless."""
        if self.is_detached:
            return
        self.is_detached = True
        self._exchange.close()
        self._turns.remove(self._number)
        checks_of(self._engine).remove(self)
        self._engine.detach_model(self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Makes a copy (copy.deepcopy, AveragedModel) or a pickled form, with a module of its own, which no job
        trains."""
        return _detached, (self.module, self.training)

    def _forward_alone(self, *inputs: Any, **keywords: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            raise TrainingOver(
                f"this wrapper of a {type(self.module).__name__} does not train: its training is over, its module was "
                "wrapped anew, or it is a copy; wrap the module again, or evaluate under torch.no_grad()"
            )
        return self.module(*inputs, **keywords)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps gradients of forwards in here local; they are reduced with the next backward outside.

        Raises NotDeterministicError in a deterministic job.
        """
        if self._shards is not None:
            self._shards.refuse_no_sync()
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses torch's join for uneven inputs, which is not offered. Raises NotImplementedError."""
        raise NotImplementedError(torch_ddp_names.JOIN)

    join_hook = join

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Refuses a hook, which is not offered after the wrapping. Raises NotImplementedError."""
        raise NotImplementedError(torch_ddp_names.REGISTER_COMM_HOOK)

    @property
    def is_unfinished(self) -> bool:
        """Whether a backward began and never ended, so that peers may wait for buckets of it."""
        return self._exchange.is_unfinished

    @property
    def layout_version(self) -> int:
        """A number that changes when `reduces` may answer differently."""
        return self._exchange.layout_version

    def reduces(self, parameter: torch.Tensor) -> bool:
        """Tells whether the model's algorithm acts on this parameter's gradient."""
        known = self._exchange.reduces(parameter)
        return id(parameter) in self._reduced_ids if known is None else known

    def unreduced(self) -> str | None:
        """Returns why .grad may not be the job's gradient at this moment; None if it is."""
        exchange = self._exchange
        if not self.equal_states or exchange.reductions is None:
            return None  # each rank trains on its own gradients
        if exchange.is_unfinished:
            return "the backward of the model is still under way"
        if exchange.has_local_gradients:
            return "a backward under no_sync() was followed by none outside it"
        if exchange.reductions == self._reductions_before and self._engine.communicator() is not None:
            return "no backward of the model ran in this step"
        return None

    def holds_reduced(self, parameter: torch.Tensor) -> bool:
        """Tells whether .grad is the memory that a reduction left there."""
        return self._exchange.holds_reduced(parameter)

    @property
    def algorithm_name(self) -> str:
        """The algorithm, with what must agree on all workers: they must wrap the model with the same parameters
        frozen."""
        trained, count = sum(self._wrapped_with), len(self._wrapped_with)
        if trained == count:
            return self.algorithm.described
        digest = hashlib.sha256(self._wrapped_with).hexdigest()[:8]
        return self.algorithm.described + frozen_note(count - trained, count, digest)

    @property
    def has_local_gradients(self) -> bool:
        """Whether .grad holds contributions of this rank alone, of backwards since the last reduction."""
        return self._exchange.has_local_gradients

    @property
    def equal_states(self) -> bool:
        """Whether all ranks hold the same parameters after each step."""
        return self.algorithm.equal_states

    @property
    def lanes(self) -> frozenset[Lane]:
        """The lanes that each generation's communicator must bring for the model."""
        own = {Lane.STATISTICS} if self._has_sync_batch_norm else set()
        return self.algorithm.lanes | own

    @property
    def _has_sync_batch_norm(self) -> bool:
        return any(isinstance(m, SyncBatchNorm) for m in self.module.modules())

    @property
    def round_steps(self) -> int | None:
        """The number of local steps of a round, if the round is the algorithm's unit of commit."""
        return self.algorithm.round_steps

    def copy_begins(self) -> None:
        """Notes that the state is about to be read for workers that joined. See Exchange.copy_begins."""
        self._exchange.copy_begins()

    def close_round(self, communicator: Communicator | None, weight: float, source: int) -> None:
        """Ends the round's local steps. Buffers become those of rank `source`, as they become rank 0's in each forward
        of other algorithms."""
        buffers = self._module_buffers.current()
        if communicator is not None and self._has_buffers_to_share and self.broadcast_buffers:
            unseen = self._module_buffers.statistics()
            share_buffers(
                buffers,
                communicator,
                self._engine.wait,
                vote_follows=False,  # a close that fails gives no buffers back
                unseen=unseen,
                source=source,
                may_differ=bool(self._engine.plan.healing),
            )
        self._exchange.close_round(communicator, weight)

    def at_round_begin(self) -> AbstractContextManager[None]:
        """Returns a context in which the model has the parameters with which the round under way began."""
        return self._exchange.at_round_begin()

    def use_settings(self, settings: StepSettings) -> str:
        """Uses `settings`, and returns why they have no effect on this model. See step_interface.Model."""
        wraps_frozen = not all(self._wrapped_with)
        if why_not := cannot_take(self.algorithm, settings, self._attachment, wraps_frozen):
            settings = replace(settings, algorithm="")
        algorithm = tuned(self.algorithm, settings)
        if algorithm is None or self._shards is not None:
            why = "" if self._shards is None else " in a deterministic job"
            return "" if settings.is_empty else f"algorithm {self.algorithm.name}{why} takes no settings"
        if settings != self._settings:
            self._settings = settings
            self._exchange.retune(
                algorithm.operation(self._attachment),
                settings.bucket_bytes or self._bucket_cap_bytes,
                settings.order,
            )
        return why_not

    @property
    def warms_up(self) -> bool:
        """Whether a QAdamOptimizer of the model still is in its warm-up."""
        parameters = self._attachment.parameters
        return any(isinstance(o, QAdamOptimizer) and not o.is_warm(parameters) for o in self.optimizers)

    @property
    def readiness(self) -> tuple[int, ...]:
        """The measured order of the gradients; empty if none is measured."""
        return self._exchange.readiness

    @property
    def bucket_times(self) -> tuple[tuple[int, float], ...]:
        """The bytes and seconds of each bucket's sum in the order of launch; empty if none is measured."""
        return self._exchange.bucket_times

    def travelling(self) -> Mapping[str, torch.Tensor]:
        """Returns further tensors that belong to the job's state. See Exchange.travelling."""
        return self._exchange.travelling()

    def put_gradient(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        """Makes `value` the .grad of `parameter`, in the memory where the next backward expects it."""
        self._exchange.put_gradient(parameter, value)

    def check_shards(self) -> None:
        """Checks the shards of a step of a deterministic job, as it ends. See Exchange.check_shards."""
        self._exchange.check_shards()

    def step_committed(self) -> None:
        """Notes that the step is final and the optimizer has stepped."""
        self._exchange.step_committed()
        self._reductions_before = self._exchange.reductions
        self._optimizer_steps.step_committed(self._engine.plan.step)
        if self._engine.plan.healing:
            self._module_buffers.refresh()  # the copy may have brought buffers to submodules that had none

    def finish(self, average: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Makes the replicas equal at the end of training, if they are not. See Exchange.finish."""
        self._exchange.finish(average)
        drop_gathered(self._sharded)  # of an evaluation: they are not what the averages are

    def step_rolled_back(self) -> None:
        """Forgets the gradients and accumulations of a step that did not happen."""
        self._exchange.step_rolled_back()
        drop_unsynchronized(self._sharded)
        drop_gathered(self._sharded)
        self._reductions_before = self._exchange.reductions
        self._optimizer_steps.step_rolled_back()

    def communicator_changed(self) -> None:
        """Drops what is cached of the old communicator: another one is in force, or none."""
        self._module_buffers.refresh()
        self._exchange.communicator_changed()
        drop_gathered(self._sharded)  # the state may have been copied

    def state_replaced(self) -> None:
        """Drops what the algorithm keeps for the values that the model had. See Exchange.state_replaced."""
        self._exchange.state_replaced()

    def _note_trained(self) -> None:
        """Notes which parameters are trained: some may have been frozen or unfrozen since the last forward."""
        choice = bytes([p.requires_grad for p in self._module_parameters])
        if not any(choice):
            return  # the model is only passed through, as a discriminator in its generator's loss
        if choice != self._choice:
            unfrozen = [
                p
                for (_, p), now, was in zip(self._candidates, choice, self._choice, strict=True)
                if now > was
            ]
            checks_of(self._engine).check_unshared(self, unfrozen)
            self._choice = choice
        self._exchange.trains(self._candidates, choice)

    def _take_turn(self, shares_buffers: bool) -> None:
        """Checks, before a forward that communicates, whether all ranks are at this model."""
        communicator = self._engine.communicator()
        if communicator is None or not self._turns.are_needed(communicator):
            return
        if not self._exchange.acts_in_forward and not (shares_buffers and self._has_buffers_to_share):
            return
        turn = self._turns.take(self._number, communicator)
        try:
            self._engine.wait(turn.pending)
            turn.check()
        except CollectiveFailed as error:
            self._engine.reduction_failed(error)

    @property
    def _has_buffers_to_share(self) -> bool:
        """Whether there are buffers to share, the same on all ranks. One that copies the state beside this step may
        lack the buffers that the others' forwards made since the model was wrapped."""
        return self._had_buffers if self._engine.plan.healing else bool(self._module_buffers.current())

    def filler_buffers(self) -> FillerBuffers | None:
        """Returns the buffers of the forward that begins, if it is one of filler samples in training. A worker that
        heals gets the state's buffers with the copy, and a deterministic job counts those of shards alone."""
        engine = self._engine
        if not self.training or not engine.in_step or self._shards is not None or engine.micro_batch.weight:
            return None
        if engine.plan.global_rank in engine.plan.healing:
            return None
        # these count other workers' samples
        joint = SyncBatchNorm if engine.communicator() is not None else None
        return FillerBuffers(self._module_buffers, lambda: engine.answered_collectives, joint)

    def _broadcast_buffers(self) -> None:
        engine = self._engine
        if not engine.in_step or engine.step_failed:
            return
        communicator = engine.communicator()
        if communicator is None or not self._has_buffers_to_share:
            return
        try:
            # behind the step's reduction no vote comes after it
            share_buffers(
                self._module_buffers.current(),
                communicator,
                engine.wait,
                vote_follows=not engine.is_final,
                unseen=self._module_buffers.statistics(),
                may_differ=bool(engine.plan.healing),
            )
        except CollectiveFailed as error:
            engine.reduction_failed(error)  # if the step is lost, the script's forward goes on all the same


def _detached(module: nn.Module, training: bool) -> DistributedDataParallel:
    """Returns a wrapper of `module` as `detach` leaves it."""
    made = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(made)
    made.module, made.training, made.is_detached = module, training, True
    made.optimizers, made.require_backward_grad_sync, made._shards = [], True, None
    return made


def _check_trainable(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            raise SparseGradientError(
                f"{name or type(part).__name__} has sparse=True; sparse gradients are not supported, "
                "use sparse=False"
            )
        if isinstance(part, nn.SyncBatchNorm):
            raise ValueError(
                f"layer {name or type(part).__name__} is a torch.nn.SyncBatchNorm, which would use each worker's own "
                "samples: it looks for torch's process group, and an elastic job has none; use "
                "model = bagua.SyncBatchNorm.convert(model), which takes such layers too"
            )
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"parameter {name} has no shape yet; run the model once before it is wrapped")
