"""Shows why rounds end with a lower loss than DDP in benchmarks.uneven_workers: the same training in one process.

    python -m benchmarks.uneven_losses --keep

Four models train in turn on the leases of a round, by local batches of a fourth of the global batch, and are averaged
by their samples. Nothing is sent and no time is measured, so the losses follow from the leases alone. In rounds a fast
worker takes more local steps than DDP takes steps: one worker with as many steps as the average contains shows that
this explains the difference. The digits are scikit-learn's (pip install -e '.[bench]').
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from benchmarks.fidelity_tasks import TASKS
from benchmarks.result_file import circumstances, in_words, keep, spread, table
from benchmarks.uneven_worker import GLOBAL_BATCH, LR, REPEATED
from benchmarks.uneven_workers import EPOCHS, HOSTS, SLOWER, SYNC_EVERY

EQUAL = tuple([1 / HOSTS] * HOSTS)
_OF_ALL = HOSTS - 1 + 1 / SLOWER
IN_PROPORTION = (*[1 / _OF_ALL] * (HOSTS - 1), 1 / SLOWER / _OF_ALL)
LOCAL_BATCH = GLOBAL_BATCH // HOSTS


@dataclass(frozen=True, slots=True)
class Trial:
    """most_steps: of a worker."""

    way: str
    seed: int
    most_steps: int
    training: float


class Training:
    """Trains on the digits of benchmarks.uneven_workers."""

    def __init__(self, epochs: int, seed: int) -> None:
        self._task = TASKS["digits"]
        self._once, _ = self._task.pieces()
        self._epochs = epochs
        self._seed = seed

    @property
    def steps(self) -> int:
        """Steps of all epochs by the global batch."""
        return self._epochs * len(self._once) * REPEATED // GLOBAL_BATCH

    def one_worker(self, steps: int) -> float:
        """Returns the training loss after `steps` steps of the global batch, further epochs if they need them."""
        net, optimizer = self._build()
        batches = (batch for order in self._orders() for batch in order.split(GLOBAL_BATCH))
        for _ in range(steps):
            self._step(net, optimizer, next(batches))
        return self._task.loss_over(net, self._once)

    def rounds(self, parts: Sequence[float]) -> tuple[int, float]:
        """Returns the most local steps of a worker, and the training loss. parts: of each round, by worker."""
        common, _ = self._build()
        workers = [self._build() for _ in parts]
        taken = [0] * len(parts)
        for _, order in zip(range(self._epochs), self._orders(), strict=False):
            for samples in order.split(SYNC_EVERY * GLOBAL_BATCH):
                whole = [round(part * len(samples) / LOCAL_BATCH) * LOCAL_BATCH for part in parts[:-1]]
                leases = samples.split([*whole, len(samples) - sum(whole)])
                for number, (lease, (net, optimizer)) in enumerate(zip(leases, workers, strict=True)):
                    net.load_state_dict(common.state_dict())
                    for batch in lease.split(LOCAL_BATCH):
                        self._step(net, optimizer, batch)
                        taken[number] += 1
                with torch.no_grad():
                    of_workers = zip(*(net.parameters() for net, _ in workers), strict=True)
                    for mean, own in zip(common.parameters(), of_workers, strict=True):
                        mean.copy_(sum(len(s) / len(samples) * p for s, p in zip(leases, own, strict=True)))
        return max(taken), self._task.loss_over(common, self._once)

    def _build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(self._seed)
        net = self._task.build()
        return net, torch.optim.SGD(net.parameters(), lr=LR)

    def _orders(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            yield torch.randperm(len(self._once) * REPEATED, generator=generator) % len(self._once)

    def _step(self, net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        x, y = self._once.tensors
        optimizer.zero_grad()
        self._task.loss(net, x[batch], y[batch]).backward()
        optimizer.step()


def trials(epochs: int, seed: int) -> Iterator[Trial]:
    training = Training(epochs, seed)
    more = round(training.steps * HOSTS * sum(part * part for part in IN_PROPORTION))
    for steps in (training.steps, more):
        yield Trial(f"one worker, {steps} steps", seed, steps, training.one_worker(steps))
    for name, parts in (("equal leases", EQUAL), ("leases by speed", IN_PROPORTION)):
        yield Trial(f"{HOSTS} workers, {name}", seed, *training.rounds(parts))


def report(found: Sequence[Trial]) -> str:
    rows = []
    for way in dict.fromkeys(trial.way for trial in found):
        here = [trial for trial in found if trial.way == way]
        most = round(statistics.median(t.most_steps for t in here))
        rows.append([way, str(most), spread([t.training for t in here], "", 4)])
    return table(["training", "most steps of a worker", "training loss"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of 176 steps; default %(default)s")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = circumstances()
    found = [trial for seed in range(options.repeat) for trial in trials(options.epochs, seed)]
    print(report(found))
    if options.keep:
        keep("uneven_losses", about, report(found), [asdict(trial) for trial in found])
    print(in_words(about))


if __name__ == "__main__":
    main()
