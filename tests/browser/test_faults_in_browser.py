"""Faults of real jobs, and the dashboard in a browser: it says what docs/guide/what-happens.md prints of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.fault_pictures import FAULTS, show
from tests.docs.dashboard_table import pattern, rows

# The rows of the page's table that a fault of fault_pictures.py shows.
SHOWN = {
    "killed_worker": ["a worker is killed"],
    "cut_link": ["the link of h2 is cut, or all of h2 is frozen"],
    "frozen_host": ["the link of h2 is cut, or all of h2 is frozen"],
    "cut_between": ["h1 and h2 do not reach each other, and both reach etcd"],
    "cut_own_link": ["the link of h1, the page's own host, is cut"],
    "frozen_rank": ["a worker is stopped (`SIGSTOP`)"],
    "hanging_rank": ["a rank hangs in the script"],
    "etcd_away": ["etcd is away", "a worker is lost while etcd is away"],
    "full_disk": ["the disk of the checkpoints is full"],
}
# Their first verdict lasts less than a second, so that a look each half a second may miss it.
SOON_OVER = {"cut_link", "frozen_host"}


def test_each_fault_of_the_page_is_made() -> None:
    assert set(SHOWN) == set(FAULTS)
    assert {row for shown in SHOWN.values() for row in shown} == set(rows())


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_the_page_says_what_the_manual_prints(fault: str, chromium: Any, tmp_path: Path) -> None:
    printed = rows()
    verdicts = [verdict for row in SHOWN[fault] for verdict in printed[row]]
    sought = [pattern(s) for verdict in verdicts[fault in SOON_OVER :] for s in verdict]
    if fault == "hanging_rank":  # it may be a worker of either host
        sought = [re.compile(each.pattern.replace("h2", "h[12]"), each.flags) for each in sought]
    show(fault, chromium, tmp_path, sought)
