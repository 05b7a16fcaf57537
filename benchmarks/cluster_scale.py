"""Measures how fast service mode decides for a thousand nodes, and the messages that a change costs each node.

    python -m benchmarks.cluster_scale --keep
    python -m benchmarks.cluster_scale --nodes 100 --jobs 20 --changes 5

One process beside a real etcd: the real scheduler (service/scheduling/scheduler.py), and in place of each node the
decisions of its daemon (cluster/unit_plan.py) and the keys that its job agents would write. Its figures are upper
bounds, for a thousand nodes take turns with the scheduler in one interpreter.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from bagua_agent.cluster_client import cluster_requests
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.service.scheduling.scheduler import Scheduler
from benchmarks import result_file
from benchmarks.simulated_nodes import NoDecision, SimulatedNodes, submission

NODES, JOBS, CHANGES = 1000, 200, 20
BOUND_S = 1.0
_LEASE_S = 10.0
_SEED = 1


@dataclass(slots=True)
class Measured:
    """Seconds from etcd's answer to the change until the first order that follows from it stands in etcd."""

    what: str
    decisions_s: list[float]

    def row(self) -> list[str]:
        ordered = sorted(self.decisions_s)
        in_time = sum(s <= BOUND_S for s in ordered)
        late = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return [
            self.what,
            str(len(ordered)),
            f"{ordered[len(ordered) // 2] * 1e3:.0f} ms",
            f"{late * 1e3:.0f} ms",
            f"{ordered[-1] * 1e3:.0f} ms",
            f"{in_time} of {len(ordered)}",
        ]


class Bench:
    def __init__(self, store: Store, nodes: int, jobs: int, changes: int) -> None:
        self._store, self._jobs, self._changes = store, jobs, changes
        self._random = random.Random(_SEED)
        self._sizes: dict[str, tuple[int, int]] = {}
        self.nodes = SimulatedNodes(store, [f"node-{i:04d}" for i in range(nodes)])
        # on average so many nodes for a job that all fit, with room for changes
        self._least = max(1, int(nodes / jobs * 0.3))
        self.measured: list[Measured] = []

    def run(self) -> None:
        self.nodes.register()
        self.nodes.await_settled()
        # Nothing new is placed in the first seconds of an election
        self.nodes.await_gang(self._new_job("first"), 1)
        self.nodes.await_settled()
        self._submit_all()
        self._measure("one job submitted", self._submit_one)
        self._measure("one job scaled up", self._scale_up)
        self._measure("one node drained", self._drain)
        self._measure("one job ended", self._end)

    def _submit_all(self) -> None:
        """At once; each job's decision is its gang start."""
        acknowledged = {}
        for number in range(self._jobs):
            job_id = self._new_job(f"job-{number:04d}")
            acknowledged[job_id] = time.monotonic()
        starts = {job_id: self.nodes.await_gang(job_id, self._sizes[job_id][0]) for job_id in acknowledged}
        took = [max(0.0, starts[job_id] - at_s) for job_id, at_s in acknowledged.items()]
        self.measured.append(Measured(f"{self._jobs} jobs submitted at once", took))
        self.nodes.await_settled()

    def _measure(self, what: str, change: Callable[[int], int]) -> None:
        took = []
        for number in range(self._changes):
            revision = change(number)
            acknowledged_s = time.monotonic()
            took.append(max(0.0, self.nodes.await_orders_after(revision) - acknowledged_s))
            self.nodes.await_settled()
        self.measured.append(Measured(what, took))

    def _new_job(self, job_id: str) -> str:
        least = self._random.randint(1, 2 * self._least)
        self._sizes[job_id] = (least, 2 * least)
        cluster_requests.submit(self._store, submission(job_id, least, 2 * least))
        return job_id

    def _submit_one(self, number: int) -> int:
        return self.nodes.revision_of_submission(self._new_job(f"later-{number:04d}"))

    def _scale_up(self, number: int) -> int:
        job_id = f"job-{number:04d}"
        least, most = self._sizes[job_id]
        self._sizes[job_id] = (least + 1, most + 1)
        cluster_requests.scale_submitted(self._store, job_id, least + 1, most + 1)
        return self.nodes.revision_of_submission(job_id)

    def _drain(self, number: int) -> int:
        job_id = f"job-{self._changes + number:04d}"
        return self.nodes.drain(self.nodes.one_of(job_id))

    def _end(self, number: int) -> int:
        return self.nodes.end(f"job-{2 * self._changes + number:04d}")


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--changes", type=int, default=CHANGES, help="of each kind, one after the other")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args(arguments)
    if not 0 < 3 * args.changes <= args.jobs <= args.nodes:
        parser.error("as many nodes as jobs are needed, and three jobs for each change")
    about = result_file.circumstances()
    etcd = EmbeddedEtcd.start()
    store = Store(StoreConfig((parse_endpoint(etcd.endpoint),)))
    leased = LeasedKeys(store, _LEASE_S)
    scheduler = Scheduler(store, leased, "node-0000", lambda line: print(line, file=sys.stderr))
    bench = Bench(store, args.nodes, args.jobs, args.changes)
    try:
        scheduler.start()
        bench.run()
    except NoDecision as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        scheduler.stop()
        bench.nodes.stop()
        leased.close()
        store.close()
        etcd.stop()
    head = ["change", "times", "median", "99 %", "longest", f"within {BOUND_S:g} s"]
    table = result_file.table(head, [m.row() for m in bench.measured])
    counts = bench.nodes.messages()
    words = "\n".join(
        [
            f"{args.nodes} nodes, {args.jobs} jobs, one etcd, the scheduler and all nodes in one process. From etcd's "
            "answer to a change until the first order that follows from it stands in etcd (for jobs submitted at "
            "once: all of the job's least).",
            "",
            table,
            "",
            counts.in_words(),
        ]
    )
    print(words)
    if args.keep:
        values = {"measured": [asdict(m) for m in bench.measured], "messages": asdict(counts)}
        for path in result_file.keep("cluster_scale", about, words, values):
            print(f"wrote {path.relative_to(result_file.ROOT)}")
    return 0 if all(s <= BOUND_S for m in bench.measured for s in m.decisions_s) else 1


if __name__ == "__main__":
    sys.exit(main())
