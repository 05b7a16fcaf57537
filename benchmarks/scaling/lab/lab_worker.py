"""One worker of a calibration run: takes steps of a model whose computation is a sleep, so the network dominates.

Under bagua-launch on a lab host. Each layer sleeps in forward and backward and gives a gradient of the size of its
tensor, so buckets become full at known moments. Rank 0 and the others write their steps to <out>/<rank>.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import algorithm_choices
from benchmarks.algorithm_choices import Settings
from benchmarks.scaling.steps.step import FORWARD_SHARE
from benchmarks.tradeoff_window import Enough, Window
from benchmarks.tradeoff_worker import sent_bytes, write

SETTINGS = Settings("sgd", lr=1e-3, adam_lr=1e-6, qadam_warmup_steps=3)
WARM_UP = 2 + SETTINGS.qadam_warmup_steps


class _Layer(torch.autograd.Function):
    """x as it came, after a sleep; its gradient for the weights is `gradient`, after another."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        gradient: torch.Tensor,
        forward_s: float,
        backward_s: float,
    ) -> torch.Tensor:
        ctx.gradient, ctx.backward_s = gradient, backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], ctx.gradient, None, None, None


class SleepingModel(nn.Module):
    """sizes: elements of its tensors, one a layer. compute_s: of all sleeps of a step."""

    def __init__(self, sizes: list[int], compute_s: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])
        # other values for each worker would change nothing that is measured
        self._gradients = [torch.randn(size) for size in sizes]
        self._forward_s = compute_s * FORWARD_SHARE / len(sizes)
        self._backward_s = compute_s * (1 - FORWARD_SHARE) / len(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weights, gradient in zip(self.weights, self._gradients, strict=True):
            x = _Layer.apply(x, weights, gradient, self._forward_s, self._backward_s)  # type: ignore[no-untyped-call]
        return x.sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--sizes", required=True, help="of the tensors, with commas between")
    parser.add_argument("--compute-s", type=float, required=True)
    parser.add_argument("--bucket-cap-mb", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--window-s", type=float, required=True)
    parser.add_argument("--most-s", type=float, required=True)
    parser.add_argument("--cycle", type=int, default=1)
    args = parser.parse_args()
    train(args)


def train(args: argparse.Namespace) -> None:
    import bagua_core as bagua

    torch.manual_seed(0)
    torch.set_num_threads(1)
    bagua.init_process_group()
    net = SleepingModel([int(size) for size in args.sizes.split(",")], args.compute_s)
    optimizer, algorithm = algorithm_choices.CHOICES[args.algorithm](list(net.parameters()), SETTINGS)
    model = bagua.DistributedDataParallel(
        net, optimizers=[optimizer], algorithm=algorithm, bucket_cap_mb=args.bucket_cap_mb
    )
    enough = Enough(WARM_UP, args.steps, args.window_s, args.most_s, cycle=args.cycle)
    window: Window | None = None
    sent_before = done = 0
    processor_before_s = 0.0
    while True:
        step = bagua.next_step()
        if window is None:
            window = Window(enough, args.out / "stop", decides=bagua.get_rank() == 0)
        if (step, bagua.get_world_size()) != (done, args.hosts):
            raise RuntimeError(
                f"step {step} with {bagua.get_world_size()} workers is not step {done}: a fault"
            )
        if not window.goes_on():
            break
        if window.is_counting:
            sent_before, processor_before_s = sent_bytes(), time.process_time()
        optimizer.zero_grad()
        loss = model(torch.ones(1, requires_grad=True))
        loss.backward()
        optimizer.step()
        window.trained(float(loss))
        done += 1
    processor_s = time.process_time() - processor_before_s
    counted = window.began_s[WARM_UP:]
    sent = sent_bytes() - sent_before
    samples = len(window.step_s)  # one a step
    rank, rounds = bagua.get_rank(), window.rounds
    write(args.out, rank, net, window.began_s, counted, window.losses, rounds, sent, samples, processor_s)


if __name__ == "__main__":
    main()
