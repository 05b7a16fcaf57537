"""The examples of trackers, as a reader would run them: one curve, though the worker that writes it is killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.job import START_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "trackers"
EPOCHS, STEPS = 3, 96
LOST_AT = 30


def test_tensorboard_shows_each_step_once_and_the_changes(job: MakeJob, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = tmp_path / "runs"
    program = [str(EXAMPLES / "tensorboard_run.py"), "--logdir", str(runs), "--epochs", str(EPOCHS)]
    one = job(program=program)
    node = one.start(slots=2, failpoints=f"step.begin=kill@{LOST_AT}#0")
    assert node.process.wait(2 * START_S) == 0
    assert node.says("worker in slot 0 ended: killed by SIGKILL"), "the writer was lost"
    written: Counter[int] = Counter()
    sizes: dict[int, float] = {}
    files = list(runs.iterdir())
    for path in files:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        written.update(e.step for e in events.Scalars("loss"))
        sizes |= {e.step: e.value for e in events.Scalars("job/world_size")}
    assert len(files) >= 2, "its successor writes a file of its own"
    assert max(written.values()) == 1
    assert set(range(STEPS)) - set(written) <= {LOST_AT - 1}, (
        "the point that waited when its worker was killed"
    )
    assert 0 in sizes and any(
        LOST_AT - 1 <= step <= LOST_AT + 1 and size == 1 for step, size in sizes.items()
    )
    one.check_nothing_left()
