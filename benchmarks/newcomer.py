"""Times what a newcomer does with the manual alone: from a clone to an elastic job, a killed node, and a submitted job.

    python -m benchmarks.newcomer --keep

A clone of this repository in a temporary folder, an empty home directory, and an environment of PATH and HOME alone.
The commands are those that README.md, docs/guide/first-job.md and docs/cluster.md print, typed into shells. Each time
is from the start of `git clone` until the terminal shows what the page promises. pip's system-wide settings hold: they
and the network decide how long the download of torch takes. The ports of etcd (2379, 2380) must be free.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import result_file
from benchmarks.result_file import ROOT
from tests.docs.page_blocks import blocks
from tests.docs.printed import printed, printed_block
from tests.lab.wait import eventually, patiently

FIRST_JOB_S, SUBMITTED_S = 300.0, 900.0  # asked: at most so long after the start of the clone
INSTALL_LIMIT_S, JOB_LIMIT_S = 3600.0, 180.0
FIRST_JOB = "docs/guide/first-job.md"
LONGER = ("loader.epochs(5)", "loader.epochs(100)")  # as the page says, for the part with two nodes
ACTIVATE = ". .venv/bin/activate"
TRAINS = r"generation \d+ is in force from step"


@dataclass(frozen=True, slots=True)
class Milestone:
    what: str
    page: str
    at_s: float  # since the start of the clone


class Terminal:
    """A shell that reads what is typed line by line, and ends at the first command that fails. Both streams go to a
    file."""

    def __init__(self, folder: Path, name: str, environment: dict[str, str]) -> None:
        self._log, typed = folder / f"{name}.log", folder / f"{name}.typed"
        os.mkfifo(typed)
        with self._log.open("wb") as output:
            self._shell = subprocess.Popen(
                ["bash", "-e", str(typed)], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._typed = typed.open("w", buffering=1)

    def type(self, line: str) -> None:
        print(f"$ {line}", flush=True)
        self._typed.write(line + "\n")

    def await_words(self, expression: str, limit_s: float) -> re.Match[str]:
        """What the terminal shows. Raises RuntimeError if the shell ends without it."""

        def found() -> re.Match[str] | None:
            ended = self._shell.poll()
            match = re.search(expression, self._log.read_text(errors="replace"))
            if match is None and ended is not None:
                raise RuntimeError(f"a command failed; {expression!r} is not shown\n{self.shown()}")
            return match

        return eventually(found, limit_s, lambda: f"{expression}\n{self.shown()}", 0.05)

    def shown(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def end(self) -> None:
        """After what was typed. Raises RuntimeError if a command failed."""
        self._typed.close()
        if patiently(self._shell.wait, JOB_LIMIT_S) != 0:
            raise RuntimeError(f"a command failed\n{self.shown()}")

    def close(self) -> None:
        """Its programs get SIGTERM, as from a window that is closed, and SIGKILL if they do not end."""
        self._typed.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._shell.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                patiently(self._shell.wait, JOB_LIMIT_S)
            with contextlib.suppress(AssertionError):
                eventually(self._is_gone, JOB_LIMIT_S, "its programs end", 0.05)
                return
        raise RuntimeError(f"programs of a terminal do not end\n{self.shown()}")

    def _is_gone(self) -> bool:
        try:
            os.killpg(self._shell.pid, 0)
        except ProcessLookupError:
            return True
        return False


class Newcomer:
    """installed: a directory with Bagua's programs, for a trial without what installs them."""

    def __init__(self, folder: Path, torch_index: str | None, installed: Path | None) -> None:
        self.folder, self.home, self.installed = folder, folder / "home", installed
        self.home.mkdir()
        path = [p for p in os.environ["PATH"].split(":") if p != str(Path(sys.executable).parent)]
        self.environment = {
            "PATH": ":".join([str(installed)] * bool(installed) + path),
            "HOME": str(self.home),
        }
        if torch_index:
            self.environment["BAGUA_TORCH_INDEX"] = torch_index
        self.activate = "cd bagua" if installed else f"cd bagua && {ACTIVATE}"
        self.reached: list[Milestone] = []
        self._began_s = time.monotonic()

    def follow(self) -> None:
        self._readme()
        self._first_job()
        self._cluster()

    def _reach(self, page: str, what: str) -> None:
        self.reached.append(Milestone(what, page, time.monotonic() - self._began_s))
        print(f"-- {self.reached[-1].at_s:.1f} s: {what}", flush=True)

    @contextlib.contextmanager
    def _terminal(self, name: str) -> Iterator[Terminal]:
        made = Terminal(self.folder, name, self.environment)
        try:
            yield made
        finally:
            made.close()

    def _readme(self) -> None:
        with self._terminal("readme") as terminal:
            given = {"<this": str(ROOT), "repository>": "--quiet"}
            terminal.type(
                " ".join(["git", *printed("README.md", "git clone", given)]) + " && cd bagua; echo cloned"
            )
            terminal.await_words("cloned", JOB_LIMIT_S)
            self._reach("README.md", "the repository is cloned")
            if self.installed:
                return
            terminal.type(printed_block("README.md", "scripts/quickstart").text.strip())
            terminal.await_words("== an elastic job of two workers", INSTALL_LIMIT_S)
            self._reach("README.md", "Bagua is installed")
            terminal.await_words(TRAINS, JOB_LIMIT_S)
            self._reach("README.md", "the first elastic job trains")
            terminal.await_words("succeeded: training is done", JOB_LIMIT_S)
            self._reach("README.md", "it has ended")
            terminal.end()

    def _first_job(self) -> None:
        for page, words in ((FIRST_JOB, LONGER[1]), (FIRST_JOB, "kill -9 %1"), ("README.md", ACTIVATE)):
            if f"`{words}`" not in (ROOT / page).read_text():
                raise RuntimeError(f"{page} does not say {words}")
        (script,) = (block.text for block in blocks(ROOT / FIRST_JOB) if block.mark == "file: train.py")
        (self.folder / "bagua/train.py").write_text(script.replace(*LONGER))
        with self._terminal("first") as first, self._terminal("second") as second:
            first.type(self.activate)
            first.type(" ".join(["bagua-launch", *printed(FIRST_JOB, "--nnodes 1:4")]))
            join = first.await_words(r"other nodes join with:\s+(bagua-launch .*)\n", JOB_LIMIT_S)[1]
            first.await_words(TRAINS, JOB_LIMIT_S)
            second.type(self.activate)
            second.type(f"{join} &")
            first.await_words(rf"{TRAINS} \d+: 2 workers on 2 nodes \(\+", JOB_LIMIT_S)
            self._reach(FIRST_JOB, "a second node has joined a job")
            second.type("kill -9 %1")
            first.await_words(rf"{TRAINS} \d+: 1 worker on 1 node \(-", JOB_LIMIT_S)
            self._reach(FIRST_JOB, "that node is killed, and the other one goes on")

    def _cluster(self) -> None:
        page = "docs/cluster.md"
        install, *others = printed_block(page, "example-config").text.splitlines()
        with self._terminal("cluster") as terminal:
            terminal.type("cd bagua" if not self.installed else self.activate)
            if not self.installed:
                terminal.type(f"{install.split('#')[0]} && echo installed")
                terminal.await_words("installed\n", INSTALL_LIMIT_S)
                self._reach(page, "Bagua is installed as the page says")
            for line in others:
                if "submit" in line and os.geteuid() == 0:
                    line = line.replace("submit ", "submit --user root ")
                terminal.type(line)
                if "> agent.toml" in line:  # it names the account's own home directory
                    terminal.type(f"sed -i 's|{pwd.getpwuid(os.geteuid()).pw_dir}/|{self.home}/|' agent.toml")
            terminal.await_words(TRAINS, JOB_LIMIT_S)
            self._reach(page, "a submitted job trains")
            terminal.await_words(r"(?m)^succeeded: ", JOB_LIMIT_S)
            self._reach(page, "the submitted job has ended")
            terminal.type("kill %2; wait %2; kill %1")
            terminal.end()


