"""Output of real workers arrives whole and once, where the flags say; a flood stays in its pipe."""

from __future__ import annotations

import os
import pty
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.base.readable import readable
from bagua_agent.workers.output.log_layout import LogLayout
from bagua_agent.workers.output.output_options import OutputOptions, Streams
from bagua_agent.workers.output.router import OutputRouter
from bagua_agent.workers.output.terminal import BACKLOG_BYTES
from bagua_agent.workers.process.worker_process import WorkerProcess
from tests.agent.workers.worker_lab import Workers, wait_until
from tests.lab.left_open import open_descriptors, opened_since, started_since

MakeRouter = Callable[..., OutputRouter]


class Setting:
    def __init__(self, workers: Workers, tmp_path: Path) -> None:
        self.workers = workers
        self.layout = LogLayout(tmp_path / "logs", "job", "n")
        self.out, self.err = tmp_path / "terminal.out", tmp_path / "terminal.err"
        self.fds = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) for path in (self.out, self.err)]
        self.routers: list[OutputRouter] = []

    def router(
        self,
        *,
        prefixed: bool,
        out_fd: int | None = None,
        err_fd: int | None = None,
        max_log_bytes: int = 0,
        **flags: str,
    ) -> OutputRouter:
        router = OutputRouter(
            OutputOptions.parse(labels=prefixed, **flags),  # type: ignore[arg-type]
            self.layout,
            out_fd=self.fds[0] if out_fd is None else out_fd,
            err_fd=self.fds[1] if err_fd is None else err_fd,
            max_log_bytes=max_log_bytes,
        )
        router.start()
        self.routers.append(router)
        return router

    def run(self, router: OutputRouter, *sources: str) -> list[str]:
        """Run one worker per source at the same time; returns the tails of their stderr."""
        started = []
        for slot, source in enumerate(sources):
            script = self.workers.script(source, f"script{slot}.py")
            worker = self.workers.start(script, slot=slot)
            router.attach(worker)
            started.append(worker)
        return [self.finish(router, worker) for worker in started]

    def finish(self, router: OutputRouter, worker: WorkerProcess) -> str:
        wait_until(lambda: worker.reap() is not None, "worker ended")
        return router.finish(worker.worker_id)


@pytest.fixture
def setting(workers: Workers, tmp_path: Path) -> Iterator[Setting]:
    made = Setting(workers, tmp_path)
    yield made
    for router in made.routers:
        router.stop(0.2)
    for fd in made.fds:
        os.close(fd)


def test_one_worker_passes_through_unchanged(setting: Setting) -> None:
    router = setting.router(prefixed=False)
    source = "import sys\nsys.stdout.buffer.write(b'a\\n\\xff\\x00b\\rc')\nprint('e', file=sys.stderr)\n"
    assert setting.run(router, source) == ["e"]
    assert router.stop()
    assert setting.out.read_bytes() == b"a\n\xff\x00b\rc"
    assert setting.err.read_bytes() == b"e\n"


def test_two_workers_never_mix_within_a_line(setting: Setting) -> None:
    # each line is written in pieces, so that the pieces of both workers arrive alternately
    source = """
import sys
for n in range(300):
    for _ in range(20):
        sys.stdout.write("%s" * 5)
    sys.stdout.write(" %%d\\n" %% n)
"""
    router = setting.router(prefixed=True)
    setting.run(router, source % ("a" * 5), source % ("b" * 5))
    assert router.stop()
    lines = setting.out.read_text().splitlines()
    assert len(lines) == 600
    for slot, letter in enumerate("ab"):
        mine = [line for line in lines if line.startswith(f"[n:{slot}]: ")]
        assert mine == [f"[n:{slot}]: {letter * 500} {n}" for n in range(300)]


def test_partial_line_is_shown_soon_and_ended_before_anothers(setting: Setting) -> None:
    router = setting.router(prefixed=True)
    waiting = "import signal\nprint('waiting', end='', flush=True)\nsignal.pause()\n"
    worker = setting.workers.start(setting.workers.script(waiting), slot=0)
    router.attach(worker)
    wait_until(lambda: setting.out.read_bytes() == b"[n:0]: waiting", "partial line shown")
    other = setting.workers.start(setting.workers.script("print('other')\n", "other.py"), slot=1)
    router.attach(other)
    setting.finish(router, other)
    wait_until(lambda: setting.out.read_bytes() == b"[n:0]: waiting\n[n:1]: other\n", "other line")


