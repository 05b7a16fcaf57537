"""One worker of benchmarks.deterministic: trains the character model in blocks of steps, when it is its job's turn.

Block b begins once there is <out>/go-<b>; rank 0 writes the seconds that it took, and those of its processor, to
<out>/done-<b>.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import bagua_core as bagua
from benchmarks.fidelity_tasks import char_lm

PAUSE_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="in a block")
    parser.add_argument("--blocks", type=int, required=True)
    args = parser.parse_args()
    bagua.init_process_group()
    torch.manual_seed(0)
    example = char_lm()
    # a step more, whose begin is the last block's end
    windows = example.Windows(
        example.read_text((args.steps * args.blocks + 1) * args.batch * example.CONTEXT + 1)
    )
    pairs = [windows[index] for index in range(len(windows))]
    data = torch.utils.data.TensorDataset(*(torch.stack(column) for column in zip(*pairs, strict=True)))
    net = example.CharacterModel()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    # A constant mask
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer], broadcast_buffers=False)
    loader = bagua.ElasticDataLoader(data, global_batch_size=args.batch, seed=0, drop_last=True)
    began, step = (0.0, 0.0), -1
    for x, y in loader:
        if loader.step != step:
            step = loader.step
            if step % args.steps == 0:
                began = next_block(args.out, step // args.steps, args.blocks, began)
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()


def next_block(out: Path, block: int, blocks: int, began: tuple[float, float]) -> tuple[float, float]:
    """Report the block before, and wait for the turn of this one. Returns when it began, by both clocks."""
    if block and bagua.get_rank() == 0:
        part = out / f"part-{block - 1}"
        part.write_text(f"{time.perf_counter() - began[0]} {time.process_time() - began[1]}")
        part.rename(out / f"done-{block - 1}")
    while block < blocks and not (out / f"go-{block}").exists():
        time.sleep(PAUSE_S)
    return time.perf_counter(), time.process_time()


main()
