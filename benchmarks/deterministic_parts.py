"""What smaller batches alone cost: plain torch without a job, the same samples at once and in parts of a shard each.

A deterministic worker computes shard after shard. Nothing it does can make a step shorter than this.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

from benchmarks.fidelity_tasks import char_lm

WARM_UP, STEPS = 3, 25


def throughput_in_parts(samples: int, parts: int) -> float:
    """Of the character model with AdamW on one thread: the processor time of a step of `samples` * `parts` samples at
    once, over that of as many in `parts` backward passes. The median of steps in turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        example = char_lm()
        net = example.CharacterModel()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        x, y = (
            torch.randint(0, net.characters.num_embeddings, (samples * parts, example.CONTEXT))
            for _ in range(2)
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
    finally:
        torch.set_num_threads(threads)
