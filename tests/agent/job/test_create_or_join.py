"""The first agent writes the job, the others read it, and a job that has ended makes room: on a real etcd."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from bagua_agent.base.errors import InfrastructureLost, JobIsOver, UserError
from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import CommandKind, JobConfig, StoreCredentials, WorkerCommand
from bagua_agent.etcd.client import Compare, KeyValue, Put, Store, Transaction
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.job import create_or_join as module
from bagua_agent.job.create_or_join import (
    JobFound,
    ensure_job,
    key_pair_is_current,
    make_live,
    remove_unused_identity,
)
from bagua_agent.node.script.script_mode import Mode
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import PROTOCOL_VERSION

KEYS = JobKeys("job")
DEADLINE_S = 10.0
NEW_JOB = {"control/spec", "control/desired", "events/created"}


@dataclass(frozen=True)
class Comer:
    """An agent that comes to the job with a connection of its own."""

    store: Store
    config: JobConfig

    def ensure(self, mode: Mode = Mode.LIVE) -> pb.JobSpec:
        return self.find(mode).spec

    def find(self, mode: Mode = Mode.LIVE) -> JobFound:
        return ensure_job(self.store, KEYS, self.config, mode=mode)


@pytest.fixture
def store(etcd: EmbeddedEtcd) -> Iterator[Store]:
    store = Store(store_config((etcd.endpoint,), StoreCredentials()))
    store.connect(DEADLINE_S)
    store.delete_prefix(KEYS.prefix)
    store.delete(KEYS.identity)
    yield store
    store.close()


@pytest.fixture
def make_agent(etcd: EmbeddedEtcd) -> Iterator[Callable[..., Comer]]:
    """Agents that come to the job, each with a connection of its own."""
    stores: list[Store] = []

    def make(**settings: Any) -> Comer:
        stores.append(Store(store_config((etcd.endpoint,), StoreCredentials())))
        command = WorkerCommand(CommandKind.SCRIPT, "train.py")
        return Comer(stores[-1], JobConfig(job_id="job", command=command, max_nodes=2, **settings))

    yield make
    for store in stores:
        store.close()


def result(outcome: int = pb.Result.SUCCEEDED) -> bytes:
    return pb.Result(outcome=outcome, exit_code=0).SerializeToString()  # type: ignore[arg-type]


def keys_of(store: Store) -> set[str]:
    return {kv.key.removeprefix(KEYS.prefix) for kv in store.get_prefix(KEYS.prefix)[0]}


def test_the_first_agent_writes_the_job(make_agent: Callable[..., Comer], store: Store) -> None:
    spec = make_agent(max_restarts=3).ensure()
    assert (spec.protocol, spec.max_restarts, spec.script) == (PROTOCOL_VERSION, 3, "train.py")
    assert len(spec.nonce) == 16
    assert keys_of(store) == NEW_JOB
    desired = store.get(KEYS.desired)
    assert desired is not None and pb.Desired.FromString(desired.value) == pb.Desired(
        min_nodes=1, max_nodes=2
    )


def test_a_command_that_is_not_utf8_is_recorded_as_text(store: Store) -> None:
    odd = os.fsdecode(b"caf\xe9")
    command = WorkerCommand(CommandKind.SCRIPT, f"{odd}.py", (odd,))
    assert Comer(store, JobConfig(job_id="job", command=command)).ensure().script == r"caf\udce9.py"
    created = store.get(KEYS.event("created"))
    assert created is not None and r"caf\udce9.py" in pb.Event.FromString(created.value).text


def test_a_later_agent_takes_the_job_as_it_is(make_agent: Callable[..., Comer], store: Store) -> None:
    first = make_agent(max_restarts=3).ensure()
    store.put(KEYS.desired, pb.Desired(min_nodes=2, max_nodes=9).SerializeToString())  # scaled meanwhile
    assert make_agent(max_restarts=0).ensure() == first
    desired = store.get(KEYS.desired)
    assert desired is not None and pb.Desired.FromString(desired.value).max_nodes == 9


def test_agents_that_come_together_agree(make_agent: Callable[..., Comer], store: Store) -> None:
    comers = [make_agent() for _ in range(6)]
    together = threading.Barrier(len(comers))

    def ensure(comer: Comer) -> tuple[str, bytes]:
        together.wait(DEADLINE_S)
        found = comer.find()
        return found.spec.nonce, found.identity.encode()

    with ThreadPoolExecutor(len(comers)) as pool:
        assert len(set(pool.map(ensure, comers))) == 1


def test_each_job_has_a_key_pair_of_its_own(make_agent: Callable[..., Comer], store: Store) -> None:
    before = make_agent().find()
    end_job(store, before.spec.nonce)
    after = make_agent().find()
    assert after.spec.nonce != before.spec.nonce and after.identity.key != before.identity.key
    assert not KEYS.identity.startswith("/bagua/v1/"), "which viewers read"


def test_a_key_pair_that_was_removed_is_made_anew(make_agent: Callable[..., Comer], store: Store) -> None:
    old = make_agent().find()
    store.delete(KEYS.identity)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda comer: comer.find(), [make_agent() for _ in range(4)]))
    assert {each.spec.nonce for each in found} == {old.spec.nonce}
    assert len({each.identity for each in found}) == 1 and found[0].identity != old.identity


def test_a_pair_removed_before_the_joining_agents_key_stood_is_put_again(
    make_agent: Callable[..., Comer], store: Store
) -> None:
    """The last agent that leaves sees no other key, though another agent has read the pair already."""
    joining = make_agent().find()
    assert remove_unused_identity(store, KEYS), (
        "the fault: the pair goes between the joiner's read and its key"
    )
    store.put(KEYS.agent("joining"), b"")
    assert key_pair_is_current(store, KEYS, joining.spec.nonce, joining.identity)
    assert make_agent().find().identity == joining.identity
    assert not remove_unused_identity(store, KEYS)


def test_an_agent_learns_that_others_made_another_pair(
    make_agent: Callable[..., Comer], store: Store
) -> None:
    joining = make_agent().find()
    assert remove_unused_identity(store, KEYS)
    other = make_agent().find().identity
    assert other != joining.identity
    assert not key_pair_is_current(store, KEYS, joining.spec.nonce, joining.identity)
    assert make_agent().find().identity == other, "the pair that others use stays"


def test_the_pair_of_a_job_that_ended_or_was_replaced_is_not_put_again(
    make_agent: Callable[..., Comer], store: Store
) -> None:
    joining = make_agent().find()
    store.delete(KEYS.identity)
    assert key_pair_is_current(store, KEYS, "of another job", joining.identity)
    store.put(KEYS.result, result())
    assert key_pair_is_current(store, KEYS, joining.spec.nonce, joining.identity)
    assert store.get(KEYS.identity) is None


def test_a_joining_agent_knows_how_many_are_there(make_agent: Callable[..., Comer], store: Store) -> None:
    assert make_agent().find().nodes == 0
    for name in ("a", "b"):
        store.put(KEYS.agent(name), b"")
    assert make_agent().find().nodes == 2


@pytest.mark.parametrize("value", [b"", b"\xff", b"-----BEGIN CERTIFICATE-----\n"])
def test_a_corrupted_key_pair_is_named_with_the_way_out(
    make_agent: Callable[..., Comer], store: Store, value: bytes
) -> None:
    make_agent().ensure()
    store.put(KEYS.identity, value)
    with pytest.raises(UserError, match=rf"{KEYS.identity} can't be read .*etcdctl del {KEYS.identity}"):
        make_agent().ensure()


def end_job(store: Store, nonce: str) -> None:
    """What a job leaves behind."""
    store.put(KEYS.generation, b"a generation")
    store.put(KEYS.closing, b"closing")
    store.put(KEYS.failure("w0"), b"a failure")
    store.put(KEYS.finished("w1"), b"\x01")
    store.put(KEYS.refused("w2"), b"a refusal")
    store.put(KEYS.member("w3"), b"a member")
    store.put(KEYS.suspicion("w3"), b"a suspicion")
    store.put(KEYS.result, result())


def test_a_job_that_has_ended_makes_room(make_agent: Callable[..., Comer], store: Store) -> None:
    before = make_agent().ensure()
    end_job(store, before.nonce)
    after = make_agent().ensure()
    assert after.nonce != before.nonce
    assert keys_of(store) == NEW_JOB, "nothing of the old job counts for the new one"


def test_an_agent_that_makes_room_knows_how_the_job_before_ended(
    make_agent: Callable[..., Comer], store: Store
) -> None:
    assert make_agent().find().before is None
    store.put(KEYS.departed("a.0.w"), pb.Departure(worker_id="a.0.w").SerializeToString())
    store.put(
        KEYS.result, pb.Result(outcome=pb.Result.STOPPED, reason="every worker left").SerializeToString()
    )
    before = make_agent().find().before
    assert before is not None and (before.outcome, before.reason) == (pb.Result.STOPPED, "every worker left")
    assert keys_of(store) == NEW_JOB
    store.put(KEYS.result, b"\xff")
    assert make_agent().find().before is None, "what can't be read ended the job all the same"


@pytest.mark.parametrize(
    ("value", "code"),
    [(result(), 0), (pb.Result(outcome=pb.Result.FAILED, exit_code=3).SerializeToString(), 3), (b"\xff", 1)],
)
def test_a_submission_runs_once(
    make_agent: Callable[..., Comer], store: Store, value: bytes, code: int
) -> None:
    """Its unit may be started again before the scheduler has written the outcome."""
    comer = make_agent(submission="abc")
    comer.ensure()
    store.put(KEYS.result, value)
    before = keys_of(store)
    with pytest.raises(JobIsOver) as over:
        comer.ensure()
    assert over.value.result_code == code
    assert keys_of(store) == before, "the scheduler still reads the result"


def test_a_job_that_succeeded_is_not_run_again_where_it_is_to_run_once(
    make_agent: Callable[..., Comer], store: Store
) -> None:
    """The agent of a node that comes late, such as a second allocation of Slurm or the substitute of an evicted pod."""
    before = make_agent().ensure()
    end_job(store, before.nonce)
    keys = keys_of(store)
    with pytest.raises(JobIsOver, match=r"job 'job' has succeeded.*--once.*--rdzv-id") as over:
        make_agent(once=True).ensure()
    assert over.value.result_code == 0
    assert keys_of(store) == keys, "a later one finds the result, too"
    assert make_agent().ensure().nonce != before.nonce


@pytest.mark.parametrize("outcome", [pb.Result.FAILED, pb.Result.STOPPED])
def test_a_job_that_did_not_succeed_is_run_again_though_it_is_to_run_once(
    make_agent: Callable[..., Comer], store: Store, outcome: int
) -> None:
    comer = make_agent(once=True)
    before = comer.ensure()
    store.put(KEYS.result, result(outcome))
    after = comer.find()
    assert after.spec.nonce != before.nonce and after.before is not None and after.before.outcome == outcome


def test_agents_that_come_together_after_a_job_agree_on_the_next(
    make_agent: Callable[..., Comer], store: Store
) -> None:
    before = make_agent().ensure()
    end_job(store, before.nonce)
    comers = [make_agent() for _ in range(4)]
    together = threading.Barrier(len(comers))

    def ensure(comer: Comer) -> str:
        together.wait(DEADLINE_S)
        return comer.ensure().nonce

    with ThreadPoolExecutor(len(comers)) as pool:
        [nonce] = set(pool.map(ensure, comers))
    assert nonce != before.nonce
    spec = store.get(KEYS.spec)
    assert spec is not None and pb.JobSpec.FromString(spec.value).nonce == nonce
    assert keys_of(store) == NEW_JOB


def test_it_waits_until_the_old_job_s_agents_are_gone(make_agent: Callable[..., Comer], store: Store) -> None:
    before = make_agent().ensure()
    end_job(store, before.nonce)
    store.put(KEYS.agent("old"), b"an agent that reads the result")
    comer = make_agent()
    ensured: list[str] = []
    thread = threading.Thread(target=lambda: ensured.append(comer.ensure().nonce))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and not ensured
    kept = store.get(KEYS.result)
    assert kept is not None, "the old agents have yet to read it"
    store.delete(KEYS.agent("old"))
    thread.join(DEADLINE_S)
    assert ensured and ensured[0] != before.nonce


def test_agents_that_never_go_are_named(
    make_agent: Callable[..., Comer], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OLD_AGENTS_LEAVE_S", 0.2)
    store.put(KEYS.result, result())
    store.put(KEYS.agent("old"), b"an agent")
    with pytest.raises(UserError, match=r"job 'job' has ended but 1 agents are still in it.*--rdzv-id"):
        make_agent().ensure()
    assert keys_of(store) == {"control/result", "agents/old"}


def test_another_protocol_is_refused(make_agent: Callable[..., Comer], store: Store) -> None:
    store.put(KEYS.spec, pb.JobSpec(protocol=99, nonce="n").SerializeToString())
    with pytest.raises(UserError, match=f"job 'job' runs protocol 99, this bagua speaks {PROTOCOL_VERSION}"):
        make_agent().ensure()


def test_a_corrupted_job_is_named_with_the_way_out(make_agent: Callable[..., Comer], store: Store) -> None:
    store.put(KEYS.spec, b"\xff\xff")
    with pytest.raises(UserError, match=rf"{KEYS.spec} can't be read .*etcdctl del --prefix {KEYS.prefix}"):
        make_agent().ensure()


# -- a job of restart mode becomes live


def spec_in(store: Store) -> tuple[pb.JobSpec, int]:
    """The spec that stands and its revision."""
    found = store.get(KEYS.spec)
    assert found is not None
    return pb.JobSpec.FromString(found.value), found.mod_revision


@pytest.mark.parametrize(("mode", "told"), [(Mode.LIVE, pb.JobSpec.LIVE), (Mode.RESTART, pb.JobSpec.RESTART)])
def test_the_first_agent_says_how_workers_follow(
    make_agent: Callable[..., Comer], store: Store, mode: Mode, told: int
) -> None:
    make_agent().ensure(mode)
    other = Mode.RESTART if mode is Mode.LIVE else Mode.LIVE
    assert make_agent().ensure(other).mode == told, "a later agent takes the job as it is"
    assert spec_in(store)[0].mode == told


def test_a_job_becomes_live_and_keeps_all_else(make_agent: Callable[..., Comer], store: Store) -> None:
    before = make_agent(max_restarts=3).ensure(Mode.RESTART)
    others = keys_of(store)
    make_live(store, KEYS, before.nonce)
    after, _ = spec_in(store)
    assert after.mode == pb.JobSpec.LIVE
    after.mode = pb.JobSpec.RESTART
    assert after == before
    assert keys_of(store) == others


def test_a_job_whose_spec_was_overwritten_is_made_live_later(
    make_agent: Callable[..., Comer], store: Store
) -> None:
    nonce = make_agent().ensure(Mode.RESTART).nonce
    store.put(KEYS.spec, b"\xff\xff")
    with pytest.raises(InfrastructureLost, match="can't be read"):
        make_live(store, KEYS, nonce)


def test_a_job_becomes_live_once(make_agent: Callable[..., Comer], store: Store) -> None:
    """Every agent whose worker opened a session says so; each write would wake all of them."""
    nonce = make_agent().ensure(Mode.RESTART).nonce
    make_live(store, KEYS, nonce)
    _, revision = spec_in(store)
    make_live(store, KEYS, nonce)
    assert spec_in(store)[1] == revision


def test_a_session_says_nothing_of_the_next_job(make_agent: Callable[..., Comer], store: Store) -> None:
    before = make_agent().ensure(Mode.RESTART)
    end_job(store, before.nonce)
    after = make_agent().ensure(Mode.RESTART)
    _, revision = spec_in(store)
    make_live(store, KEYS, before.nonce)
    assert spec_in(store) == (after, revision)


def test_a_job_whose_spec_is_lost_becomes_live_once_it_is_back(
    make_agent: Callable[..., Comer], store: Store
) -> None:
    """The agent that puts the spec again may remember it as it was."""
    spec = make_agent().ensure(Mode.RESTART)
    store.delete(KEYS.spec)
    with pytest.raises(InfrastructureLost, match=f"{KEYS.spec} is gone"):
        make_live(store, KEYS, spec.nonce)
    assert store.get(KEYS.spec) is None, "a spec is not made up"
    store.put(KEYS.spec, spec.SerializeToString())
    make_live(store, KEYS, spec.nonce)
    assert spec_in(store)[0].mode == pb.JobSpec.LIVE


class ReplacedMeanwhile(Store):
    """The real store, in which another agent writes the spec after it was read and before it is written."""

    def __init__(self, inner: Store, theirs: pb.JobSpec) -> None:
        self._inner = inner
        self._theirs = theirs

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        return self._inner.get(key, timeout_s)

    def transact(
        self,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        timeout_s: float | None = None,
        delete_ranges: Sequence[KeyRange] = (),
        repeatable: bool = False,
    ) -> Transaction:
        self._inner.put(KEYS.spec, self._theirs.SerializeToString())
        return self._inner.transact(compares, puts, deletes, timeout_s)


@pytest.mark.parametrize("another_job", [False, True])
def test_what_others_write_meanwhile_is_not_undone(
    make_agent: Callable[..., Comer], store: Store, another_job: bool
) -> None:
    ours = make_agent().ensure(Mode.RESTART)
    theirs = pb.JobSpec()
    theirs.CopyFrom(ours)
    theirs.max_restarts = 9
    if another_job:
        theirs.nonce = "theirs"
    with pytest.raises(InfrastructureLost, match="was written by others meanwhile"):
        make_live(ReplacedMeanwhile(store, theirs), KEYS, ours.nonce)
    assert spec_in(store)[0] == theirs
    make_live(store, KEYS, ours.nonce)  # done again, as it is until it does not raise
    theirs.mode = pb.JobSpec.RESTART if another_job else pb.JobSpec.LIVE
    assert spec_in(store)[0] == theirs
