"""Replicas of two workers on real agents, with workers that only speak their session: see replica_stub.py."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation
from bagua_contract.replica import Replica
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import START_S, Job, Node
from tests.faults.test_started_by_hand import said
from tests.faults.test_store_wiped import wipe
from tests.lab.wait import eventually

STUB = Path(__file__).with_name("replica_stub.py")


class ReplicaJob:
    """A job of replicas of two. start(): a node more."""

    def __init__(self, one: Job, store: Store, out: Path) -> None:
        self.job, self.out, self.store = one, out, store
        self.keys = JobKeys(one.job_id)

    def start(self, slots: int = 1, **keywords: object) -> Node:
        return self.job.start(slots=slots, environment={"STUB_OUT": str(self.out)}, **keywords)  # type: ignore[arg-type]

    @property
    def generation(self) -> Generation | None:
        found = self.store.get(self.keys.generation)
        return None if found is None else Generation.decode(found.value)

    def await_generation(self, replicas: int, after: int = 0) -> Generation:
        """A newer one with so many replicas."""

        def found() -> Generation | None:
            record = self.generation
            trains = record is not None and not record.is_gathering and record.number > after
            return record if record is not None and trains and record.world_size == 2 * replicas else None

        def told() -> str:
            return f"{replicas} replicas after {after}\n" + "\n".join(n.log for n in self.job.nodes)

        return eventually(found, START_S, told, 0.05)

    @property
    def records(self) -> dict[str, Replica]:
        """Those that are not over."""
        found, _ = self.store.get_prefix(self.keys.replicas)
        return {r.replica_id: r for kv in found if not (r := Replica.decode(kv.value)).over}

    def lines(self, worker_id: str) -> list[str]:
        return (self.out / worker_id).read_text().splitlines()


@pytest.fixture
def replicas(job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[Callable[..., ReplicaJob]]:
    stores: list[Store] = []

    def make(nodes: str, *options: str) -> ReplicaJob:
        out = tmp_path / "stub"
        out.mkdir()
        one = job(
            endpoints=etcd.endpoint,
            nodes=nodes,
            options=("--replica-size", "2", "--start-method", "spawn", *options),
            program=[str(STUB)],
        )
        stores.append(Store(store_config((etcd.endpoint,), StoreCredentials())))
        return ReplicaJob(one, stores[-1], out)

    yield make
    for store in stores:
        store.close()


def replica_of(record: Generation, worker_id: str) -> list[str]:
    own = record.placement_of(worker_id)
    assert own is not None
    return [m.worker_id for m in record.members if m.replica_rank == own.replica_rank]


def test_a_killed_worker_ends_its_replica_which_comes_back_as_one_joiner(
    replicas: Callable[..., ReplicaJob], etcd: EmbeddedEtcd
) -> None:
    one = replicas("2")
    first, second = one.start(slots=2), one.start(slots=2)
    before = one.await_generation(2)
    assert {r.worker_ids for r in one.records.values()} == {
        tuple(replica_of(before, m.worker_id)) for m in before.members
    }
    # whole nodes first
    assert all(len(r.agent_ids) == 1 for r in one.records.values())
    victim, other = second.workers
    assert replica_of(before, victim.worker_id) == [victim.worker_id, other.worker_id]
    assert one.lines(other.worker_id)[1] == f"replica {victim.worker_id} 1 of 2" or one.lines(
        other.worker_id
    )[0].startswith("replica")
    stayed = {w.worker_id for w in first.workers}
    victim.kill()
    after = one.await_generation(2, before.number)
    second.await_line("worker in slot 0 ended: killed by SIGKILL")
    second.await_line("worker in slot 1 ended: its replica is over")
    back = {w.worker_id for w in second.workers}
    assert {m.worker_id for m in after.members} == stayed | back
    assert not back & {victim.worker_id, other.worker_id}
    assert {w.worker_id for w in first.workers} == stayed
    [status] = json.loads(said(etcd, "status", one.job.job_id, "--json"))
    assert [(r["replica_rank"], r["state"]) for r in status["replicas"]] == [(0, "member"), (1, "member")]
    # neither counts: the job allows no failure
    assert all(node.process.is_running for node in one.job.nodes)
    # the stub speaks its session by itself
    assert first.says("does not call bagua_core.init_process_group", "--replica-size 2 changes nothing")


def test_a_replica_across_nodes_leaves_with_one_of_them(replicas: Callable[..., ReplicaJob]) -> None:
    one = replicas("2:4")
    nodes = [one.start() for _ in range(4)]
    before = one.await_generation(2)
    of_worker = {n.workers[0].worker_id: n for n in nodes}
    leaver_id, mate_id = replica_of(before, nodes[3].workers[0].worker_id)
    leaver, mate = of_worker[leaver_id], of_worker[mate_id]
    leaver.send(signal.SIGTERM)
    after = one.await_generation(1, before.number)
    assert {m.worker_id for m in after.members} == set(of_worker) - {leaver_id, mate_id}
    mate.await_line("leaves, and with it the replica")
    mate.await_line("worker in slot 0 has left; starting another")
    assert one.lines(mate_id)[-1] == f"left {after.number}"
    # a spare until a node comes
    newcomer = one.start()
    last = one.await_generation(2, after.number)
    assert {m.worker_id for m in last.members} >= {w.worker_id for n in (mate, newcomer) for w in n.workers}


def test_a_node_of_another_replica_size_is_refused(replicas: Callable[..., ReplicaJob]) -> None:
    one = replicas("1:2")
    one.start(slots=2)
    one.await_generation(1)
    other = one.start(slots=2, options=("--replica-size", "1"))
    assert other.process.wait(START_S) == 2
    assert "has replicas of 2 workers, and this node was started with --replica-size 1" in other.log


def test_a_script_of_torchrun_is_refused(job: MakeJob, tmp_path: Path) -> None:
    """Its workers would be started again after each change, and never form a replica."""
    script = tmp_path / "ddp.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    node = job(program=[str(script)]).start(slots=2, options=("--replica-size", "2"))
    assert node.process.wait(START_S) == 2
    assert node.says("makes torch's default process group itself", "Leave --replica-size out")
    assert "Traceback" not in node.log


def test_the_leader_is_lost_when_it_has_written_a_replica(replicas: Callable[..., ReplicaJob]) -> None:
    """Before it can act on the record, or pass it on: the record stands, and its worker's end makes it over."""
    one = replicas("2:3")
    leader = one.start(agent_failpoints="replicas.after=kill")
    leader.await_line("this node leads")
    others = [one.start(), one.start()]
    assert leader.process.wait(START_S) == -signal.SIGKILL
    assert "replicas.after" in leader.log
    record = one.await_generation(1)
    assert {m.worker_id for m in record.members} == {w.worker_id for n in others for w in n.workers}


