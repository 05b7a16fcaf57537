"""The example of docs/load-balancing.md, as a reader would run it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tests.docs.printed import printed
from tests.faults.conftest import MakeJob

EXAMPLE = Path(__file__).parents[2] / "examples" / "load_balancing.py"
SAMPLES, EPOCHS = 2000, 2


def test_two_workers_have_as_many_words(job: MakeJob) -> None:
    given = {"examples/load_balancing.py": str(EXAMPLE)}
    *options, example = printed("docs/load-balancing.md", "load_balancing.py", given)
    one = job(options=options, program=[example], samples=SAMPLES, epochs=EPOCHS)
    node = one.start()
    one.finish()
    assert one.ledger.check(SAMPLES, EPOCHS) == []
    one.check_nothing_left()
    (line,) = (line for line in node.log.splitlines() if "epoch 1:" in line and "mean words" in line)
    share = float(re.findall(r"; ([\d.]+) of", line)[0])
    assert 0.9 < share < 1.1
    assert float(re.findall(r"loss ([\d.]+)", line)[0]) < 4.0, "it learns"
    sizes = defaultdict(list)
    for entry in one.ledger.lines:
        sizes[entry.step].append(len(entry.samples))
    assert any(max(of_step) - min(of_step) > 1 for of_step in sizes.values()), "by words, not by number"
