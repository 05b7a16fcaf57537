"""One worker of benchmarks.tradeoff: trains under the system that is asked for until its steps are enough.

Same model, batch and samples under every system. Under bagua-launch for Bagua's algorithms, with torch's variables
(RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) for DDP, of which a worker that trains alone reads RANK. Every worker
writes its times and losses to <out>/<rank>.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks import algorithm_choices
from benchmarks.algorithm_choices import Settings
from benchmarks.rivals.workload import CLASSES, mlp
from benchmarks.tradeoff_window import Enough, Meeting, Window

POWER_SGD_START = 2  # the least that torch allows
# Without momentum: with it this model loses its way when batches are as small as one worker's.
# QAdam hardly moves: after so short a warm-up it would lose its way, and only what its steps cost is asked.
SETTINGS = Settings("sgd", lr=0.1, adam_lr=1e-6, qadam_warmup_steps=3, power_sgd_start=POWER_SGD_START)
ROUNDS = 3  # that are measured, where the round is the unit of commit
ALONE = "alone"
STARTED, COUNTED = "started", "json"  # stages of workers that train alone; `write` completes the second
_LOOK_EVERY_S = 0.01
POOL = 512
_SIGNAL = 1.0  # a feature's mean over a class, against its noise: learnt within some dozen steps


class Batches:
    """Endless samples of CLASSES overlapping clouds in `width` dimensions; a sequence of its own for each rank."""

    def __init__(self, width: int, batch: int, rank: int) -> None:
        means = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(1))
        self._means = means * _SIGNAL
        self._generator = torch.Generator().manual_seed(1000 + rank)
        self._batch = batch

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(CLASSES, (self._batch,), generator=self._generator)
        noise = torch.randn(self._batch, self._means.shape[1], generator=self._generator)
        return self._means[y] + noise, y


def sent_bytes() -> int:
    """By this host on eth0 since it came up; 0 where there is no eth0."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


