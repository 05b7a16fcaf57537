"""The agent's log reaches a terminal as plain text, whatever others wrote into it."""

from __future__ import annotations

import subprocess
import sys

from tests.lab.wait import HANG_S

PROGRAM = """
import logging
from bagua_agent.base.plain_logging import log_to_stderr
log_to_stderr(logging.WARNING, "bagua-launch: ")
log = logging.getLogger("bagua_agent.some_part")
log.warning("writing %s failed", "\\x1b]0;title\\x07")
log.info("not shown")
try:
    raise OSError("first\\nbagua-launch: the job succeeded\\x1b[2J")
except OSError:
    log.exception("bug")
"""


def test_control_characters_are_escaped_and_later_lines_pass_for_no_message() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    lines = done.stderr.splitlines()
    assert lines[0] == r"bagua-launch: writing \x1b]0;title\x07 failed"
    assert lines[1] == "bagua-launch: bug" and all(line.startswith("  ") for line in lines[2:])
    assert any("the job succeeded" in line for line in lines[2:]) and "\x1b" not in done.stderr
    assert "not shown" not in done.stderr


THROUGH = """
import logging
from bagua_agent.base.plain_logging import log_through, log_to_stderr
log_to_stderr(logging.WARNING, "bagua-launch: ")
log, said = logging.getLogger("bagua_agent.some_part"), []
with log_through(lambda line: not said and not said.append(line)):
    log.warning("first")
    log.warning("second")
log.warning("third")
print(said)
"""


def test_what_another_printer_does_not_take_goes_to_standard_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THROUGH], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert done.stdout == "['bagua-launch: first']\n"
    assert done.stderr == "bagua-launch: second\nbagua-launch: third\n"
