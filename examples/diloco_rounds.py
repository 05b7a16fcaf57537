"""DiLoCo in rounds. Watch the last lines: the slow worker trained on fewer samples, and the other did not wait for it.

    bagua-launch --nproc-per-node 2 examples/diloco_rounds.py --slow 3

Workers train on their own for a round, at their own speed, and send 4 bits a weight at its end. Worker 1 sleeps to be
three times slower, and trains on about a third of worker 0's samples. Kill a worker: no local step of the other is
undone, and the lost samples are used again.
"""

import argparse
import time

import torch
from char_lm import CharacterModel, Windows, loss_of, read_text

import bagua_core as bagua


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--characters", type=int, default=300_000, help="length of the training text")
    parser.add_argument("--batch", type=int, default=64, help="global batch size")
    parser.add_argument(
        "--sync-every", type=int, default=20, help="local steps of a round, of an average worker"
    )
    parser.add_argument(
        "--slow", type=float, default=1.0, help="times that worker 1's local steps take longer"
    )
    args = parser.parse_args()

    bagua.init_process_group()
    torch.manual_seed(0)
    net = CharacterModel()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    algorithm = bagua.algorithms.LocalSGD(
        sync_every=args.sync_every, outer_optimizer="nesterov", compress="int4", unit="round"
    )
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
    loader = bagua.ElasticDataLoader(
        Windows(read_text(args.characters)), global_batch_size=args.batch, seed=0
    )
    total = args.epochs * len(loader.dataset)
    # all workers have one learning rate, though they take different numbers of local steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0 - loader.committed_samples / total)
    is_slow = bagua.get_local_rank() == 1

    samples = 0
    for _ in loader.epochs(args.epochs):
        for x, y in loader:
            began = time.monotonic()
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            schedule.step()
            bagua.report(loss=loss.item())
            if is_slow:
                time.sleep((args.slow - 1.0) * (time.monotonic() - began))
            samples += len(x)
    print(f"worker {bagua.get_local_rank()} trained on {samples} of {total} samples", flush=True)


if __name__ == "__main__":
    main()
