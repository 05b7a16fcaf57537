"""Weights & Biases: one run of a job whose workers change, offline. Watch for world_size when a worker is killed.

    bagua-launch --nproc-per-node 2 examples/trackers/wandb_run.py --dir wandb-demo
    wandb sync wandb-demo/wandb/offline-run-*    # with an account

Each worker that gets rank 0 goes on with the run of the job's id. Offline, each writes a folder of its own, and
`wandb sync` puts them together, since they have one id. WANDB_MODE=online sends at once.
"""

import argparse
import os

import wandb
from committed_steps import train


class Run:
    def __init__(self, directory: str, name: str) -> None:
        os.makedirs(directory, exist_ok=True)
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(project="bagua", id=name, resume="allow", mode=mode, dir=directory)

    def values(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def marker(self, step: int, generation: int, world_size: int) -> None:
        # a panel with `job/generation` as steps marks the changes in all others
        self._run.log({"job/generation": generation, "job/world_size": world_size}, step=step)

    def close(self) -> None:
        self._run.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default="wandb-demo")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    name = os.environ.get("BAGUA_JOB_ID", "alone")
    train(lambda step: Run(args.dir, name), args.epochs)
