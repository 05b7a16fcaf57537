"""Measures what churn costs the control plane of a large job: nodes that are lost, and others that come in their place.

    python -m benchmarks.rendezvous_churn --keep                     # 1,024 agents, 2 minutes
    python -m benchmarks.rendezvous_churn --agents 1024 --agents 4096 --agents 16384 --changes 4 --keep   # 6 minutes

As benchmarks.rendezvous_scale: one etcd, one real agent that leads, and simulated agents in place of all others. A
change is the loss of one node, after which every survivor reports a broken collective, or the join of another. Changes
follow one another without a pause; the cost of an hour is that of a change times the changes of an hour, and of a
quiet time. Between two changes every worker reports a commit, as in a job that trains.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.etcd.stubs import etcd3
from bagua_agent.rpc.job_identity import JobIdentity
from benchmarks import result_file
from benchmarks.etcd_load import EtcdConnection
from benchmarks.rendezvous_scale import cpu_s, led_job
from benchmarks.simulated_agents import NotFormed, SimulatedAgents

DEFAULT_AGENTS = 1024
MOST_AGENTS = 16384
CHURN = 0.01  # of the nodes, an hour
CHANGES = 10  # losses, and as many joins
QUIET_S = 10.0
_PATIENCE = 10.0  # nodes are lost by reports alone
_rpc = etcd3.etcdrpc


@dataclass(frozen=True, slots=True)
class Database:
    """size_bytes: of etcd's file. used_bytes: of it, what is not free for reuse. revision: of the newest write."""

    size_bytes: int
    used_bytes: int
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """wall_s: until the last agent heard of the generation that follows. leader_cpu_s, etcd_cpu_s: meanwhile, with the
    reports of commits after it. generations: written."""

    what: str
    wall_s: float
    leader_cpu_s: float
    etcd_cpu_s: float
    generations: int


@dataclass(frozen=True, slots=True)
class Churn:
    """quiet_*: processors a second while nothing changes. before, after: the changes. compacted: after compaction to
    the newest revision."""

    agents: int
    changes: tuple[Change, ...]
    quiet_leader: float
    quiet_etcd: float
    before: Database
    after: Database
    compacted: Database

    def an_hour(self, share: float = CHURN) -> tuple[float, float]:
        """Processor seconds of the leader and of etcd in an hour in which `share` of the nodes is replaced."""
        times = share * self.agents / (len(self.changes) / 2)
        leader = sum(change.leader_cpu_s for change in self.changes) * times + 3600 * self.quiet_leader
        return leader, sum(change.etcd_cpu_s for change in self.changes) * times + 3600 * self.quiet_etcd

    def walls_s(self, what: str) -> list[float]:
        return [change.wall_s for change in self.changes if change.what == what]


async def _database(connection: EtcdConnection) -> Database:
    answer = await connection.ask(
        "/etcdserverpb.Maintenance/Status", _rpc.StatusRequest().SerializeToString()
    )
    status = _rpc.StatusResponse.FromString(answer)
    return Database(status.dbSize, status.dbSizeInUse, status.header.revision)


class Churning:
    def __init__(
        self, etcd: EmbeddedEtcd, identity: JobIdentity, size: int, seed: int, leader_pid: int
    ) -> None:
        self._socket = etcd.endpoint.removeprefix("unix:")
        self._leader, self._etcd = psutil.Process(leader_pid), psutil.Process(etcd.pid)
        self._size = size
        self._agents = SimulatedAgents(self._socket, identity, size, seed, _PATIENCE)
        self._generation = 0

    async def run(self, changes: int, quiet_s: float) -> Churn:
        """Raises NotFormed."""
        agents = self._agents
        connection = await EtcdConnection.connect(self._socket)
        try:
            await self._until_formed(agents.join())
            await agents.commit(self._generation)
            before, quiet = await _database(connection), self._cpu()
            # what is measured is this time itself
            await asyncio.sleep(quiet_s)
            quiet_leader, quiet_etcd = (
                (now - was) / quiet_s for now, was in zip(self._cpu(), quiet, strict=True)
            )
            found = []
            for _ in range(changes):
                generation = self._generation
                # one node; of a share, as SimulatedAgents takes it
                lost = agents.lose(1 / len(agents.agents))
                found.append(await self._change("loss", agents.suspect(lost, generation)))
                found.append(await self._change("join", agents.join_another()))
            after = await _database(connection)
            compaction = _rpc.CompactionRequest(revision=after.revision, physical=True)
            await connection.ask("/etcdserverpb.KV/Compact", compaction.SerializeToString())
            compacted = await _database(connection)
            return Churn(self._size, tuple(found), quiet_leader, quiet_etcd, before, after, compacted)
        finally:
            connection.close()
            await agents.stop()

    async def _change(self, what: str, work: Awaitable[None]) -> Change:
        before, cpu = self._generation, self._cpu()
        wall_s = await self._until_formed(work)
        await self._agents.commit(self._generation)
        leader_s, etcd_s = (now - was for now, was in zip(self._cpu(), cpu, strict=True))
        return Change(what, wall_s, leader_s, etcd_s, self._generation - before)

    async def _until_formed(self, work: Awaitable[None]) -> float:
        began_s = time.monotonic()

        async def does() -> None:
            await work

        try:
            async with asyncio.TaskGroup() as group:  # an error of either ends both
                group.create_task(does())
                ended_s, record = await self._agents.formed(self._generation)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._generation = record.number
        return ended_s - began_s

    def _cpu(self) -> tuple[float, float]:
        return cpu_s(self._leader), cpu_s(self._etcd)


