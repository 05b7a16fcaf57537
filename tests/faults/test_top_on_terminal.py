"""`bagua-launch top` on a terminal beside a real job: it follows the job, fits the terminal, leaves it as it was."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.conftest import MakeJob
from tests.faults.job import START_S, Job, _environment
from tests.lab.terminal import Terminal

SAMPLES = 2_400  # enough steps for all that the tests wait for
STEP = re.compile(r"^step (\d+)", re.MULTILINE)
LOST = re.compile(
    r"^\d\d:\d\d:\d\d  generation \d+ \(failover\), cost [^:]+:\s+1 worker on\s+1\s+node.*?lost\s+global\s+rank\s+1",
    re.MULTILINE | re.DOTALL,
)
Top = Callable[..., Terminal]


@pytest.fixture
def top() -> Iterator[Top]:
    """top(job, columns, lines): the live screen of a job, renewed each 0.3 s."""
    with ExitStack() as open_ones:

        def start(one: Job, columns: int, lines: int = 25) -> Terminal:
            words = [
                sys.executable,
                "-m",
                "bagua_launch",
                "top",
                "--rdzv-endpoint",
                str(one.endpoints),
                one.job_id,
            ]
            return open_ones.enter_context(
                Terminal([*words, "--every", "0.3"], _environment({"COLUMNS": "999"}), columns, lines)
            )

        yield start


def step_on(text: str) -> int:
    found = STEP.search(text)
    return int(found[1]) if found else 0


def assert_left_as_it_was(terminal: Terminal) -> None:
    assert terminal.screen.main is None and terminal.screen.has_cursor
    assert terminal.screen.text.splitlines()[0] == "before"
    assert terminal.modes_now() == terminal.modes, "a shell would not show what is typed"


def test_the_screen_follows_the_job_in_sixty_columns_and_after_a_resize(
    job: MakeJob, etcd: EmbeddedEtcd, top: Top
) -> None:
    one = job(endpoints=etcd.endpoint, nodes="1", samples=SAMPLES)
    node = one.start(slots=2)
    one.await_world(2)
    terminal = top(one, 60)
    shown = terminal.await_text(lambda t: "2 workers on 1 node" in t and step_on(t), "trains", START_S)
    assert terminal.screen.main is not None and not terminal.screen.has_cursor
    before = step_on(shown)
    terminal.await_text(lambda t: step_on(t) > before, "a later step", START_S)
    terminal.type(b"x")  # any other key is neither shown nor taken

    one.replace_killed_worker(node)
    lost = terminal.await_text(lambda t: LOST.search(t), "the loss", START_S)
    at_loss = step_on(lost)
    renewed = terminal.await_text(lambda t: step_on(t) > at_loss, "steps after the loss", START_S)
    assert all(text in renewed for text in (f"job {one.job_id}"[:60], "NODE ", "RANK ")), renewed
    assert terminal.screen.wraps == 0, "a row is longer than the terminal"

    terminal.resize(150, 12)
    wide = terminal.await_text(lambda t: "more lines: enlarge the terminal" in t, "twelve lines", START_S)
    assert max(map(len, wide.splitlines())) > 60, wide
    assert terminal.screen.wraps == 0
    terminal.type(b"q")
    assert terminal.end() == 0
    assert_left_as_it_was(terminal)
    one.finish()


@pytest.mark.parametrize(("stop", "code"), [("q", 0), ("Ctrl-C", 0), ("SIGTERM", 143), ("the job ends", 0)])
def test_the_terminal_is_left_as_it_was(
    job: MakeJob, etcd: EmbeddedEtcd, top: Top, stop: str, code: int
) -> None:
    one = job(endpoints=etcd.endpoint, nodes="1", samples=SAMPLES)
    one.start()
    one.await_step(2)
    terminal = top(one, 80)
    terminal.await_text(lambda t: "1 worker on 1 node" in t, "trains", START_S)
    if stop == "SIGTERM":
        terminal.process.send_signal(signal.SIGTERM)
    elif stop == "the job ends":
        one.hurry()
    else:
        terminal.type({"q": b"q", "Ctrl-C": b"\x03"}[stop])
    assert terminal.end() == code
    assert_left_as_it_was(terminal)
    assert ("has succeeded" in terminal.screen.text) == (stop == "the job ends"), terminal.screen.text
    one.finish()


FULL = """
from bagua_launch.live_screen import live_screen
with live_screen() as screen:
    screen.show(["x" * 20] * 5, 5)
    assert screen.quits_within(300)
    screen.show(["y" * 20, "z"], 5)
    assert screen.quits_within(300)
"""


def test_full_rows_keep_their_last_character_and_shorter_screens_leave_no_rest() -> None:
    with Terminal([sys.executable, "-c", FULL], _environment(), 20, 5) as terminal:
        terminal.await_text(lambda t: t == "\n".join(["x" * 20] * 5), "five full rows", START_S)
        terminal.type(b"q")
        terminal.await_text(lambda t: t == "y" * 20 + "\nz", "two rows", START_S)
        assert terminal.screen.wraps == 0
        terminal.type(b"q")
        assert terminal.end() == 0
        assert_left_as_it_was(terminal)