def test_progress_bars(setting: Setting) -> None:
    source = (
        "import sys\nfor n in range(3):\n    sys.stderr.write(f'\\r{n}%')\nsys.stderr.write('\\ndone\\n')\n"
    )
    router = setting.router(prefixed=True)
    tails = setting.run(router, source, "")
    assert router.stop()
    assert setting.err.read_text() == "[n:0]: 0%\n[n:0]: 1%\n[n:0]: 2%\n[n:0]: done\n"
    assert tails[0] == "2%\ndone"


def test_progress_bars_on_a_terminal_stay_on_their_line(setting: Setting) -> None:
    primary, secondary = pty.openpty()
    try:
        router = setting.router(prefixed=True, out_fd=secondary, err_fd=secondary)
        source = "import sys\nfor n in range(3):\n    sys.stderr.write(f'\\r{n}%')\n"
        setting.run(router, source)
        setting.run(router, "print('next')\n")
        seen = b""
        while not seen.endswith(b"next\r\n"):
            assert readable([primary], 20), seen
            seen += os.read(primary, 1000)
        assert seen == b"[n:0]: 0%\r[n:0]: 1%\r[n:0]: 2%\r\n[n:0]: next\r\n"
        router.stop()
    finally:
        os.close(primary)
        os.close(secondary)


HOSTILE = r"""
import sys
sys.stdout.buffer.write(b"\x1b[2J\x1b]0;t\x07\xc2\x9b2J \xe2\x80\xae ok \xc3\xbc \x1b[32mgreen \x1b")
sys.stdout.flush()
sys.stdout.buffer.write(b"[31mred\n")
"""
SHOWN = rb"\x1b[2J\x1b]0;t\x07\x9b2J \u202e ok "


def through_a_pipe(setting: Setting, *, prefixed: bool) -> list[bytes]:
    read_fd, write_fd = os.pipe()
    try:
        router = setting.router(prefixed=prefixed, out_fd=write_fd, err_fd=write_fd)
        setting.run(router, HOSTILE)
        router.say("job 'x' failed: \x1b[2J\nbagua 12:00:00 n | job 'x' succeeded")
        assert router.stop()
        return os.read(read_fd, 10_000).splitlines(keepends=True)
    finally:
        os.close(read_fd)
        os.close(write_fd)


SAID = [rb"job 'x' failed: \x1b[2J" + b"\n", b"    bagua 12:00:00 n | job 'x' succeeded\n"]


def test_what_a_terminal_would_act_on_is_escaped_and_colours_end_with_the_line(setting: Setting) -> None:
    own, *said = through_a_pipe(setting, prefixed=True)
    assert own == b"[n:0]: " + SHOWN + "ü \x1b[32mgreen \x1b[31mred".encode() + b"\x1b[0m\n"
    assert said == SAID


def test_the_bytes_of_an_only_writer_reach_a_pipe_unchanged(setting: Setting) -> None:
    own, *said = through_a_pipe(setting, prefixed=False)
    assert own == (b"\x1b[2J\x1b]0;t\x07\xc2\x9b2J \xe2\x80\xae ok \xc3\xbc \x1b[32mgreen \x1b[31mred\n")
    assert said == SAID


def test_redirect_and_tee(setting: Setting) -> None:
    source = "import sys\nprint('out')\nprint('err', file=sys.stderr)\n"
    router = setting.router(prefixed=True, redirects="0:3,1:1", tee="1:2")
    assert setting.run(router, source, source) == ["err", "err"]
    assert router.stop()
    first, second = (setting.layout.worker_files(slot, f"w{slot}") for slot in (0, 1))
    assert (first.stdout.read_text(), first.stderr.read_text()) == ("out\n", "err\n")
    assert (second.stdout.read_text(), second.stderr.read_text()) == ("out\n", "err\n")
    assert (setting.out.read_text(), setting.err.read_text()) == ("", "[n:1]: err\n")


def test_labels_and_filters_need_not_be_utf8(setting: Setting) -> None:
    odd = os.fsdecode(b"caf\xe9")
    router = setting.router(prefixed=False, redirects="3", tee="1", role=odd, duplicate_stdout_filters=odd)
    setting.run(router, "import sys\nsys.stdout.buffer.write(b'a\\xe9\\ncaf\\xe9\\n')\n")
    assert router.stop()
    assert setting.layout.filtered_stdout.read_bytes() == b"[caf\xe90]:caf\xe9\n"


def test_local_ranks_filter(setting: Setting) -> None:
    router = setting.router(prefixed=False, local_ranks_filter="1")
    setting.run(router, "print('zero')\n", "print('one')\n")
    assert router.stop()
    assert setting.out.read_text() == "one\n"


