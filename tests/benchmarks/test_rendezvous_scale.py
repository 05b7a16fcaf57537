"""The short form of benchmarks/rendezvous_scale: small jobs in whole, and one whose agents see part of it."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from bagua_agent.etcd.key_range import encode_key
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.etcd.stubs import etcd3
from bagua_agent.job.new_identity import make_identity
from bagua_agent.large_jobs.limits import Limits
from bagua_contract.records import Generation, GenerationKind, Placement
from benchmarks import rendezvous_churn, rendezvous_scale
from benchmarks.etcd_load import EtcdConnection, RequestFailed
from benchmarks.simulated_agents import WRITING_AT_ONCE, SimulatedAgents
from tests.docs.printed import printed

rpc = etcd3.etcdrpc
MOST_TO_JOIN, MOST_TO_FORM_AGAIN = 12, 4  # requests of an agent for each generation that is written
MOST_EVENTS = 4  # that it hears for each of them while the job forms again


def test_generations_form_and_form_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a large job; the test of churn has a small one."""
    large = 2 * Limits().whole_picture_nodes
    assert rendezvous_scale.main(["--agents", str(large), "--repeat", "1"]) == 0
    told = capsys.readouterr().out
    for line in (f"{large} agents form in", f"{large} agents reform in"):
        assert line in told


def test_what_each_agent_asks_of_etcd_does_not_grow_with_the_job(tmp_path: Path) -> None:
    """Renewals depend on how long it takes. What an agent hears while the job forms, and the size of what it hears
    later, depends on whether it came before the job was large."""
    for times in (2, 4):
        run = rendezvous_scale.measure(times * Limits().whole_picture_nodes, 0, tmp_path)
        for phase, most in ((run.forms, MOST_TO_JOIN), (run.reforms, MOST_TO_FORM_AGAIN)):
            found, heard = phase.counts, phase.agents * phase.generations
            assert found.requests - found.renewals <= most * heard, (times, phase)
        assert run.reforms.counts.events <= MOST_EVENTS * heard, (times, run.reforms)


def test_thousands_that_commit_at_once_do_not_all_wait_in_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    """etcd refuses a write while 5,000 others are to be applied."""
    size, waiting, most, answered = 3 * WRITING_AT_ONCE, 0, 0, 0

    async def ask(*_: object) -> None:
        nonlocal waiting, most, answered
        waiting, most = waiting + 1, max(most, waiting + 1)
        await asyncio.sleep(0)
        waiting, answered = waiting - 1, answered + 1

    monkeypatch.setattr(SimulatedAgents, "_ask", ask)

    async def commit() -> None:
        agents = SimulatedAgents("", make_identity("j"), size, 0)
        await asyncio.gather(agents.commit(1), agents.suspect(agents.agents[:1], 1))
        await agents.stop()

    asyncio.run(commit())
    assert (most, answered) == (WRITING_AT_ONCE, 2 * size)


def test_a_generation_is_looked_for_once_all_have_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look goes through all agents; one for each agent that hears would cost the square of their number."""
    size = 100
    record = Generation(
        number=1,
        base=0,
        kind=GenerationKind.PLANNED,
        members=tuple(
            Placement(f"n{i:05d}.0", f"n{i:05d}", f"n{i:05d}", 0, i, i, 0, "", 1, i + 1, False)
            for i in range(size)
        ),
    )
    looks = []
    true_look = SimulatedAgents._known_to_all

    def counted(agents: SimulatedAgents, after: int) -> Generation | None:
        looks.append(after)
        return true_look(agents, after)

    monkeypatch.setattr(SimulatedAgents, "_known_to_all", counted)

    async def hear() -> Generation:
        agents = SimulatedAgents("", make_identity("j"), size, 0)
        try:
            forming = asyncio.create_task(agents.formed())
            for agent in agents.agents:
                await asyncio.sleep(0)
                agents._take(agent, encode_key(agents.keys.generation), record.encode())
            return (await asyncio.wait_for(forming, 10.0))[1]
        finally:
            await agents.stop()

    assert asyncio.run(hear()) == record
    assert len(looks) == 2


def test_the_load_asks_as_grpc_does() -> None:
    """Of the least client: many requests at once, larger ones than a window, an error, and a stream."""
    etcd = EmbeddedEtcd.start()

    async def talk() -> None:
        connection = await EtcdConnection.connect(etcd.endpoint.removeprefix("unix:"))
        puts = [
            rpc.PutRequest(key=b"/load/%d" % i, value=bytes(10_000)).SerializeToString() for i in range(50)
        ]
        await asyncio.gather(*(connection.ask("/etcdserverpb.KV/Put", put) for put in puts))
        request = rpc.RangeRequest(key=b"/load/", range_end=b"/load0").SerializeToString()
        answer = rpc.RangeResponse.FromString(await connection.ask("/etcdserverpb.KV/Range", request))
        assert [len(kv.value) for kv in answer.kvs] == [10_000] * 50
        with pytest.raises(RequestFailed):
            lost = rpc.PutRequest(key=b"/load/x", lease=5).SerializeToString()
            await connection.ask("/etcdserverpb.KV/Put", lost)
        granted = await connection.ask(
            "/etcdserverpb.Lease/LeaseGrant", rpc.LeaseGrantRequest(TTL=60).SerializeToString()
        )
        lease_id = rpc.LeaseGrantResponse.FromString(granted).ID
        renewed: asyncio.Queue[bytes] = asyncio.Queue()
        renew = connection.stream("/etcdserverpb.Lease/LeaseKeepAlive", renewed.put_nowait)
        for _ in range(2):
            renew(rpc.LeaseKeepAliveRequest(ID=lease_id).SerializeToString())
            kept = rpc.LeaseKeepAliveResponse.FromString(await asyncio.wait_for(renewed.get(), 5.0))
            assert (lease_id, 60) == (kept.ID, kept.TTL)
        connection.close()

    try:
        asyncio.run(asyncio.wait_for(talk(), 30.0))
    finally:
        etcd.stop()


def test_churn_is_measured_and_scaled_to_an_hour(kept_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, *words = printed("docs/scaling.md", "benchmarks.rendezvous_churn")[1:]
    sizes = [value for option, value in pairwise(words) if option == "--agents"]
    # The rows of the page's table
    assert module == "benchmarks.rendezvous_churn" and sizes == [
        "1024",
        "4096",
        "16384",
    ]
    others = [word for word in words if word not in ("--agents", *sizes)]
    small = ["--agents", "12", "--changes", "2", "--quiet-s", "0.05"]
    assert others == ["--changes", "4", "--keep"] and rendezvous_churn.main([*others, *small]) == 0
    assert {path.suffix for path in kept_in.iterdir()} == {".md", ".json", ".png"}
    assert "n=2)" in capsys.readouterr().out
    database = rendezvous_churn.Database(1, 1, 1)
    changes = (
        rendezvous_churn.Change("loss", 1.0, 0.3, 0.1, 1),
        rendezvous_churn.Change("join", 1.0, 0.2, 0.1, 1),
    )
    churn = rendezvous_churn.Churn(1000, changes, 0.01, 0.02, database, database, database)
    # ten replaced nodes, and 1 and 2 percent of an hour
    assert churn.an_hour() == (pytest.approx(10 * 0.5 + 36.0), pytest.approx(10 * 0.2 + 72.0))
