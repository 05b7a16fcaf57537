"""A helper program is of its caller's process group, or of its own: then a Ctrl-C does not reach it."""

from __future__ import annotations

import os
import sys

import pytest

from bagua_agent.workers.process.bounded_run import run_bounded
from tests.lab.wait import HANG_S

SAY_GROUP = [sys.executable, "-c", "import os; print(os.getpgrp() == os.getpid(), os.getpgrp())"]


@pytest.mark.parametrize("own_group", [False, True])
def test_a_helper_program_has_a_process_group_of_its_own_where_that_is_asked_for(own_group: bool) -> None:
    leads, group = run_bounded(SAY_GROUP, HANG_S, own_group=own_group).output.split()
    assert leads == str(own_group)
    assert (int(group) == os.getpgrp()) is not own_group