def test_an_agent_that_holds_parts_of_two_replicas_is_lost(replicas: Callable[..., ReplicaJob]) -> None:
    one = replicas("1:3")
    nodes = [one.start(slots=3) for _ in range(3)]
    before = one.await_generation(4)
    across = next(r for r in one.records.values() if len(r.agent_ids) == 2)
    victim = next(n for n in nodes if n.workers[0].worker_id.startswith(across.members[0].agent_id))
    rest = [n for n in nodes if n is not victim]
    kept = {w.worker_id for n in rest for w in n.workers} - set(across.worker_ids)
    victim.kill_agent()
    after = one.await_generation(3, before.number)
    # the part of the second replica on a node that stays was killed, and forms one with the spare
    listed = {m.worker_id for m in after.members}
    assert len(listed & kept) >= 4
    assert not listed & set(across.worker_ids)
    # its agent hears of it from the leader, or notices first that the other host does not answer
    assert any("its replica is over: " in n.log or "is over: the worker in slot" in n.log for n in rest)


def test_etcd_loses_the_keys_of_replicas(replicas: Callable[..., ReplicaJob]) -> None:
    one = replicas("1:2")
    nodes = [one.start(slots=2), one.start(slots=2)]
    before = one.await_generation(2)
    records = one.records
    one.store.delete_range(KeyRange.of_prefix(one.keys.replicas))
    eventually(
        lambda: one.records == records, START_S, lambda: f"the records are put again: {one.records}", 0.05
    )
    assert one.generation == before, "no member was harmed"
    # a joiner's record counts as before
    nodes[1].workers[0].kill()
    after = one.await_generation(2, before.number)
    assert {m.worker_id for m in after.members} == {w.worker_id for n in nodes for w in n.workers}


def test_records_that_no_leader_writes_harm_no_replica(replicas: Callable[..., ReplicaJob]) -> None:
    one = replicas("1:2")
    nodes = [one.start(slots=2), one.start(slots=2)]
    before = one.await_generation(2)
    known = next(iter(one.records.values()))
    other = next(r for r in one.records.values() if r != known)
    one.store.put(one.keys.replica("garbage"), b"\xff\xff")
    mixed = replace(known, replica_id="mixed", members=(known.members[1], other.members[0]), over="invented")
    large = replace(known, replica_id="large", members=(*known.members, *other.members), over="invented")
    for made in (mixed, large):
        one.store.put(one.keys.replica(made.replica_id), made.encode())
    eventually(
        lambda: (
            one.store.get(one.keys.replica("mixed")) is None
            and one.store.get(one.keys.replica("large")) is None
        ),
        START_S,
        lambda: "the leader removes what contradicts other records",
        0.05,
    )
    assert any("passing over" in n.log and "garbage" in n.log for n in nodes)
    assert one.generation == before
    assert {m.worker_id for m in before.members} == {w.worker_id for n in nodes for w in n.workers}


