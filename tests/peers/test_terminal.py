"""Workers' output reaches the terminal as under torchrun: inherited, or teed with its prefix."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from bagua_agent.base.readable import readable
from tests.lab.wait import HANG_S, eventually, patiently
from tests.peers.conftest import Launch, launch_environment

ASKS = """
import os, sys
os.write(1, f"tty {os.environ['RANK']} {sys.stdout.isatty()} {sys.stderr.isatty()}\\n".encode())  # in one write
"""
LOUD = "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', file=sys.stderr)\n"
DEADLINE_S = 30
PIPE_BYTES = 4096


def on_terminal(directory: Path, *words: str, script: str, columns: int = 0) -> tuple[int, str]:
    """bagua-launch on a terminal of its own: exit code, and what the terminal was given."""
    (directory / "script.py").write_text(script)
    primary, secondary = pty.openpty()
    if columns:
        termios.tcsetwinsize(secondary, (25, columns))
    line = [sys.executable, "-m", "bagua_launch", "--start-method", "spawn", *words, "script.py"]
    process = subprocess.Popen(
        line,
        cwd=directory,
        env=launch_environment(directory),
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        start_new_session=True,
    )
    os.close(secondary)
    seen, end = b"", time.monotonic() + DEADLINE_S
    try:
        while True:
            assert time.monotonic() < end, seen
            if readable([primary], 1):
                try:
                    data = os.read(primary, 65536)
                except OSError:  # the other end is closed
                    break
                seen += data
        return process.wait(DEADLINE_S), seen.decode()
    finally:
        os.close(primary)
        process.kill()
        process.wait(DEADLINE_S)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_inherit_the_terminal(tmp_path: Path, workers: int) -> None:
    code, seen = on_terminal(tmp_path, "--nproc-per-node", str(workers), script=ASKS)
    assert code == 0, seen
    lines = re.findall(r"^tty .*$", seen.replace("\r\n", "\n"), re.MULTILINE)
    assert sorted(lines) == [f"tty {rank} True True" for rank in range(workers)], seen


def test_a_redirected_stream_is_no_terminal_and_the_other_is(tmp_path: Path) -> None:
    script = "import sys\nprint(sys.stdout.isatty(), file=sys.stderr)\nprint(sys.stderr.isatty())\n"
    code, seen = on_terminal(tmp_path, "--log-dir", "logs", "-r", "1", script=script)
    assert code == 0 and "\r\nFalse\r\n" in "\r\n" + seen, seen
    (file,) = tmp_path.glob("logs/**/stdout.log")
    assert file.read_text() == "True\n"


def test_the_agents_lines_stay_whole_beside_a_progress_bar(tmp_path: Path) -> None:
    script = "import sys\nsys.stderr.write('\\r50%')\nsys.stderr.flush()\nraise SystemExit(3)\n"
    code, seen = on_terminal(tmp_path, script=script)
    assert code == 3
    after = seen.partition("50%")[2]
    assert after.startswith("\r\x1b[Kbagua "), seen


def test_no_prefix_unless_teed(launch: Launch) -> None:
    done = launch("--nproc-per-node", "2", script=LOUD)
    assert sorted(done.stdout.splitlines()) == ["out 0", "out 1"]
    assert done.stderr.splitlines().count("err") == 2


def test_tee_prefixes_with_role_and_local_rank(launch: Launch, tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", "--tee", "3", "--role", "trainer", "--log-dir", "logs")
    done = launch(*words, script=LOUD)
    assert sorted(done.stdout.splitlines()) == ["[trainer0]:out 0", "[trainer1]:out 1"]
    assert {"[trainer0]:err", "[trainer1]:err"} <= set(done.stderr.splitlines())
    assert sorted(f.read_text() for f in tmp_path.glob("logs/**/stdout.log")) == ["out 0\n", "out 1\n"]


def test_tee_of_one_worker_alone_is_prefixed(launch: Launch) -> None:
    assert launch("--tee", "1", script=LOUD).stdout == "[default0]:out 0\n"


def test_the_template_of_the_prefix(launch: Launch) -> None:
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}/${local_rank}> "}
    done = launch("--tee", "1", script=LOUD, env=template)
    assert done.stdout == "<default 0/0> out 0\n"
    done = launch(
        "--tee", "1", "--log-line-prefix-template", "${hostname}:${rank}: ", script=LOUD, env=template
    )
    assert done.stdout == f"{socket.gethostname().split('.')[0]}:0: out 0\n"


def test_labels_name_node_and_local_rank(launch: Launch) -> None:
    assert re.fullmatch(r"\[\S+:0\]: out 0\n", launch("--label-output", script=LOUD).stdout)


ABSENT = (
    "--nnodes",
    "2",
    "--rdzv-endpoint",
    "127.0.0.1:1",
    "--rdzv-id",
    "x",
    "--rdzv-conf",
    "join_timeout=2",
)


def test_waiting_for_etcd_counts_down_in_place(tmp_path: Path) -> None:
    code, seen = on_terminal(tmp_path, *ABSENT, script="", columns=120)
    assert code != 0
    shown = re.findall(r"\r\x1b\[K([^\r\n]*waiting for etcd at 127.0.0.1:1, (\d) s left)(?=\r)", seen)
    left = [int(seconds) for _, seconds in shown]
    assert len(left) >= 2 and left == sorted(left, reverse=True) and left[0] > left[-1], seen
    assert "\r\x1b[Kbagua-launch: " in seen, "the last status goes before the error"
    narrow = on_terminal(tmp_path, *ABSENT, script="", columns=30)[1]
    assert max(map(len, re.findall(r"\x1b\[K([^\r\n]+)(?=\r\x1b)", narrow))) == 29


def test_waiting_for_etcd_is_told_once_where_there_is_no_terminal(launch: Launch) -> None:
    done = launch(*ABSENT, script="")
    assert done.stderr.count("\n") == 2 and "\x1b" not in done.stderr, done.stderr
    first = done.stderr.splitlines()[0]
    assert "127.0.0.1:1: connection refused" in first and "trying for up to 2 s" in first


def test_workers_inherit_stdin(launch: Launch) -> None:
    done = launch(
        "--nproc-per-node", "2", script="import sys\nprint(repr(sys.stdin.read()))\n", stdin="typed"
    )
    assert sorted(done.stdout.splitlines()) == ["''", "'typed'"], "one of them reads it, as under torchrun"


def test_a_terminal_that_takes_nothing_stops_no_worker(tmp_path: Path) -> None:
    """The agent logs that a file has reached its bound while the reader of stderr pauses, as `less` does."""
    (tmp_path / "script.py").write_text(
        "import pathlib\nfor _ in range(3 << 10): print('x' * 1023)\npathlib.Path('done').touch()\n"
    )
    reader, stderr = os.pipe()
    fcntl.fcntl(stderr, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.write(stderr, b"x" * PIPE_BYTES)
    line = [sys.executable, "-m", "bagua_launch", "--start-method", "spawn", "--redirects", "3"]
    with (
        open(reader, "rb") as shown,
        subprocess.Popen(
            [*line, "--max-log-mib", "1", "--log-dir", "logs", "script.py"],
            cwd=tmp_path,
            env=launch_environment(tmp_path),
            stderr=stderr,
        ) as process,
    ):
        os.close(stderr)
        try:
            eventually((tmp_path / "done").exists, 60, "the script has printed everything")
            said = shown.read()
            assert patiently(process.wait, HANG_S) == 0
        finally:
            process.kill()
    assert b"bagua-launch: " in said and said.count(b" has reached its bound") == 1, said