def told(reached: Sequence[Milestone]) -> str:
    head, before_s, rows = ["since git clone", "step", "terminal", "page"], 0.0, []
    for one in reached:
        rows.append([f"{one.at_s:.1f} s", f"{one.at_s - before_s:.1f} s", one.what, one.page])
        before_s = one.at_s
    return result_file.table(head, rows)


def is_in_time(reached: Sequence[Milestone]) -> bool:
    at_s = {one.what: one.at_s for one in reached}
    first = at_s.get("the first elastic job trains", 0.0)
    return first <= FIRST_JOB_S and at_s["the submitted job has ended"] <= SUBMITTED_S


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--torch-index", metavar="URL", help="BAGUA_TORCH_INDEX of scripts/quickstart")
    parser.add_argument(
        "--installed", type=Path, metavar="DIR", help="programs of Bagua; nothing is installed"
    )
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args(arguments)
    for port in (2379, 2380):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                print(f"port {port} of this machine is in use; end that etcd first", file=sys.stderr)
                return 2
    about = result_file.circumstances()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        newcomer = Newcomer(Path(folder), args.torch_index, args.installed)
        newcomer.follow()
    words = told(newcomer.reached)
    print(words)
    if args.keep:
        values = [{"what": m.what, "page": m.page, "at_s": m.at_s} for m in newcomer.reached]
        for path in result_file.keep("newcomer", about, words, values):
            print(f"wrote {path.relative_to(ROOT)}")
    return 0 if is_in_time(newcomer.reached) else 1


if __name__ == "__main__":
    sys.exit(main())
