"""Measures how fast survivors have a working Gloo group again, by Bagua's communicator and by torch's reconfiguration.

    python -m benchmarks.group_rebuild [--keep]

Since torch 2.14 `init_process_group(enable_reconfigure=True)` makes a group that takes new members in its process
(experimental). Four processes form a group; three of them wait in an allreduce when the fourth is killed or stopped;
the three form a group without it. Also measured: the same members again, and a fourth that joins. Shown are the time
until the first allreduce of the new group is complete on all members, and whether the wait in the old group ended. With
an older torch only Bagua's rows are measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore

from bagua_core.communication.transports.meeting_store import MeetingServer
from benchmarks.group_rebuild_worker import SYSTEMS, WORKERS, can_reconfigure, serve
from benchmarks.result_file import circumstances, keep, table

SITUATIONS = ("same members", "one joins", "one killed", "one silent")
ANSWER_S = 40.0
FAULT_TO_REBUILD_S = 0.2  # in which the survivors' waits meet the fault, as far as they do by themselves


@dataclass(frozen=True, slots=True)
class Trial:
    """first_s: from the order to form the new group to its first allreduce, on the slowest member; None: it failed.

    released_s: to the end of the last wait in the old group; None: not within a second after the new group worked.
    """

    system: str
    situation: str
    first_s: float | None
    released_s: float | None
    detail: str


class Workers:
    """Forked processes, each with one end of a pipe."""

    def __init__(self, system: str, port: int) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for worker in range(WORKERS):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, system, worker, port), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def tell(self, workers: list[int], **order: Any) -> None:
        for worker in workers:
            self._pipes[worker].send(order)

    def answers(self, workers: list[int]) -> list[Any]:
        """Raises TimeoutError."""
        deadline_s = time.monotonic() + ANSWER_S
        found = []
        for worker in workers:
            if not self._pipes[worker].poll(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError(f"worker {worker} did not answer within {ANSWER_S:g} s")
            found.append(self._pipes[worker].recv())
        return found

    def form(self, workers: list[int], number: int) -> list[Any]:
        self.tell(workers, do="handle")
        self.tell(workers, do="form", number=number, handles=self.answers(workers))
        return self.answers(workers)

    def signal(self, worker: int, number: signal.Signals) -> None:
        pid = self._processes[worker].pid
        assert pid is not None
        os.kill(pid, number)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def measure(system: str, situation: str) -> Trial:
    server = MeetingServer("127.0.0.1")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = Workers(system, server.port if system == "bagua" else store.port)
    all_workers, survivors = list(range(WORKERS)), list(range(WORKERS - 1))
    before = survivors if situation == "one joins" else all_workers
    after = all_workers if situation in ("same members", "one joins") else survivors
    is_lost = situation in ("one killed", "one silent")
    try:
        workers.form(before, 1)
        if is_lost:
            workers.tell(survivors, do="wait")
            workers.answers(survivors)
            workers.signal(WORKERS - 1, signal.SIGKILL if situation == "one killed" else signal.SIGSTOP)
            time.sleep(FAULT_TO_REBUILD_S)
        formed = workers.form(after, 2)
        errors = sorted({each["error"] for each in formed if each["error"]})
        first_s = None if errors else max(each["first_s"] for each in formed)
        released_s = None
        if is_lost:
            workers.tell(survivors, do="released")
            released = workers.answers(survivors)
            released_s = None if None in released else max(released)
        return Trial(system, situation, first_s, released_s, "; ".join(errors))
    except TimeoutError as error:
        return Trial(system, situation, None, None, str(error))
    finally:
        workers.end()
        server.close()


def rows_of(trials: list[Trial]) -> list[list[str]]:
    rows = []
    for system in SYSTEMS:
        for situation in SITUATIONS:
            found = [t for t in trials if (t.system, t.situation) == (system, situation)]
            if not found:
                continue
            times = [t.first_s for t in found if t.first_s is not None]
            released = [t.released_s for t in found if t.released_s is not None]
            is_lost = situation in ("one killed", "one silent")
            rows.append(
                [
                    SYSTEMS[system],
                    situation,
                    f"{len(times)} of {len(found)}",
                    f"{statistics.median(times) * 1000:.1f}" if times else "-",
                    f"{max(times) * 1000:.1f}" if times else "-",
                    f"{len(released)} of {len(found)}" if is_lost else "",
                    next((t.detail for t in found if t.detail), "")[:100],
                ]
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--keep", action="store_true", help="write the result into benchmarks/results")
    args = parser.parse_args()
    systems = [name for name in SYSTEMS if name != "torch" or can_reconfigure()]
    trials = [measure(name, s) for _ in range(args.repeat) for s in SITUATIONS for name in systems]
    facts = circumstances()
    headers = ["system", "situation", "formed", "median ms", "most ms", "old wait ended", "first error"]
    text = table(headers, rows_of(trials))
    print(text)
    if len(systems) < len(SYSTEMS):
        print("this torch has no reconfiguration (2.14 and newer have): only Bagua's rows")
    if args.keep:
        for path in keep("group_rebuild", facts, text, [asdict(t) for t in trials]):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