def test_etcd_loses_all_keys_of_a_job_of_replicas(job: MakeJob, make_lab: MakeLab, tmp_path: Path) -> None:
    """No member is harmed, and a joiner's replica is assembled as before."""
    lab = make_lab(4)
    cluster = lab.etcd(lab.hosts[0])
    out = tmp_path / "stub"
    out.mkdir()
    options = ("--replica-size", "2", "--start-method", "spawn")
    one = job(endpoints=cluster.endpoints, nodes="2:4", options=options, program=[str(STUB)])
    environment = {"STUB_OUT": str(out)}
    nodes = [one.start(host, environment=environment) for host in lab.hosts[:3]]

    def trains() -> bool:
        """The third node waits for a fourth; which of them it is depends on who was ready first."""
        return sum(n.says("generation 2 is in force") for n in nodes) == 2

    eventually(trains, START_S, lambda: "\n".join(n.log for n in nodes), 0.05)
    known = {w.worker_id for n in nodes for w in n.workers}
    wipe(cluster)
    for node in nodes:
        node.await_line("etcd answers again")
    keys = JobKeys(one.job_id)
    nodes.append(one.start(lab.hosts[3], environment=environment))

    def of_four() -> bool:
        found = cluster.standing(keys.generation).get(keys.generation)
        return found is not None and Generation.decode(found.value).world_size == 4

    eventually(of_four, START_S, lambda: "\n".join(n.log for n in nodes), 0.05)
    assert {w.worker_id for n in nodes for w in n.workers} > known, "no worker was started again"
    assert not any(n.says("is over") for n in nodes)


def test_the_hosts_of_one_replica_lose_sight_of_each_other(
    job: MakeJob, make_lab: MakeLab, tmp_path: Path
) -> None:
    """Its workers wait in collectives that report nothing: their agents end them. As long as the cut lasts they are not
    assembled with each other again, but with another node's worker; behind it they are."""
    lab = make_lab(6)
    cluster = lab.etcd(lab.hosts[0])
    out = tmp_path / "stub"
    out.mkdir()
    options = ("--replica-size", "2", "--start-method", "spawn")
    one = job(endpoints=cluster.endpoints, nodes="2:5", options=options, program=[str(STUB)])
    hosts = lab.hosts[1:]
    nodes = [one.start(host, environment={"STUB_OUT": str(out)}) for host in hosts[:4]]
    for node in nodes:  # a replica that was ready later is in force later
        node.await_line("is in force from step")
    keys = JobKeys(one.job_id)

    def waits_for_a_replica(node: Node) -> bool:
        members = [pb.Member.FromString(m.value) for m in cluster.standing(keys.members).values()]
        own = {w.worker_id for w in node.workers}
        return any(m.worker_id in own and m.stage == pb.ASSEMBLING for m in members)

    def records() -> list[Generation]:
        return [Generation.decode(c.value) for c in cluster.history(keys.generation) if c.value is not None]

    # not the leader's
    leader = next(n for n in nodes if n.says("this node leads"))
    placed = {m.worker_id: m.replica_rank for m in records()[-1].members}
    other = 1 - placed[leader.workers[0].worker_id]
    ends = [n for n in nodes if placed[n.workers[0].worker_id] == other]
    one_end, far_end = (hosts[nodes.index(n)] for n in ends)
    names = {m.node_name for m in records()[-1].members if m.replica_rank == other}

    def pairs_the_ends(record: Generation) -> bool:
        return names in [{m.node_name for m in record.members if m.replica_rank == r} for r in range(2)]

    # a replica formed anew takes longer than a round of touches, and only a host that has answered is missed
    ends[0].workers[0].kill()
    eventually(
        lambda: all(n.says("form a replica", times=2) for n in ends), START_S, lambda: ends[0].log, 0.05
    )
    one_end.cut_to(far_end)
    eventually(
        lambda: any(n.says("does not answer this host") for n in ends), START_S, lambda: ends[0].log, 0.05
    )
    eventually(lambda: records()[-1].world_size == 2, START_S, lambda: str(records()[-1]), 0.05)
    eventually(lambda: all(map(waits_for_a_replica, ends)), START_S, lambda: ends[0].log, 0.05)
    while_cut = records()[-1].number
    fifth = one.start(hosts[4], environment={"STUB_OUT": str(out)})
    eventually(lambda: records()[-1].world_size == 4, START_S, lambda: str(records()[-1]), 0.05)
    assert not any(record.number > while_cut and pairs_the_ends(record) for record in records())
    one_end.heal_to(far_end)
    fifth.send(signal.SIGTERM)
    eventually(lambda: pairs_the_ends(records()[-1]), START_S, lambda: str(records()[-1]), 0.05)
    assert fifth.process.wait(START_S) == 0
    assert all(n.process.is_running for n in nodes), "the job allows no failure, and this is none"
