"""Measures how long thousands of agents take to form a generation, and to continue after a tenth of them is lost.

    python -m benchmarks.rendezvous_scale --keep
    python -m benchmarks.rendezvous_scale --agents 16 --agents 64

One etcd, one real agent (`bagua-launch`, whose own worker never gets ready), which leads, and simulated_agents.py in
place of all others. Formed: etcd has the record, every agent has received it, and its keepers have read it whole.
Lost: a tenth of the agents no longer listen at their addresses, and every survivor reports that its collective broke;
no lease ends.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bagua_agent.etcd.client import Store
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.rpc.job_identity import JobIdentity
from benchmarks import result_file
from benchmarks.simulated_agents import Counts, NotFormed, SimulatedAgents

SIZES = (64, 256, 1024, 4096)
LOST = 0.1
BOUND_S = 5.0
_LEADER_S = 60.0
# To bagua-launch a script that follows membership; it is never ready and ends with its agent.
_IDLE = """import pathlib, signal, sys
import bagua_core
pathlib.Path(sys.argv[1]).touch()
signal.pause()
bagua_core.init_process_group()
"""


@dataclass(frozen=True, slots=True)
class Phase:
    """wall_s: until the last agent received it. etcd_cpu_s, leader_cpu_s: of these processes meanwhile; the rest of two
    cores was the simulation's. generations: written. counts: of all agents together."""

    agents: int
    wall_s: float
    etcd_cpu_s: float
    leader_cpu_s: float
    simulation_cpu_s: float
    generations: int
    counts: Counts

    def row(self, what: str) -> list[str]:
        n = self.agents
        return [
            str(n),
            what,
            f"{self.wall_s:.2f} s",
            str(self.generations),
            f"{1e3 * self.etcd_cpu_s / n:.2f} ms",
            f"{1e3 * self.leader_cpu_s / n:.2f} ms",
            f"{1e3 * self.simulation_cpu_s / n:.2f} ms",
            f"{self.counts.requests / n:.1f}",
            f"{self.counts.events / n:.1f}",
            f"{self.counts.heard_bytes / n / 1024:.1f} KiB",
        ]


@dataclass(frozen=True, slots=True)
class Run:
    forms: Phase
    reforms: Phase


