"""The examples of trackers, as a reader would run them: one curve, though the worker that writes it is killed.

TensorBoard is there with the tests' packages. The others need theirs: `pip install '.[trackers]'`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.job import START_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "trackers"
EPOCHS, STEPS = 3, 96
LOST_AT = 30


def needs(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[trackers]'")


def run_and_lose_the_writer(job: MakeJob, program: str, *words: str, imports: str = "") -> None:
    one = job(program=[str(EXAMPLES / program), *words, "--epochs", str(EPOCHS)], imports=imports)
    node = one.start(slots=2, failpoints=f"step.begin=kill@{LOST_AT}#0")
    assert node.process.wait(2 * START_S) == 0
    assert node.says("worker in slot 0 ended: killed by SIGKILL"), "the writer was lost"
    one.check_nothing_left()


def check_one_curve(written: Counter[int], sizes: Mapping[int, float]) -> None:
    """written: how often each step has a loss. sizes: the markers' world sizes, by step."""
    assert max(written.values()) == 1
    assert set(range(STEPS)) - set(written) <= {LOST_AT - 1}, (
        "the point that waited when its worker was killed"
    )
    assert 0 in sizes and any(
        LOST_AT - 1 <= step <= LOST_AT + 1 and size == 1 for step, size in sizes.items()
    )


def test_tensorboard_shows_each_step_once_and_the_changes(job: MakeJob, tmp_path: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = tmp_path / "runs"
    run_and_lose_the_writer(
        job, "tensorboard_run.py", "--logdir", str(runs), imports="torch.utils.tensorboard"
    )
    written: Counter[int] = Counter()
    sizes: dict[int, float] = {}
    files = list(runs.iterdir())
    for path in files:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        written.update(e.step for e in events.Scalars("loss"))
        sizes |= {e.step: e.value for e in events.Scalars("job/world_size")}
    assert len(files) >= 2, "its successor writes a file of its own"
    check_one_curve(written, sizes)


def test_mlflow_has_one_run_with_each_step_once(
    job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    store = tmp_path / "runs"
    run_and_lose_the_writer(job, "mlflow_run.py", "--store", str(store))
    client = MlflowClient(store.as_uri())
    experiment = client.get_experiment_by_name("bagua")
    (run,) = client.search_runs([experiment.experiment_id])
    losses = client.get_metric_history(run.info.run_id, "loss")
    sizes = client.get_metric_history(run.info.run_id, "world_size")
    check_one_curve(Counter(m.step for m in losses), {m.step: m.value for m in sizes})
    assert run.info.status == "FINISHED"
    assert sum(tag.startswith("generation.") for tag in run.data.tags) >= 2


def test_wandb_has_each_step_once_in_offline_folders_of_one_run(
    job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_and_lose_the_writer(job, "wandb_run.py", "--dir", str(tmp_path))
    written: Counter[int] = Counter()
    sizes: dict[int, float] = {}
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) >= 2, "its successor writes a folder of its own"
    assert len({path.name for path in files}) == 1, "all have the id of one run"
    for path in files:
        for values in wandb_history(path.read_bytes()):
            if "loss" in values:
                written[int(values["_step"])] += 1
            if "job/world_size" in values:
                sizes[int(values["_step"])] = values["job/world_size"]
    assert max(written.values()) == 1
    # wandb writes its file every 15 s: a killed worker's newest points may never have reached it
    assert set(range(LOST_AT, STEPS)) <= set(written)
    assert any(LOST_AT - 1 <= step <= LOST_AT + 1 and size == 1 for step, size in sizes.items())


def wandb_history(data: bytes) -> Iterator[dict[str, float]]:
    """The values of each logged step in a .wandb file: records in blocks of 32 KiB, as LevelDB's log has them."""
    from wandb.proto import wandb_internal_pb2

    head, block, last_parts = 7, 32768, (1, 4)  # a whole record, and the end of a divided one
    place, gathered = head, b""
    while place < len(data):
        left = block - place % block
        if left < head:
            place += left
            continue
        length, part = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        gathered += data[place + head : place + head + length]
        place += head + length
        if part in last_parts:
            record = wandb_internal_pb2.Record.FromString(gathered)
            gathered = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {
                    item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                    for item in items
                }