Train = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Worker:
    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self._args = args
        self._rank = rank
        self._draw = Batches(args.width, args.batch, rank).draw
        self._sent_before = 0

    def draw_samples(self) -> None:
        """Draw from a data set from now on, sample by sample, as a worker in rounds does."""
        batches = torch.utils.data.DataLoader(Pool(self._args.width, POOL), self._args.batch)
        endless = itertools.chain.from_iterable(itertools.repeat(batches))
        self._draw = lambda: next(endless)

    def window(self, rounds: Callable[[], int | None] = lambda: None) -> Window:
        return self._window(self._args.out / "stop", self._rank == 0, rounds)

    def own_window(self) -> Window:
        """One that ends without regard to the other workers."""
        return self._window(self._args.out / f"stop-{self._rank}", True, lambda: None)

    def _window(self, decision: Path, decides: bool, rounds: Callable[[], int | None]) -> Window:
        args = self._args
        enough = Enough(
            args.warm_up, args.steps, args.window_s, args.most_s, cycle=args.cycle, rounds=args.rounds
        )
        return Window(enough, decision, decides=decides, rounds=rounds)

    def step(self, window: Window, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if window.is_counting:
            self._sent_before = sent_bytes()
        window.trained(self.train(model, optimizer))

    def train(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        """One step. Returns its loss."""
        x, y = self._draw()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    def write(self, window: Window, net: torch.nn.Module) -> None:
        sent = sent_bytes() - self._sent_before
        counted = window.began_s[self._args.warm_up :]
        samples = len(window.step_s) * self._args.batch
        write(
            self._args.out,
            self._rank,
            net,
            window.began_s,
            counted,
            window.losses,
            window.rounds,
            sent,
            samples,
        )


def write(
    out: Path,
    rank: int,
    net: torch.nn.Module,
    began_s: Sequence[float],
    counted_s: Sequence[float],
    losses: Sequence[float],
    rounds: int | None,
    sent: int,
    samples: int,
    processor_s: float | None = None,
) -> None:
    """What a worker measured. began_s: the moments at which its steps began, and the last one's end; counted_s: those
    after the warm-up. losses: of its steps. sent: bytes since the warm-up; samples: that it trained since then.
    processor_s: of this process since then, in all threads and in the kernel; None: not measured."""
    result = {
        "parameters": sum(p.numel() for p in net.parameters()),
        "began_s": list(began_s),
        "step_s": [after - before for before, after in itertools.pairwise(counted_s)],
        "losses": list(losses),
        "rounds": rounds,
        "sent_bytes": sent,
        "samples": samples,
        "processor_s": processor_s,
    }
    half = out / f"{rank}.half"
    half.write_text(json.dumps(result))
    half.rename(half.with_suffix(".json"))


def train_ddp(args: argparse.Namespace) -> None:
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    net = mlp(args.width)
    with_hook = args.system == algorithm_choices.HOOKED
    model = DistributedDataParallel(net, bucket_cap_mb=algorithm_choices.ONE_BUCKET_MB if with_hook else None)
    if args.system == "ddp_fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif with_hook:
        hook, state = algorithm_choices.power_sgd_hook(SETTINGS)
        model.register_comm_hook(state, hook)
    optimizer = algorithm_choices.plain_optimizer(net.parameters(), SETTINGS)
    worker = Worker(args, dist.get_rank())
    window = worker.window()
    while window.goes_on():
        worker.step(window, model, optimizer)
    worker.write(window, net)
    # torch's Gloo can abort a process that ends while it has threads ("terminate called without an active exception"):
    # all leave together, and without C++'s destructors.
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def train_alone(args: argparse.Namespace) -> None:
    """The same steps without any communication, on all hosts at the same time: what the workers can do at most. Their
    samples come as those of the systems in rounds do, of which the utilisation is asked.

    A worker that has finished its window goes on training until the windows of all have ended: the hosts of a lab share
    processors, and no window may have more of them than the others.
    """
    rank = int(os.environ["RANK"])
    net = mlp(args.width)
    optimizer = algorithm_choices.plain_optimizer(net.parameters(), SETTINGS)
    worker = Worker(args, rank)
    worker.draw_samples()
    window = worker.own_window()
    started, counted = Meeting(args.out, STARTED, args.hosts), Meeting(args.out, COUNTED, args.hosts)
    started.arrive(rank)
    while not started.is_complete:
        time.sleep(_LOOK_EVERY_S)
    while window.goes_on():
        worker.step(window, net, optimizer)
    worker.write(window, net)
    while not counted.is_complete:
        worker.train(net, optimizer)


def train_bagua(args: argparse.Namespace) -> None:
    import bagua_core as bagua

    bagua.init_process_group()
    net = mlp(args.width)
    build = algorithm_choices.CHOICES[args.system]
    optimizer, algorithm = build(list(net.parameters()), SETTINGS)
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
    worker: Worker | None = None
    window: Window | None = None
    done = 0
    while True:
        step = bagua.next_step()
        if worker is None or window is None:  # the rank is known from the first boundary on
            worker = Worker(args, bagua.get_rank())
            window = worker.window(lambda: algorithm_choices.rounds_of(model))
        if (step, bagua.get_world_size()) != (done, args.hosts):
            raise RuntimeError(
                f"step {step} with {bagua.get_world_size()} workers is not step {done}: a fault"
            )
        if not window.goes_on():
            break
        worker.step(window, model, optimizer)
        done += 1
    worker.write(window, net)


class Pool(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """`length` samples, of which only POOL differ: drawing them costs as little as in the other systems' loops."""

    def __init__(self, width: int, length: int) -> None:
        self._x, self._y = Batches(width, POOL, 0).draw()
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[index % POOL], self._y[index % POOL]


def train_rounds(args: argparse.Namespace) -> None:
    """A round that does not count, then ROUNDS; each worker takes its own number of local steps.

    The window begins behind the close of the first round and ends behind the close of the last, so it contains as many
    exchanges as rounds. No epoch ends in it: a training has many rounds in an epoch. The samples of its rounds are
    counted, since no worker's steps stand for those of the others.
    """
    import bagua_core as bagua

    bagua.init_process_group()
    net = mlp(args.width)
    optimizer, algorithm = algorithm_choices.CHOICES[args.system](list(net.parameters()), SETTINGS)
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
    global_batch = args.batch * args.hosts
    data = Pool(args.width, (3 + ROUNDS) * SETTINGS.diloco_every * global_batch)
    loader = bagua.ElasticDataLoader(data, global_batch)
    began_s: list[float] = []
    losses: list[float] = []
    counted, sent_before, samples = 0, 0, 0
    for _ in loader.epochs(1):
        for x, y in loader:
            if loader.step >= 1 and not counted:
                counted, sent_before = len(began_s), sent_bytes()
            began_s.append(time.monotonic())
            if loader.step > ROUNDS:
                break
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            samples += len(y) if counted else 0
        if loader.step > ROUNDS:
            break
    if loader.step != 1 + ROUNDS:
        raise RuntimeError(f"{loader.step} rounds instead of {1 + ROUNDS}: a fault")
    sent = sent_bytes() - sent_before
    write(args.out, bagua.get_rank(), net, began_s, began_s[counted:], losses, ROUNDS, sent, samples)


def main() -> None:
    parser = argparse.ArgumentParser()
    systems = [*algorithm_choices.CHOICES, "ddp", "ddp_fp16", algorithm_choices.HOOKED, ALONE]
    parser.add_argument("--system", choices=systems, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="of a worker")
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--window-s", type=float, required=True)
    parser.add_argument("--most-s", type=float, required=True)
    parser.add_argument("--cycle", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=0)
    args = parser.parse_args()
    if args.system in algorithm_choices.IN_ROUNDS:
        train_rounds(args)
    elif args.system in algorithm_choices.CHOICES:
        train_bagua(args)
    elif args.system == ALONE:
        train_alone(args)
    else:
        train_ddp(args)


if __name__ == "__main__":
    main()
