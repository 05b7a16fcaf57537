"""The example of DiLoCo in rounds, as a reader would run it: the slow worker gets the smaller part of the samples."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.conftest import MakeJob
from tests.faults.job import START_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "diloco_rounds.py"


def test_workers_share_the_samples_by_their_speed(job: MakeJob) -> None:
    program = [str(EXAMPLE), "--characters", "40000", "--batch", "16", "--sync-every", "5", "--slow", "4"]
    one = job(program=program)
    node = one.start(slots=2)
    assert node.process.wait(START_S) == 0
    found = re.findall(r"worker (\d) trained on (\d+) of (\d+) samples", node.log)
    samples = {int(worker): int(count) for worker, count, _ in found}
    assert sorted(samples) == [0, 1] and {int(total) for _, _, total in found} == {sum(samples.values())}
    assert samples[0] > 1.3 * samples[1] > 0, samples
    assert node.says("loss", "of 2 workers"), "a line of progress says whose loss it has"
    one.check_nothing_left()
