"""One worker of benchmarks.autotune: trains a stack of square layers until it is killed.

    autotune_worker.py --log FILE --layers N --width N [--bucket-bytes N] [--qadam-warm-up STEPS]

The optimizer is SGD, or QAdam's, whose warm-up has so many steps.
The worker of rank 0 appends the monotonic time of the end of each step to FILE.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import bagua_core as bagua
from bagua_core.communication.reduction.buckets import DEFAULT_BUCKET_CAP_MB

SAMPLES, GLOBAL_BATCH = 4096, 16


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--bucket-bytes", type=int, default=DEFAULT_BUCKET_CAP_MB * 2**20)
    parser.add_argument("--qadam-warm-up", type=int, help="steps; makes the optimizer QAdam's")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    torch.set_num_threads(1)
    bagua.init_process_group()
    torch.manual_seed(1)
    layers = [nn.Linear(options.width, options.width, bias=False) for _ in range(options.layers)]
    net = nn.Sequential(*layers)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    if options.qadam_warm_up is not None:
        optimizer = bagua.algorithms.QAdamOptimizer(
            net.parameters(), lr=1e-6, warmup_steps=options.qadam_warm_up
        )
    cap_mb = options.bucket_bytes / 2**20
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer], bucket_cap_mb=cap_mb)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, options.width))
    loader = bagua.ElasticDataLoader(data, global_batch_size=GLOBAL_BATCH, seed=1)
    with options.log.open("a", buffering=1) as log:
        for _ in loader.epochs(10**6):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if bagua.get_rank() == 0:
                    log.write(f"{time.monotonic()}\n")


if __name__ == "__main__":
    main()
