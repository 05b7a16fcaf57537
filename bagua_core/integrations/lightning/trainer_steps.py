"""Makes each batch of a trainer's train loop a step of the job.

A step ends right behind the optimizer, before the trainer counts the batch: schedulers, on_train_batch_end, loggers,
checkpoints and validation see committed steps only, once each. A failed step is begun again where its batch is drawn.
Attaches itself to the loops of one trainer and lets go at the end; docs/design/lightning.md says why there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler, ModelCheckpoint, Timer

from bagua_core.elastic.step import runtime
from bagua_core.integrations.lightning.train_batches import TrainBatches
from bagua_core.integrations.lightning.trainer_state import TrainerState


class StepAgain(Exception):
    """Raised if the current batch is not to be counted: the next one is drawn. Never leaves this module."""


class TrainerSteps:
    def __init__(
        self, trainer: Any, batches: TrainBatches, state: TrainerState, ranks_changed: Callable[[], None]
    ) -> None:
        """Takes the trainer; `attach` changes its loops. ranks_changed(): called after each boundary."""
        self._trainer = trainer
        self._batches = batches
        self._state = state
        self._ranks_changed = ranks_changed
        self._fetcher: Any = None
        self._loops: list[tuple[Any, str]] = []

    def attach(self) -> None:
        epoch_loop = self._trainer.fit_loop.epoch_loop
        self._wrap(epoch_loop, "advance", self._advance)
        self._wrap(epoch_loop.automatic_optimization, "run", self._run)
        self._wrap(epoch_loop.manual_optimization, "run", self._run)
        self._batches.on_draw(self._draw_begins)
        if self._batches.is_stream:
            # It draws a batch ahead to know which one is the last. Here a draw begins a step, and the loader knows.
            self._fetcher = self._trainer.fit_loop._data_fetcher
            self._fetcher.prefetch_batches = 0
            iter(self._fetcher)

    def detach(self) -> None:
        for loop, name in self._loops:
            delattr(loop, name)
        self._loops.clear()
        self._batches.on_draw(None)

    def begin(self) -> None:
        """Joins the job's loop before the first epoch, and begins in the epoch that the job is in."""
        own_epoch = self._trainer.fit_loop.epoch_progress.current.processed
        self._boundary(confirmed=False)
        for epoch in range(own_epoch, self._batches.epoch):
            self._unfreeze(epoch)
        self._put_epoch(self._batches.epoch)
        if runtime.engine().joining:
            self._put_optimizer_steps()

    def _wrap(self, loop: Any, name: str, replacement: Callable[..., Any]) -> None:
        setattr(loop, name, partial(replacement, getattr(loop, name)))
        self._loops.append((loop, name))

    def _boundary(self, confirmed: bool) -> bool:
        has_moved = self._batches.loader.end_step(confirmed=confirmed)
        self._ranks_changed()
        return has_moved

    def _advance(self, original: Callable[[Any], None], data_fetcher: Any) -> None:
        self._fetcher = data_fetcher
        while True:
            try:
                original(data_fetcher)
                return
            except StepAgain:
                data_fetcher.fetched = self._batches.batch
                data_fetcher.done = False

    def _draw_begins(self) -> None:
        """Puts the job's place into the counters when a batch is drawn; they are those of the step before.

        A worker that has just come, or comes again, has other ones than the job; it gets the exact ones with the
        state, but decides by these until then.
        """
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        if progress.current.ready != self._batches.batch:
            for name in ("ready", "started", "processed", "completed"):
                setattr(progress.current, name, self._batches.batch)
            self._fetcher.fetched = self._batches.batch  # the trainer adds this one
        if self._batches.is_stream and self._batches.loader.is_at_last_batch:
            self._fetcher.length = self._fetcher.fetched + 1

    def _unfreeze(self, epoch: int) -> None:
        """Repeats what callbacks did as an epoch began that came before this worker, or before the checkpoint."""
        self._put_epoch(epoch)
        for callback in self._trainer.callbacks:
            if isinstance(callback, BaseFinetuning):
                callback.on_train_epoch_start(self._trainer, self._trainer.lightning_module)

    def _put_epoch(self, epoch: int) -> None:
        current = self._trainer.fit_loop.epoch_progress.current
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, epoch)

    def _put_optimizer_steps(self) -> None:
        """Sets the number of optimizer steps by the position, until the state brings the exact number: a worker that
        comes with the last of max_steps must not begin another step. Of a stream the lengths of the epochs before are
        not known here: in groups, this is the least number."""
        trainer, batches = self._trainer, self._batches
        if trainer.lightning_module.automatic_optimization:
            total = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
            groups = [self._batches_of_group(epoch) for epoch in range(batches.epoch + 1)]
            if batches.is_stream:
                done = batches.loader.step // max(groups)
            else:
                done = sum(-(-len(batches) // group) for group in groups[:-1]) + batches.batch // groups[-1]
            total.ready = total.completed = done

    def _batches_of_group(self, epoch: int) -> int:
        """Returns the batches of an optimizer step in this epoch. A scheduler sets the trainer's number as an epoch
        begins, which it has not done on a worker that has just come."""
        for callback in self._trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                return int(callback.get_accumulate_grad_batches(epoch))
        return int(self._trainer.accumulate_grad_batches)

    def _run(self, original: Callable[..., Any], *arguments: Any) -> Any:
        has_share = self._batches.loader.has_share
        before = None if has_share else self._state.own()
        loop = self._trainer.fit_loop.epoch_loop
        accumulated = loop._should_accumulate()
        output = original(*arguments)
        if accumulated and not loop._should_accumulate():
            # A joiner has the job's state only now: this batch is the last one of a stream's epoch.
            loop.automatic_optimization._optimizer_step(arguments[1], lambda: output.get("loss"))
        if before is not None:
            self._state.forget_own_batch(before)
        if not self._boundary(self._is_followed_by_more()) or self._is_counted():
            raise StepAgain
        return output

    def _is_counted(self) -> bool:
        """Tells whether the state is of a moment behind this batch: copied from a worker already in its next step."""
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return bool(current.completed == current.ready)

    def _is_followed_by_more(self) -> bool:
        """Tells whether all workers take part in something that the trainer does between this step and the next."""
        loop = self._trainer.fit_loop.epoch_loop
        return bool(
            loop._num_ready_batches_reached()
            or loop._should_check_val_fx(self._fetcher)
            or any(_acts_between_steps(callback) for callback in self._trainer.callbacks)
        )


def _acts_between_steps(callback: Any) -> bool:
    """Tells whether a callback of Lightning's has collectives behind each step: to save, or to agree on the time."""
    if isinstance(callback, Timer):
        return callback._duration is not None and callback._interval == "step"
    return isinstance(callback, ModelCheckpoint) and bool(
        callback._every_n_train_steps or callback._train_time_interval
    )