@contextmanager
def led_job(
    least: int, size: int, label: str, directory: Path
) -> Iterator[tuple[EmbeddedEtcd, JobIdentity, int]]:
    """An etcd, and a job of `least` to `size` nodes whose leader is a real agent; with that agent's process id."""
    etcd = EmbeddedEtcd.start()
    store = Store(StoreConfig((parse_endpoint(etcd.endpoint),)))
    job_id = f"scale-{label}"
    script = directory / "idle.py"
    script.write_text(_IDLE)
    log = (directory / f"leader-{label}.log").open("w+")
    options = ["--nnodes", f"{least}:{size}", "--rdzv-endpoint", etcd.endpoint, "--rdzv-id", job_id]
    loaded = directory / f"loaded-{label}"
    leader = subprocess.Popen(
        [sys.executable, "-m", "bagua_launch", *options, str(script), str(loaded)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    try:
        _await_leader(store, job_id, loaded, leader, log)
        yield etcd, _identity(store, job_id), leader.pid
    except NotFormed:
        log.seek(0)
        print(log.read()[-4000:], file=sys.stderr)
        raise
    finally:
        leader.terminate()
        try:
            leader.wait(10)
        except subprocess.TimeoutExpired:
            leader.kill()
            leader.wait()
        log.close()
        store.close()
        etcd.stop()


def measure(size: int, seed: int, directory: Path) -> Run:
    with led_job(max(1, size // 2), size, f"{size}-{seed}", directory) as (etcd, identity, leader_pid):
        return asyncio.run(_phases(etcd, identity, size, seed, leader_pid))


def _await_leader(store: Store, job_id: str, loaded: Path, leader: subprocess.Popen[bytes], log: Any) -> None:
    """Until it leads and its own worker has loaded its packages: seconds of a processor that no other agent of a real
    job would take from etcd and the leader."""
    deadline_s = time.monotonic() + _LEADER_S
    while not loaded.exists() or store.get(JobKeys(job_id).leader) is None:
        if leader.poll() is not None or time.monotonic() > deadline_s:
            log.seek(0)
            raise NotFormed(f"no agent leads:\n{log.read()}")
        time.sleep(0.05)


def _identity(store: Store, job_id: str) -> JobIdentity:
    found = store.get(JobKeys(job_id).identity)
    assert found is not None, "the leader wrote it"
    return JobIdentity.decode(job_id, found.value)


async def _phases(etcd: EmbeddedEtcd, identity: JobIdentity, size: int, seed: int, leader_pid: int) -> Run:
    processes = [psutil.Process(pid) for pid in (etcd.pid, leader_pid)] + [psutil.Process()]
    agents = SimulatedAgents(etcd.endpoint.removeprefix("unix:"), identity, size, seed)
    try:

        async def phase(work: Any, living: int, after: int) -> tuple[Phase, int]:
            counts, cpu, began_s = agents.counts.copy(), [cpu_s(p) for p in processes], time.monotonic()
            try:
                async with asyncio.TaskGroup() as group:  # an error of either ends both
                    group.create_task(work)
                    ended_s, record = await agents.formed(after)
                    used = [cpu_s(p) - before for p, before in zip(processes, cpu, strict=True)]
                    done = agents.counts - counts
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return Phase(living, ended_s - began_s, *used, record.number - after, done), record.number

        forms, first = await phase(agents.join(), size, 0)
        await agents.commit(first)
        lost = agents.lose(LOST)
        reforms, _ = await phase(agents.suspect(lost, first), size - len(lost), first)
        return Run(forms, reforms)
    finally:
        await agents.stop()


def cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--agents", type=int, action="append", help=f"sizes of jobs; usual: {SIZES}")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args(arguments)
    sizes = args.agents or list(SIZES)
    if min(sizes) < 10 or args.repeat < 1:
        parser.error("give at least 10 agents, of whom a tenth can be lost, and at least one run")
    about = result_file.circumstances()
    runs: dict[int, list[Run]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory(prefix="bagua-scale-") as directory:
        for repeat in range(args.repeat):
            for size in sizes:
                print(f"{size} agents ...", file=sys.stderr, flush=True)
                try:
                    runs[size].append(measure(size, repeat, Path(directory)))
                except NotFormed as error:
                    print(error, file=sys.stderr)
                    return 1
    words = _in_words(runs)
    print(words)
    if args.keep:
        values = {str(size): [asdict(r) for r in of_size] for size, of_size in runs.items()}
        figures = {"cost": lambda pyplot: _plot(pyplot, runs)}
        for path in result_file.keep("rendezvous_scale", about, words, values, figures=figures):
            print(f"wrote {path.relative_to(result_file.ROOT)}")
    return 0


def _median(phases: Sequence[Phase]) -> Phase:
    """The one of the median time."""
    return sorted(phases, key=lambda p: p.wall_s)[len(phases) // 2]


def _in_words(runs: dict[int, list[Run]]) -> str:
    head = [
        "agents",
        "",
        "median",
        "generations",
        "etcd's CPU",
        "leader's CPU",
        "simulation's",
        "requests",
        "events",
        "heard",
    ]
    rows, bounds = [], []
    for size, of_size in runs.items():
        for what, phases in (("form", [r.forms for r in of_size]), ("reform", [r.reforms for r in of_size])):
            rows.append(_median(phases).row(what))
            walls = [p.wall_s for p in phases]
            bounds.append(
                f"{size} agents {what} in {result_file.spread(walls)}: "
                f"{'within' if statistics.median(walls) <= BOUND_S else 'MORE THAN'} {BOUND_S:g} s"
            )
    return "\n".join(
        [
            "From the first agent's first request until the last has heard of a generation of all (form), and from the "
            f"loss of {LOST:.0%} until the last survivor has heard of one of all survivors (reform). CPU, requests to "
            "etcd, events heard and their bytes are per agent. The agents are simulated in one process, which shares "
            "the machine's cores with etcd and the leader; what keepers hand on to other agents is not sent.",
            "",
            result_file.table(head, rows),
            "",
            *(f"- {line}" for line in bounds),
        ]
    )


def _plot(pyplot: Any, runs: dict[int, list[Run]]) -> Any:
    figure, (walls, costs) = pyplot.subplots(1, 2, figsize=(10, 3.8))
    sizes = sorted(runs)
    for what, colour, mark in (("form", "#0072b2", "o"), ("reform", "#d55e00", "s")):
        phases = [_median([getattr(r, f"{what}s") for r in runs[size]]) for size in sizes]
        walls.plot(sizes, [p.wall_s for p in phases], color=colour, marker=mark, label=what)
        for name, line, value in (
            ("etcd", "-", lambda p: p.etcd_cpu_s),
            ("leader", "--", lambda p: p.leader_cpu_s),
        ):
            costs.plot(
                sizes,
                [1e3 * value(p) / p.agents for p in phases],
                color=colour,
                marker=mark,
                linestyle=line,
                label=f"{what}: {name}",
            )
    walls.axhline(BOUND_S, color="#777777", linestyle=":", linewidth=1)
    walls.set_ylabel("seconds")
    walls.set_title("until all have heard")
    costs.set_ylabel("CPU per agent, ms")
    costs.set_title("what one agent costs")
    costs.set_ylim(bottom=0)
    walls.set_ylim(bottom=0)
    for axes in (walls, costs):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(s) for s in sizes])
        axes.set_xlabel("agents")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    sys.exit(main())