def test_filtered_lines_are_duplicated(setting: Setting) -> None:
    source = "import sys\nprint('loss 3')\nprint('x')\nprint('apple')\nprint('loss', file=sys.stderr)\n"
    router = setting.router(
        prefixed=True, redirects="3", duplicate_stdout_filters="loss,apple", duplicate_stderr_filters="none"
    )
    setting.run(router, source)
    assert router.stop()
    assert setting.layout.filtered_stdout.read_text() == "[n:0]: loss 3\n[n:0]: apple\n"
    assert setting.layout.filtered_stderr.read_text() == ""


def test_flood_stays_in_the_pipe(setting: Setting) -> None:
    # the terminal has no reader: the worker must stall, a worker that logs to a file must not
    reader, terminal = os.pipe()
    router = setting.router(prefixed=True, out_fd=terminal, redirects="1:1")
    flood = """
import sys
for n in range(200_000):
    sys.stdout.write("x" * 990 + "\\n")
"""
    flooding = setting.workers.start(setting.workers.script(flood, "flood.py"), slot=0)
    router.attach(flooding)
    size = psutil.Process().memory_info().rss
    logging = setting.workers.start(setting.workers.script("print('y' * 1000000)\n", "log.py"), slot=1)
    router.attach(logging)
    setting.finish(router, logging)
    file = setting.layout.worker_files(1, logging.worker_id).stdout
    assert file.stat().st_size == 1_000_001
    terminal_state = router._out
    # Full is a moment: what the pipe still takes leaves it. Without room nothing more is read.
    wait_until(lambda: not terminal_state.has_room, "backlog without room")
    assert flooding.reap() is None
    assert psutil.Process().memory_info().rss - size < 16 * 1024 * 1024
    assert len(terminal_state._backlog) < BACKLOG_BYTES * 2
    # and goes on as soon as there is a reader
    seen = 0
    while seen < 2_000_000:
        assert readable([reader], 20)
        seen += len(os.read(reader, 65536))
    # Without a reader it fills up again, to more than the pipe takes: on a busy machine the reader above may
    # have emptied everything.
    wait_until(lambda: not terminal_state.has_room, "backlog filled again")
    flooding.signal_group(9)
    setting.finish(router, flooding)
    begin = time.monotonic()
    assert router.stop(0.3) is False
    assert time.monotonic() - begin < 3.0
    os.close(reader)
    os.close(terminal)


def test_reader_of_the_terminal_goes_away(setting: Setting) -> None:
    reader, terminal = os.pipe()
    os.close(reader)
    router = setting.router(prefixed=False, out_fd=terminal, tee="1")
    setting.run(router, "print('x' * 1000000)\n")
    assert router.stop()
    assert setting.layout.worker_files(0, "w0").stdout.stat().st_size == 1_000_001
    os.close(terminal)


def test_tail_is_whole_when_finish_returns(setting: Setting) -> None:
    router = setting.router(prefixed=True, redirects="2")
    source = (
        "import sys\nfor n in range(5000):\n    print('line', n, file=sys.stderr)\nraise ValueError('boom')\n"
    )
    (tail,) = setting.run(router, source)
    assert tail.splitlines()[-1] == "ValueError: boom"
    assert len(tail.splitlines()) == 20
    assert router.finish("unknown") == ""


def test_kept_output_of_a_slots_next_worker_begins_a_line(setting: Setting) -> None:
    router = setting.router(prefixed=False)
    setting.run(router, "print('step 2 loss=0.', end='')")
    setting.run(router, "print('step 2 loss=0.41')")
    setting.run(router, "pass")
    kept = router.recent.read(0, Streams.OUT, 0)
    assert kept is not None and kept.data == b"step 2 loss=0.\nstep 2 loss=0.41\n"
    assert router.recent.read(0, Streams.ERR, 0) is None


def test_finish_does_not_wait_for_a_process_that_keeps_the_pipe(setting: Setting) -> None:
    source = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(child.pid, flush=True)
