"""TensorBoard: one curve of a job whose workers change. Watch for the marker when a worker is killed.

    bagua-launch --nproc-per-node 2 examples/trackers/tensorboard_run.py --logdir runs/demo
    tensorboard --logdir runs

Each worker that gets rank 0 writes an event file of its own into the same folder, which TensorBoard shows as one run.
"""

import argparse

from committed_steps import train
from torch.utils.tensorboard import SummaryWriter


class Board:
    def __init__(self, logdir: str, step: int) -> None:
        # what an earlier rank 0 has written of later steps, on a host that was cut off, say, does not count
        self._writer = SummaryWriter(logdir, purge_step=step)

    def values(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def marker(self, step: int, generation: int, world_size: int) -> None:
        self._writer.add_scalar("job/world_size", world_size, step)
        self._writer.add_scalar("job/generation", generation, step)
        self._writer.add_text("job/changes", f"generation {generation}: {world_size} workers", step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logdir", default="runs/demo")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    train(lambda step: Board(args.logdir, step), args.epochs)