def measure(size: int, changes: int, quiet_s: float, seed: int, directory: Path) -> Churn:
    """Raises NotFormed."""
    # all but one: on a slow machine the leader must not begin with those that came first, who never commit alone
    with led_job(size - 1, size, f"churn-{size}-{seed}", directory) as (etcd, identity, leader_pid):
        return asyncio.run(Churning(etcd, identity, size, seed, leader_pid).run(changes, quiet_s))


def in_words(found: Sequence[Churn]) -> str:
    mib = 1024 * 1024
    rows = []
    for churn in found:
        leader_s, etcd_s = churn.an_hour()
        middle = {what: [c for c in churn.changes if c.what == what] for what in ("loss", "join")}
        rows.append(
            [
                str(churn.agents),
                result_file.spread(churn.walls_s("loss")),
                result_file.spread(churn.walls_s("join")),
                " / ".join(
                    f"{statistics.median(c.leader_cpu_s for c in own):.2f} s" for own in middle.values()
                ),
                f"{100 * churn.quiet_leader:.1f} / {100 * churn.quiet_etcd:.1f} %",
                f"{leader_s:.0f} / {etcd_s:.0f} s",
                f"{churn.before.size_bytes / mib:.1f} to {churn.after.size_bytes / mib:.1f} MiB",
                f"{churn.after.used_bytes / mib:.1f} to {churn.compacted.used_bytes / mib:.1f} MiB",
            ]
        )
    head = [
        "agents",
        "re-form after a loss",
        "form with a join",
        "leader's CPU, loss / join",
        "quiet: leader / etcd",
    ]
    head += [f"an hour at {CHURN:.0%}: leader / etcd", "database", "in use, compacted"]
    return "\n".join(
        [
            "Until the last agent has heard of the generation that follows. CPU of a change contains the reports of "
            "commits in it. Quiet: of one processor. The database: etcd's file before and after the changes; of it in "
            "use before and after compaction to the newest revision. The embedded etcd also compacts by itself beyond "
            "10,000 revisions.",
            "",
            result_file.table(head, rows),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--agents", type=int, action="append", help=f"sizes of jobs; usual: {DEFAULT_AGENTS}")
    parser.add_argument("--changes", type=int, default=CHANGES, help="losses, and as many joins")
    parser.add_argument("--quiet-s", type=float, default=QUIET_S)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args(arguments)
    sizes = args.agents or [DEFAULT_AGENTS]
    if min(sizes) < 10 or max(sizes) > MOST_AGENTS or args.changes < 1 or args.quiet_s <= 0:
        parser.error(f"give 10 to {MOST_AGENTS} agents, at least one change, and a quiet time")
    about = result_file.circumstances()
    found = []
    with tempfile.TemporaryDirectory(prefix="bagua-churn-") as directory:
        for size in sizes:
            print(f"{size} agents ...", file=sys.stderr, flush=True)
            try:
                found.append(measure(size, args.changes, args.quiet_s, args.seed, Path(directory)))
            except NotFormed as error:
                print(error, file=sys.stderr)
                return 1
    words = in_words(found)
    print(words)
    if args.keep:
        for path in result_file.keep("rendezvous_churn", about, words, [asdict(churn) for churn in found]):
            print(f"wrote {path.relative_to(result_file.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