"""
    router = setting.router(prefixed=False)
    begin = time.monotonic()
    setting.run(router, source)
    assert time.monotonic() - begin < 10
    assert router.stop()
    os.kill(int(setting.out.read_text()), 9)


def test_the_agents_own_line(setting: Setting) -> None:
    router = setting.router(prefixed=True, out_fd=setting.fds[0], err_fd=setting.fds[0])
    setting.run(router, "import sys\nprint('a', end='')\n")
    assert router.say_if_open("node joined")
    assert router.stop()
    assert not router.say_if_open("too late")
    assert re.fullmatch(r"\[n:0\]: a\nnode joined\n", setting.out.read_text())


def test_a_line_is_refused_where_no_thread_would_print_it(setting: Setting) -> None:
    router = OutputRouter(OutputOptions.parse(), setting.layout, out_fd=setting.fds[0], err_fd=setting.fds[1])
    taken = [router.say_if_open("before the start")]
    router.say("kept for the start")
    router.start()

    class Logs:
        def close(self) -> None:
            taken.append(router.say_if_open("in the thread's last moments"))

    router._filtered[Streams.OUT] = Logs()  # type: ignore[assignment]
    assert router.stop()
    assert taken == [False, False]
    assert setting.err.read_text() == "kept for the start\n"


def test_what_comes_after_the_last_turn_of_the_thread_is_printed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = setting.router(prefixed=False)
    is_done, said = router._is_done, False

    def is_done_then_said() -> bool:
        nonlocal said
        if is_done() and not said:
            said = router.say_if_open("as it ends")
            return True
        return is_done()

    monkeypatch.setattr(router, "_is_done", is_done_then_said)
    assert router.stop()
    assert said and setting.err.read_text() == "as it ends\n"


def test_a_full_disk_ends_the_log_and_nothing_else(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    log = setting.layout.make_worker_directory(0, "w0").directory / "stdout.log"
    most_bytes, unlimited = 64 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)
    log.touch()
    os.truncate(log, most_bytes)  # no file may be larger from here on: the next byte of this one is refused
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, unlimited[1]))
    try:
        router = setting.router(prefixed=False, tee="1")
        setting.run(router, "print('first')\nprint('second')\n")
        assert router.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert setting.out.read_text() == "[default0]:first\n[default0]:second\n"
    assert [record.getMessage() for record in caplog.records if "not written" in record.getMessage()]


def whole_line(text: str) -> str:
    """A script that writes a line at once; print writes its end by itself, and another line may come between."""
    return f"import os\nos.write(1, b'{text}\\n')\n"


def test_output_goes_on_once_a_full_disk_has_room_again(setting: Setting) -> None:
    most_bytes, unlimited = 64 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)
    os.truncate(setting.out, most_bytes)  # as large as a file may be: each further byte is refused
    router = setting.router(prefixed=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, unlimited[1]))
    try:
        for text, lost_bytes in (("first", 6), ("second", 13)):
            setting.run(router, whole_line(text))
            wait_until(lambda n=lost_bytes: router._out._lost_bytes == n, "the line was refused")  # type: ignore[misc]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    for count, text in enumerate(("third", "fourth"), 2):
        setting.run(router, whole_line(text))
        wait_until(
            lambda n=count: setting.out.read_bytes()[most_bytes:].count(b"\n") == n,  # type: ignore[misc]
            "the lines are written",
        )
    assert router.stop()
    third, note, fourth = setting.out.read_bytes()[most_bytes:].decode().splitlines()
    assert (third, fourth) == ("third", "fourth")
    assert note == "bagua-launch: 13 bytes of output could not be written (File too large)"


def test_a_worker_that_floods_fills_no_disk(setting: Setting) -> None:
    router = setting.router(prefixed=False, redirects="3", max_log_bytes=1 << 20)
    source = "import sys\nfor n in range(200_000): print('line', n)\nprint('last', file=sys.stderr)\n"
    setting.run(router, source)
    assert router.stop()
    files = setting.layout.worker_files(0, "w0")
    parts = sorted(p for p in files.directory.iterdir() if p.name.startswith("stdout.log"))
    assert len(parts) == 2 and 512 << 10 <= sum(p.stat().st_size for p in parts) <= 1 << 20
    assert parts[0].read_text().endswith("line 199999\n") and files.stderr.read_text() == "last\n"


def test_descriptors_and_threads_are_given_back(setting: Setting) -> None:
    files, threads = open_descriptors(), set(threading.enumerate())
    router = setting.router(prefixed=True, tee="3", duplicate_stdout_filters="x")
    setting.run(router, "print('x')\n", "print('y')\n")
    assert router.stop()
    for worker in setting.workers.started:
        worker.close()
    assert not opened_since(files) and not started_since(threads)


def test_a_link_in_place_of_a_log_is_not_followed(setting: Setting, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("the agent's")
    directory = setting.layout.make_worker_directory(0, "w0").directory
    (directory / "stdout.log").symlink_to(victim)
    router = setting.router(prefixed=False, redirects="1")
    worker = setting.workers.start(setting.workers.script("print('harm')\n"))
    with pytest.raises(UserError, match=r"cannot write .*stdout\.log"):
        router.attach(worker)
    assert victim.read_text() == "the agent's"
