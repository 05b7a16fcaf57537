"""MLflow with a file store: one run of a job whose workers change. Watch for world_size when a worker is killed.

    bagua-launch --nproc-per-node 2 examples/trackers/mlflow_run.py --store mlruns-demo
    MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri mlruns-demo

Each worker that gets rank 0 looks for the run with the job's id, and goes on with it. On several hosts the store is a
shared folder, or the address of a tracking server.
"""

import argparse
import os
from pathlib import Path

from committed_steps import train
from mlflow.tracking import MlflowClient

TAG = "bagua.job"
# MLflow 3 prefers databases, and refuses folders without it
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")


class Run:
    def __init__(self, store: str, name: str) -> None:
        self._client = MlflowClient(store if "://" in store else Path(store).absolute().as_uri())
        experiment = self._client.get_experiment_by_name("bagua")
        number = self._client.create_experiment("bagua") if experiment is None else experiment.experiment_id
        found = self._client.search_runs([number], f"tags.`{TAG}` = '{name}'", max_results=1)
        run = found[0] if found else self._client.create_run(number, tags={TAG: name}, run_name=name)
        self._run_id = run.info.run_id

    def values(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def marker(self, step: int, generation: int, world_size: int) -> None:
        self._client.log_metric(self._run_id, "world_size", world_size, step=step)
        self._client.set_tag(
            self._run_id, f"generation.{generation}", f"from step {step}: {world_size} workers"
        )

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", default="mlruns-demo")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    name = os.environ.get("BAGUA_JOB_ID", "alone")
    train(lambda step: Run(args.store, name), args.epochs)
