"""The benchmark of groups that are formed again measures each situation, and a wait in a lost group ends."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.group_rebuild import SITUATIONS


def test_each_situation_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.group_rebuild", "--repeat", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()]
    own = {row[2]: row for row in rows if row[1:2] == ["Bagua"]}
    assert list(own) == list(SITUATIONS)
    for situation, row in own.items():
        assert row[3] == "1 of 1" and float(row[4]) > 0, row
        assert row[6] == ("1 of 1" if "killed" in situation or "silent" in situation else ""), row
