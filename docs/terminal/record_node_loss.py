"""Records the terminal of one host while another host of its job loses its power and comes back: a real job in the lab.

    python docs/terminal/record_node_loss.py docs/terminal/node-loss.cast

Needs root and network namespaces (tests/lab). What the recording shows is the output of the first host, and as comments
what was done to the others. Format: asciicast version 2.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.lab.network import Host, Lab

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
WIDTH = 132
# long enough for the join on a machine that does nothing else
COMMAND = ("examples/char_lm.py", "--epochs", "4")
GREEN, GREY, RESET = "\x1b[32m", "\x1b[90m", "\x1b[0m"


class Recording:
    """Lines with their times since the first one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._began_s = time.monotonic()
        self.lines: list[tuple[float, str]] = []

    def add(self, line: str) -> None:
        with self._changed:
            self.lines.append((time.monotonic() - self._began_s, line))
            self._changed.notify_all()

    def follow(self, path: Path, ended: threading.Event) -> None:
        """Lines of a file as they are written, until `ended`."""
        rest = ""
        with path.open() as stream:
            while not ended.is_set():
                rest += stream.read()
                *lines, rest = rest.split("\n")
                for line in lines:
                    self.add(line)
                ended.wait(0.02)

    def await_line(self, *words: str, after: int = 0, times: int = 1) -> int:
        """The number of lines once `times` of those after `after` hold all words. Raises TimeoutError."""

        def found() -> bool:
            return sum(all(word in line for word in words) for _, line in self.lines[after:]) >= times

        with self._changed:
            if not self._changed.wait_for(found, DEADLINE_S):
                raise TimeoutError(f"no line with {words} in {[line for _, line in self.lines]}")
            return len(self.lines)

    def save(self, path: Path) -> None:
        head = {"version": 2, "width": WIDTH, "height": len(self.lines) + 1, "idle_time_limit": 1.5}
        events = [[round(at_s, 3), "o", line + "\r\n"] for at_s, line in self.lines]
        path.write_text("\n".join(json.dumps(value) for value in (head, *events)) + "\n")


def start(host: Host, endpoint: str, output: Path) -> None:
    words = [sys.executable, "-u", "-m", "bagua_launch", "--nnodes", "2:3", "--rdzv-endpoint", endpoint]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    output.touch()
    words += ["--rdzv-id", "demo", str(ROOT / COMMAND[0]), *COMMAND[1:]]
    host.run(words, env=env, output=output)


def record(recording: Recording, lab: Lab, directory: Path, ended: threading.Event) -> None:
    first, lost, third, keeper = lab.hosts
    endpoint = lab.etcd(keeper, members=1).endpoints
    recording.add(
        f"{GREEN}{first.name} ${RESET} bagua-launch --nnodes 2:3 --rdzv-endpoint {endpoint} --rdzv-id demo "
        + " ".join(COMMAND)
    )
    outputs = [directory / f"{host.name}.txt" for host in (first, lost, third)]
    start(first, endpoint, outputs[0])
    threading.Thread(target=recording.follow, args=(outputs[0], ended), daemon=True).start()
    start(lost, endpoint, outputs[1])
    start(third, endpoint, outputs[2])
    seen = recording.await_line("steps/s", times=2)
    recording.add(f"{GREY}# {lost.name} loses its power{RESET}")
    lost.power_off()
    seen = recording.await_line("is in force", after=seen)
    seen = recording.await_line("steps/s", after=seen, times=2)
    recording.add(f"{GREY}# {lost.name} has its power again, and starts with the same command{RESET}")
    lost.heal()
    start(lost, endpoint, outputs[1])
    seen = recording.await_line("is in force", after=seen)
    recording.await_line("steps/s", after=seen, times=2)


def main(path: Path) -> None:
    recording, ended = Recording(), threading.Event()
    with tempfile.TemporaryDirectory() as directory, Lab(4, Path(directory)) as lab:
        try:
            record(recording, lab, Path(directory), ended)
        finally:
            ended.set()
            for host in lab.hosts:
                host.kill_all()
    recording.save(path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/terminal/record_node_loss.py FILE.cast")
    main(Path(sys.argv[1]))
