"""What smaller batches alone cost: plain torch without a job, the same samples at once and in parts of a shard each.

A deterministic worker computes shard after shard. Nothing it does can make a step shorter than this. Processes as many
as a job's workers compute side by side, since they share the processors' caches as workers do.

    python -m benchmarks.deterministic_parts SAMPLES PARTS

prints the ratio of one process.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from benchmarks.fidelity_tasks import char_lm
from benchmarks.result_file import ROOT
from benchmarks.worker_environment import worker_environment

WARM_UP, STEPS = 3, 40
LIMIT_S = 120


def throughput_in_parts(samples: int, parts: int, processes: int) -> float:
    """The mean of `processes` processes that compute at the same time: see `ratio`. Raises CalledProcessError."""
    words = [sys.executable, "-m", "benchmarks.deterministic_parts", str(samples), str(parts)]
    running = [
        subprocess.Popen(words, env=worker_environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    try:
        found = [process.communicate(timeout=LIMIT_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process in running:
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, words)
    return statistics.mean(map(float, found))


def ratio(samples: int, parts: int) -> float:
    """Of the character model with AdamW on one thread: the processor time of a step of `samples` * `parts` samples at
    once, over that of as many in `parts` backward passes. The median of steps in turn."""
    torch.set_num_threads(1)
    example = char_lm()
    net = example.CharacterModel()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x, y = (
        torch.randint(0, net.characters.num_embeddings, (samples * parts, example.CONTEXT)) for _ in range(2)
    )

    def step_s(pieces: int) -> float:
        began_s = time.process_time()
        optimizer.zero_grad()
        for own_x, own_y in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            (F.cross_entropy(net(own_x).flatten(0, 1), own_y.flatten()) / pieces).backward()
        optimizer.step()
        return time.process_time() - began_s

    ratios = [step_s(1) / step_s(parts) for _ in range(WARM_UP + STEPS)]
    return statistics.median(ratios[WARM_UP:])


if __name__ == "__main__":
    print(ratio(int(sys.argv[1]), int(sys.argv[2])))
