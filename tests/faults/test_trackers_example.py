"""The examples of trackers, as a reader would run them: one curve, though the worker that writes it is killed.

TensorBoard is there with the tests' packages. The others need theirs: `pip install '.[trackers]'`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.docs.printed import printed
from tests.faults.conftest import MakeJob
from tests.faults.job import START_S
from tests.lab.free_port import free_port
from tests.lab.wait import eventually

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


def check_served(module: str, words: Sequence[str], path: str, expected: str, folder: Path) -> None:
    """Start the tracker's server in `folder`, as a reader does, until its answer at `path` contains `expected`."""
    port = free_port()
    line = [sys.executable, "-m", module, *words, "--port", str(port)]
    log = folder / "server.log"

    def answer() -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=START_S) as page:
                return str(page.read().decode())
        except OSError:
            assert server.poll() is None, f"{line} has ended\n{log.read_text()}"
            return ""

    with (
        log.open("wb") as output,
        subprocess.Popen(line, cwd=folder, stdout=output, stderr=output, start_new_session=True) as server,
    ):
        try:
            eventually(
                lambda: expected in answer(), 2 * START_S, lambda: f"{answer()}\n{log.read_text()}", 0.2
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)  # a server may have started others
            server.wait(START_S)


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
    words = printed("docs/trackers/tensorboard.md", "tensorboard --logdir")
    check_served("tensorboard.main", words, "/data/plugin/scalars/tags", "job/world_size", tmp_path)


def test_mlflow_has_one_run_with_each_step_once(
    job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("mlflow")
    variable, _, value = printed("docs/trackers/mlflow.md", "export")[0].partition("=")
    monkeypatch.setenv(variable, value)
    from mlflow.tracking import MlflowClient

    store = tmp_path / "mlruns-demo"
    run_and_lose_the_writer(job, "mlflow_run.py", "--store", str(store))
    client = MlflowClient(store.as_uri())
    experiment = client.get_experiment_by_name("bagua")
    (run,) = client.search_runs([experiment.experiment_id])
    losses = client.get_metric_history(run.info.run_id, "loss")
    sizes = client.get_metric_history(run.info.run_id, "world_size")
    check_one_curve(Counter(m.step for m in losses), {m.step: m.value for m in sizes})
    assert run.info.status == "FINISHED"
    assert sum(tag.startswith("generation.") for tag in run.data.tags) >= 2
    if has_mlflow_ui():
        words = printed("docs/trackers/mlflow.md", "mlflow ui")
        path = f"/api/2.0/mlflow/runs/get?run_id={run.info.run_id}"
        check_served("mlflow", words, path, run.info.run_id, tmp_path)


def has_mlflow_ui() -> bool:
    """mlflow-skinny has the command, and not what it serves."""
    try:
        return bool(version("mlflow"))
    except PackageNotFoundError:
        return False


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
