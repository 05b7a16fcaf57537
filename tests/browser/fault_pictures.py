"""Writes what the dashboard of a real job shows while faults happen to it: pictures, and the words of each verdict.

    python -m tests.browser.fault_pictures build/pictures [FAULT ...]

Each fault gets a job of its own on hosts of the lab, and a folder with a picture of each verdict of another wording, of
the end in the dark and as a phone shows it, and `said.txt`: the seconds since the fault, the level, what, why and next.
Needs root and network namespaces (tests/lab), Playwright (pip install -e '.[browser]') and a Chromium on PATH.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.browser.browser import PROGRAMS, Page
from tests.faults.job import Job, Node
from tests.lab.forward import Forward
from tests.lab.network import Host, Lab

PORT = 7465
LOOK_S = 0.5
TRAINS_S = 120.0  # bounds of a loaded machine
SETTLED_S = 8.0  # for curves to have points
HANGS_AT_STEP = 200
VERDICT = "['#what', '#why', '#next', '#problem'].map(s => document.querySelector(s).textContent)"
LEVEL = "document.querySelector('#verdict').dataset.level"


class Watch:
    """One page of a job, looked at again and again. sought: once all were found in verdicts, `found` is called, and
    `follow` is done."""

    def __init__(
        self,
        browser: Any,
        address: str,
        folder: Path,
        sought: Sequence[re.Pattern[str]] = (),
        found: Callable[[str], None] | None = None,
    ) -> None:
        self.sought = list(sought)
        self._found = found
        self._is_followed = not sought
        self._browser, self._address, self._folder = browser, address, folder
        self._page = Page(browser, address)
        self._since_s = time.monotonic()
        self._wordings: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "said.txt").write_text("")

    def await_words(self, words: str, limit_s: float = TRAINS_S) -> None:
        """Until the verdict holds `words`; each verdict on the way is kept. Raises TimeoutError."""
        deadline_s = time.monotonic() + limit_s
        while words not in self._look():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the page does not say {words!r}, but {self._look()!r}")
            self._page.tab.wait_for_timeout(1000 * LOOK_S)

    def follow(self, for_s: float) -> None:
        """Keep each verdict within this time."""
        deadline_s = time.monotonic() + for_s
        while time.monotonic() < deadline_s and (self._is_followed or self.sought):
            self._look()
            self._page.tab.wait_for_timeout(1000 * LOOK_S)

    def mark(self, what: str) -> None:
        """Something is done to the job now; seconds count from here."""
        self._since_s = time.monotonic()
        self._wordings.append("")  # the same verdict again is kept again
        self._note(f"-- {what}")

    def take_end(self) -> None:
        """Pictures of the page as it is now, in the dark and on a phone."""
        for name, looks in {"dark": {"dark": True}, "phone": {"width": 390}}.items():
            other = Page(self._browser, self._address, **looks)
            other.tab.wait_for_timeout(3000)
            other.tab.screenshot(path=self._folder / f"end-{name}.png", full_page=True)
            other.close()

    def _look(self) -> str:
        said = [" ".join(text.split()) for text in self._page.tab.evaluate(VERDICT)]
        text = " | ".join(said)
        left = [each for each in self.sought if not each.search(" ".join(said))]
        if self.sought and not left and self._found is not None:
            self._found(self._address)
        self.sought = left
        wording = re.sub(r"[0-9.]+", "#", text)
        if wording != (self._wordings[-1] if self._wordings else ""):
            number = sum(bool(kept) for kept in self._wordings)
            self._wordings.append(wording)
            level = self._page.tab.evaluate(LEVEL)
            self._note(f"{number:02} +{time.monotonic() - self._since_s:.1f} s {level}: {text}")
            self._page.tab.screenshot(path=self._folder / f"{number:02}.png", full_page=True)
        return text

    def _note(self, line: str) -> None:
        print(f"{self._folder.name}: {line}", flush=True)
        with (self._folder / "said.txt").open("a") as stream:
            stream.write(line + "\n")


class Stage:
    """A job with two workers each on the lab's first two hosts; its page is the first one's. The third has its etcd."""

    def __init__(
        self,
        lab: Lab,
        directory: Path,
        options: list[str],
        nodes: str = "1:2",
        script: Sequence[str] = (),
        disk: Path | None = None,
        program: Sequence[str] | None = None,
        imports: str = "",
    ) -> None:
        self.lab = lab
        self.first, self.second, keeper = lab.hosts
        self.etcd = lab.etcd(keeper, members=1)
        self.job = Job(
            directory,
            endpoints=self.etcd.endpoints,
            nodes=nodes,
            options=["--dashboard=7465", *options],
            samples=24_000,
            script=script,
            program=program,
            imports=imports,
        )
        self.nodes: list[Node] = []
        self.disk = disk

    def start(self, host: Host) -> Node:
        self.nodes.append(self.job.start(host, slots=2))
        return self.nodes[-1]


def killed_worker(stage: Stage, watch: Watch) -> None:
    watch.mark("SIGKILL for a worker of the second host")
    stage.nodes[1].workers[1].kill()
    watch.follow(20)


def cut_link(stage: Stage, watch: Watch) -> None:
    watch.mark("the link of the second host is cut")
    stage.second.cut()
    watch.follow(25)
    watch.mark("the link is back")
    stage.second.heal()
    watch.follow(25)


def cut_between(stage: Stage, watch: Watch) -> None:
    watch.mark("the two hosts do not reach each other; both reach etcd")
    stage.first.cut_to(stage.second)
    watch.follow(40)
    watch.mark("the link is back")
    stage.first.heal_to(stage.second)
    watch.follow(25)


def cut_own_link(stage: Stage, watch: Watch) -> None:
    watch.mark("the link of the page's own host is cut")
    stage.first.cut()
    watch.follow(25)
    watch.mark("the link is back")
    stage.first.heal()
    watch.follow(25)


def frozen_rank(stage: Stage, watch: Watch) -> None:
    watch.mark("SIGSTOP for a worker of the second host; --hang-timeout 40")
    stage.nodes[1].workers[0].send(signal.SIGSTOP)
    watch.follow(65)


def hanging_rank(stage: Stage, watch: Watch) -> None:
    watch.mark(f"a worker begins to sleep in its script, at step {HANGS_AT_STEP}")
    watch.follow(65)


def frozen_host(stage: Stage, watch: Watch) -> None:
    watch.mark("SIGSTOP for every process of the second host")
    stage.second.freeze()
    watch.follow(25)
    watch.mark("SIGCONT")
    stage.second.thaw()
    watch.follow(25)


def etcd_away(stage: Stage, watch: Watch) -> None:
    watch.mark("SIGKILL for etcd")
    stage.etcd.members[0].kill()
    watch.follow(20)
    watch.mark("a worker is killed while etcd is away")
    stage.nodes[1].workers[1].kill()
    watch.follow(20)
    watch.mark("etcd is started again")
    stage.etcd.members[0].restart()
    watch.follow(25)


def full_disk(stage: Stage, watch: Watch) -> None:
    disk = stage.disk
    watch.mark("the disk of the checkpoints is full")
    stage.first.fill(disk)
    watch.follow(25)
    watch.mark("there is room again")
    stage.first.run(["rm", f"{disk}/filler"]).wait(20)
    watch.follow(20)


FAULTS: dict[str, Callable[[Stage, Watch], None]] = {
    fault.__name__: fault
    for fault in (
        killed_worker,
        cut_link,
        cut_between,
        cut_own_link,
        frozen_rank,
        hanging_rank,
        frozen_host,
        etcd_away,
        full_disk,
    )
}
OPTIONS = {"frozen_rank": ["--hang-timeout", "40"]}
SCRIPTS = {"hanging_rank": ["--hang-at", str(HANGS_AT_STEP)]}


def show(
    name: str,
    browser: Any,
    folder: Path,
    sought: Sequence[re.Pattern[str]] = (),
    *,
    program: Sequence[str] | None = None,
    imports: str = "",
    found: Callable[[str], None] | None = None,
) -> None:
    """Raises AssertionError, and takes no pictures of the end, if the page does not say all that is sought.

    program, imports: of the job, instead of the lab's own script. found: called with the page's address, once."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as parts:
        lab = parts.enter_context(Lab(3))
        options = list(OPTIONS.get(name, ()))
        on_one_host = name == "full_disk"  # a lab host's small disk is that host's alone
        disk = lab.hosts[0].small_disk(64 << 20) if on_one_host else None
        if disk is not None:
            options += ["--checkpoint-dir", str(disk), "--checkpoint-every", "20"]
        nodes, script = "1" if on_one_host else "1:2", SCRIPTS.get(name, ())
        stage = Stage(lab, Path(scratch), options, nodes, script, disk, program, imports)
        try:
            stage.start(stage.first).await_line("dashboard at", deadline_s=TRAINS_S)
            if not on_one_host:
                stage.start(stage.second)
            forward = parts.enter_context(contextlib.closing(Forward(stage.first, ("127.0.0.1", PORT))))
            watch = Watch(browser, f"http://{forward.endpoint}/", folder, sought, found)
            watch.await_words(f"trains with {2 if on_one_host else 4} workers")
            watch.follow(SETTLED_S)
            FAULTS[name](stage, watch)
            assert not watch.sought, f"{(folder / 'said.txt').read_text()}\nlacks {watch.sought}"
            if not sought:
                watch.take_end()
        finally:
            (folder / "terminals.txt").write_text("\n----\n".join(node.log for node in stage.nodes))
            for host in lab.hosts:
                host.kill_all()


@contextlib.contextmanager
def browsing() -> Iterator[Any]:
    """A browser of Playwright's. Exits with a message where there is no Chromium."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        sys.exit(f"none of {', '.join(PROGRAMS)} is on PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def main(words: list[str]) -> int:
    names = words[1:] or list(FAULTS)
    if not words or not FAULTS.keys() >= set(names):
        print(
            f"usage: python -m tests.browser.fault_pictures DIRECTORY [{'|'.join(FAULTS)} ...]",
            file=sys.stderr,
        )
        return 2
    with browsing() as browser:
        for name in names:
            show(name, browser, Path(words[0]) / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
