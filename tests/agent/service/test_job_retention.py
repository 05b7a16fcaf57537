"""With a real etcd: ended jobs are removed whole, by hand or by the scheduler, and none comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bagua_agent.base.errors import StoreFull, UserError
from bagua_agent.cluster.cluster_policy import DAY_S, ClusterPolicy
from bagua_agent.cluster.cluster_records import (
    nonce_of,
    parse_submission,
    read_orders,
    write_outcome,
    write_removal,
)
from bagua_agent.cluster.cluster_view import JobEnd, OutcomeView, RemovalView
from bagua_agent.cluster_client import cluster_requests
from bagua_agent.cluster_client.job_story import follow
from bagua_agent.cluster_state.cluster_picture import ClusterPicture
from bagua_agent.cluster_state.job_removal import remove_job
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import KeyValue, Store, mod_revision_is
from bagua_agent.etcd.connection import Connection
from bagua_agent.etcd.failures import CallFailed
from bagua_agent.etcd.keys import RECORDS_PREFIX, SECRETS_PREFIX, JobKeys
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.history import job_history
from bagua_agent.job.create_or_join import ensure_job
from bagua_agent.security.certificate_files import issued_in, utc_now
from bagua_agent.security.etcd_role_writer import apply
from bagua_agent.service.scheduling.scheduler import Scheduler
from bagua_contract import cluster_pb2 as pb
from bagua_contract import etcd_pb2, membership_pb2
from tests.agent.cluster_state.test_odd_records import node, orders, submission
from tests.agent.service.conftest import People, store_config
from tests.agent.service.daemon_here import LEASE_S
from tests.lab.wait import eventually

DEADLINE_S = 30.0
EVERYTHING = (
    "/bagua/v1/jobs/",
    RECORDS_PREFIX,
    SECRETS_PREFIX,
    cluster_keys.SUBMISSIONS,
    cluster_keys.OUTCOMES,
)


def keys_of(store: Store, job_id: str) -> list[str]:
    """All there are about a job, removals aside."""
    found = [kv.key for prefix in EVERYTHING for kv in store.get_prefix(prefix)[0]]
    return [key for key in found if job_id in key.split("/")]


def put_job_keys(store: Store, job_id: str, events: int = 300) -> None:
    """More than a transaction has operations; of every folder that agents write to."""
    keys = JobKeys(job_id)
    plain = [keys.spec, keys.identity, keys.desired, keys.generation, keys.result, keys.closing, keys.meeting]
    plain += [keys.departed("w"), keys.failure("w"), keys.finished("w"), keys.member("w"), keys.refused("w")]
    plain += [keys.record_part("generation-1", 0), *(keys.event(f"e{n}") for n in range(events))]
    for key in plain:
        store.put(key, b"x")


def submit(store: Store, job_id: str) -> str:
    """The submission's nonce."""
    cluster_requests.submit(store, pb.Submission.FromString(submission(job_id)))
    return cluster_requests.submission_nonce(store, job_id)


def end(store: Store, job_id: str, days_ago: float = 0.0) -> None:
    outcome = OutcomeView(JobEnd.STOPPED, 0, "stopped")
    value = write_outcome(
        outcome, time.time() - days_ago * DAY_S, cluster_requests.submission_nonce(store, job_id)
    )
    store.put(cluster_keys.outcome(job_id), value)


@contextmanager
def scheduling(store: Store, **policy: float) -> Iterator[list[str]]:
    """What it says, while it schedules."""
    said: list[str] = []
    leased = LeasedKeys(store, LEASE_S)
    numbers = {"settle_s": 0.0, "retention_every_s": 0.1, **policy}
    scheduler = Scheduler(store, leased, "n0", said.append, ClusterPolicy(**numbers))  # type: ignore[arg-type]
    scheduler.start()
    try:
        yield said
    finally:
        scheduler.stop()
        leased.close()


# -- by hand


def test_delete_takes_every_key_and_the_name_can_be_used_again(plain_store: Store) -> None:
    nonce = submit(plain_store, "demo")
    submit(plain_store, "demo2")
    put_job_keys(plain_store, "demo")
    put_job_keys(plain_store, "demo2", 3)
    others = keys_of(plain_store, "demo2")
    with pytest.raises(UserError, match=r"job 'demo' has not ended; `bagua-launch stop demo` first"):
        cluster_requests.delete(plain_store, "demo", time.time())
    end(plain_store, "demo")
    with pytest.raises(
        UserError, match=r"'demo' has ended and is still kept; .* `bagua-launch delete demo` first"
    ):
        submit(plain_store, "demo")
    assert "is removed" in cluster_requests.delete(plain_store, "demo", time.time())
    assert keys_of(plain_store, "demo") == []
    assert keys_of(plain_store, "demo2") == others, "one whose name begins alike"
    assert plain_store.get(cluster_keys.removal(nonce)) is not None
    with pytest.raises(UserError, match="no job 'demo' in this etcd"):
        cluster_requests.delete(plain_store, "demo", time.time())
    assert submit(plain_store, "demo") != nonce
    assert keys_of(plain_store, "demo") == [cluster_keys.submission("demo")]


def test_delete_takes_an_ended_job_whose_submission_etcd_has_lost(plain_store: Store) -> None:
    """Else its name could be used for nothing: a new job is refused while the outcome is there."""
    nonce = submit(plain_store, "demo")
    end(plain_store, "demo")
    plain_store.delete(cluster_keys.submission("demo"))
    assert "is removed" in cluster_requests.delete(plain_store, "demo", time.time())
    assert keys_of(plain_store, "demo") == [] and plain_store.get(cluster_keys.removal(nonce)) is not None


def test_delete_waits_for_agents_that_are_leaving(plain_store: Store) -> None:
    submit(plain_store, "demo")
    end(plain_store, "demo")
    plain_store.put(JobKeys("demo").agent("a"), b"")
    with pytest.raises(UserError, match="its agents are still leaving"):
        cluster_requests.delete(plain_store, "demo", time.time())
    assert plain_store.get(cluster_keys.submission("demo")) is not None


def end_of_one_by_hand(store: Store, job_id: str, days_ago: float) -> None:
    """As its agents leave it."""
    keys, event = JobKeys(job_id), job_history.ended("succeeded", "all is done")
    store.put(keys.spec, membership_pb2.JobSpec(nonce=job_id).SerializeToString())
    store.put(keys.result, membership_pb2.Result(outcome=membership_pb2.Result.SUCCEEDED).SerializeToString())
    store.put(keys.event(event.name), event.encode("h1", time.time() - days_ago * DAY_S))


def test_delete_takes_a_job_that_was_started_by_hand_once_it_has_no_agent(plain_store: Store) -> None:
    end_of_one_by_hand(plain_store, "demo", 0.0)
    killed = JobKeys("killed")
    for key in (killed.spec, killed.agent("a"), JobKeys("demo").agent("a")):
        plain_store.put(key, b"")
    with pytest.raises(UserError, match="by hand, and its agents are still leaving"):
        cluster_requests.delete(plain_store, "demo", time.time())
    with pytest.raises(UserError, match="by hand, and it has not ended; `bagua-launch stop killed` first"):
        cluster_requests.delete(plain_store, "killed", time.time())
    for job_id in ("demo", "killed"):
        plain_store.delete(JobKeys(job_id).agent("a"))
        assert "is removed; its logs stay" in cluster_requests.delete(plain_store, job_id, time.time())
        assert keys_of(plain_store, job_id) == []


def test_a_submission_of_an_earlier_version_can_be_removed(plain_store: Store) -> None:
    """It has no nonce, and stopping or scaling it changes nothing of what it is called by."""
    written = pb.Submission.FromString(submission("demo", submitted_unix_s=12345.5))
    plain_store.put(cluster_keys.submission("demo"), written.SerializeToString())
    nonce = nonce_of(written)
    cluster_requests.stop(plain_store, "demo")
    end(plain_store, "demo")
    cluster_requests.delete(plain_store, "demo", time.time())
    assert plain_store.get(cluster_keys.removal(nonce)) is not None
    assert nonce_of(pb.Submission.FromString(submission("demo"))) != nonce


def test_what_a_late_agent_left_is_not_the_next_jobs(plain_store: Store) -> None:
    plain_store.put(JobKeys("demo").event("old"), b"")
    plain_store.put(JobKeys("demo").departed("old"), b"")
    submit(plain_store, "demo")
    assert keys_of(plain_store, "demo") == [cluster_keys.submission("demo")]


def test_an_agent_does_not_begin_a_removed_job_again(plain_store: Store) -> None:
    nonce = submit(plain_store, "demo")
    config = JobConfig("demo", WorkerCommand(CommandKind.SCRIPT, "train.py"), submission=nonce)
    end(plain_store, "demo")
    cluster_requests.delete(plain_store, "demo", time.time())
    with pytest.raises(UserError, match="job 'demo' was removed from the cluster"):
        ensure_job(plain_store, JobKeys("demo"), config)
    assert keys_of(plain_store, "demo") == []


def test_a_follower_of_a_job_learns_that_it_was_removed(plain_store: Store) -> None:
    submit(plain_store, "demo")
    key = cluster_keys.submission("demo")

    def remove(_: object) -> None:
        found = plain_store.get(key)
        assert found is not None
        nonce = nonce_of(parse_submission(found.value, "demo"))
        assert remove_job(plain_store, "demo", nonce, time.time(), mod_revision_is(key, found.mod_revision))

    with pytest.raises(UserError, match="job 'demo' was removed"):
        follow(plain_store, "demo", print, remove)
    with pytest.raises(UserError, match="no job 'demo' in this etcd"):
        follow(plain_store, "demo", print, print)


def test_a_follower_of_a_job_that_is_removed_at_once_learns_how_it_ended(plain_store: Store) -> None:
    submit(plain_store, "demo")

    def end_and_remove(_: object) -> None:
        end(plain_store, "demo")
        cluster_requests.delete(plain_store, "demo", time.time())

    assert follow(plain_store, "demo", print, end_and_remove).outcome == "stopped"


# -- by the scheduler


def await_kept(store: Store, said: list[str], *job_ids: str) -> None:
    def kept() -> list[str]:
        return sorted(kv.key.rpartition("/")[2] for kv in store.get_prefix(cluster_keys.SUBMISSIONS)[0])

    eventually(lambda: kept() == sorted(job_ids), DEADLINE_S, lambda: f"{job_ids} are kept: {kept()}; {said}")


def await_line(said: list[str], words: str) -> None:
    eventually(lambda: any(words in line for line in said), DEADLINE_S, lambda: f"{words}: {said}")


def test_the_scheduler_keeps_the_newest_and_the_young(plain_store: Store) -> None:
    for name, days_ago in (("old", 31.0), ("a", 3.0), ("b", 2.0), ("c", 1.0)):
        submit(plain_store, name)
        put_job_keys(plain_store, name, 3)
        end(plain_store, name, days_ago)
    submit(plain_store, "waits")
    with scheduling(plain_store, ended_kept_jobs=2) as said:
        await_kept(plain_store, said, "b", "c", "waits")
        await_line(said, "job a is removed: 2 jobs have ended since")
    assert keys_of(plain_store, "old") == keys_of(plain_store, "a") == []


def test_jobs_that_were_started_by_hand_go_by_the_same_numbers(plain_store: Store) -> None:
    for name, days_ago in (("old", 31.0), ("a", 3.0), ("b", 2.0), ("c", 1.0)):
        end_of_one_by_hand(plain_store, name, days_ago)
    end_of_one_by_hand(plain_store, "leaves", 31.0)
    plain_store.put(JobKeys("leaves").agent("a"), b"")
    plain_store.put(JobKeys("goes-on").spec, b"")  # its nodes may come back
    submit(plain_store, "of-the-cluster")
    end(plain_store, "of-the-cluster", 31.0 - 2.0)
    with scheduling(plain_store, ended_kept_jobs=2) as said:
        await_line(said, "job a, which was started by hand, is removed: 2 jobs have ended since")
        await_line(said, "job old, which was started by hand, is removed: ")
        plain_store.delete(JobKeys("leaves").agent("a"))
        await_line(said, "job leaves, which was started by hand, is removed: ")
    assert keys_of(plain_store, "old") == keys_of(plain_store, "a") == keys_of(plain_store, "leaves") == []
    for name in ("b", "c", "goes-on", "of-the-cluster"):
        assert keys_of(plain_store, name), f"{name} is kept; {said}"


def test_an_outcome_whose_submission_was_lost_goes_too(plain_store: Store) -> None:
    nonce = submit(plain_store, "demo")
    put_job_keys(plain_store, "demo", 3)
    end(plain_store, "demo", 40.0)
    plain_store.delete(cluster_keys.submission("demo"))
    without = write_outcome(OutcomeView(JobEnd.STOPPED), time.time() - 40 * DAY_S)
    plain_store.put(cluster_keys.outcome("older"), without)
    with scheduling(plain_store) as said:
        eventually(lambda: not keys_of(plain_store, "demo"), DEADLINE_S, lambda: f"{said}")
        eventually(lambda: not keys_of(plain_store, "older"), DEADLINE_S, lambda: f"{said}")
    assert plain_store.get(cluster_keys.removal(nonce)) is not None


def test_one_that_still_has_an_agent_is_removed_once_that_is_gone(plain_store: Store) -> None:
    agent = JobKeys("demo").agent("a")
    submit(plain_store, "demo")
    end(plain_store, "demo", 40.0)
    submit(plain_store, "other")
    end(plain_store, "other", 40.0)
    plain_store.put(agent, b"")
    with scheduling(plain_store) as said:
        await_kept(plain_store, said, "demo")
        plain_store.delete(agent)
        await_kept(plain_store, said)


def test_one_whose_unit_still_lives_is_kept(plain_store: Store) -> None:
    alive = pb.Node.FromString(node("n0"))
    alive.units.add(job_id="demo", state=pb.Unit.RUNNING)
    for name in ("demo", "other"):
        submit(plain_store, name)
        end(plain_store, name, 40.0)
    plain_store.put(cluster_keys.node("n0"), alive.SerializeToString())
    with scheduling(plain_store) as said:
        await_kept(plain_store, said, "demo")
        plain_store.put(cluster_keys.node("n0"), node("n0"))
        await_kept(plain_store, said)


def test_old_removals_go_and_what_late_agents_wrote_goes(plain_store: Store) -> None:
    plain_store.put(cluster_keys.removal("n1"), write_removal(RemovalView("gone", time.time() - 4 * DAY_S)))
    plain_store.put(cluster_keys.removal("n2"), write_removal(RemovalView("late", time.time())))
    plain_store.put(cluster_keys.removal("n3"), write_removal(RemovalView("foreground", time.time())))
    plain_store.put(JobKeys("late").event("e"), b"")
    plain_store.put(JobKeys("foreground").spec, b"of a foreground job under this name")
    plain_store.put(JobKeys("foreground").event("e"), b"")
    with scheduling(plain_store) as said:
        eventually(lambda: plain_store.get(cluster_keys.removal("n1")) is None, DEADLINE_S, lambda: f"{said}")
        eventually(lambda: keys_of(plain_store, "late") == [], DEADLINE_S, lambda: f"{said}")
    assert plain_store.get(cluster_keys.removal("n2")) is not None
    assert len(keys_of(plain_store, "foreground")) == 2


def test_a_submission_that_was_put_back_is_removed_again_and_never_ordered(plain_store: Store) -> None:
    """By a daemon that had not received the removal when etcd lost its keys."""
    nonce = submit(plain_store, "demo")
    back = plain_store.get(cluster_keys.submission("demo"))
    assert isinstance(back, KeyValue)
    end(plain_store, "demo")
    cluster_requests.delete(plain_store, "demo", time.time())
    plain_store.put(cluster_keys.node("n0"), node("n0"))
    with scheduling(plain_store) as said:
        submit(plain_store, "other")
        eventually(lambda: ordered(plain_store) == ["other"], DEADLINE_S, lambda: f"it schedules; {said}")
        plain_store.put(back.key, back.value)
        await_kept(plain_store, said, "other")
        await_line(said, "had been put back, so it is removed again")
    assert plain_store.get(cluster_keys.removal(nonce)) is not None
    assert ordered(plain_store) == ["other"]


def ordered(store: Store) -> list[str]:
    found = store.get(cluster_keys.orders("n0"))
    return [] if found is None else [order.job_id for order in read_orders(found.value)]


def test_a_submission_that_was_put_back_is_in_no_picture() -> None:
    """Neither the scheduler nor `status` sees it in the moment until it is removed again."""
    picture = ClusterPicture(0.0, print)
    key, removal = cluster_keys.submission("demo"), cluster_keys.removal("n1")
    record = write_removal(RemovalView("demo", 1.0))
    picture.take([Change(key, submission("demo", nonce="n1"), 1, 1)], 0.0)
    assert [job.job_id for job in picture.view().submissions] == ["demo"]
    picture.take([Change(removal, record, 2, 2)], 0.0)
    assert picture.view().submissions == () and picture.view().removed == {"demo"}
    assert [job.job_id for job in picture.put_back_jobs()] == ["demo"]
    picture.take([Change(key, submission("demo", nonce="n2"), 3, 3)], 0.0)
    assert [job.nonce for job in picture.view().submissions] == ["n2"], "the next of its name"
    assert picture.view().removed == frozenset() and picture.put_back_jobs() == []


def test_an_order_of_a_removed_job_is_withdrawn(plain_store: Store) -> None:
    plain_store.put(cluster_keys.node("n0"), node("n0"))
    plain_store.put(cluster_keys.removal("n1"), write_removal(RemovalView("gone", time.time())))
    orders = pb.Orders(
        orders=[pb.Order(job_id="gone", slots=1, number=1), pb.Order(job_id="who", slots=1, number=1)]
    )
    plain_store.put(cluster_keys.orders("n0"), orders.SerializeToString())
    with scheduling(plain_store) as said:
        eventually(lambda: ordered(plain_store) == ["who"], DEADLINE_S, lambda: f"{said}")


def test_a_job_does_not_take_over_the_order_of_a_removed_one_of_its_name(plain_store: Store) -> None:
    """As when no scheduler had withdrawn it yet. The order's slots, and its node, are the first job's."""
    four_slots = {"min_nodes": 1, "max_nodes": 1, "slots_per_node": 4, "labels": {"gpu": "h100"}}
    labelled = pb.Node.FromString(node("n1", 4))
    labelled.labels["gpu"] = "h100"
    nonce = submit(plain_store, "demo")
    end(plain_store, "demo")
    plain_store.put(cluster_keys.node("n0"), node("n0", 4))
    plain_store.put(cluster_keys.node("n1"), labelled.SerializeToString())
    plain_store.put(cluster_keys.orders("n0"), orders("demo", nonce=nonce))
    cluster_requests.delete(plain_store, "demo", time.time())
    again = pb.Submission.FromString(submission("demo", **four_slots))
    cluster_requests.submit(plain_store, again)
    with scheduling(plain_store) as said:
        eventually(lambda: ordered(plain_store) == [], DEADLINE_S, lambda: f"it is withdrawn; {said}")
        found = plain_store.get(cluster_keys.orders("n1"))
    assert found is not None
    [order] = read_orders(found.value)
    assert (order.slots, order.nonce) == (4, cluster_requests.submission_nonce(plain_store, "demo"))


# -- etcd's history


def is_compacted(store: Store, key: str, revision: int) -> bool:
    connection = Connection(store.config.endpoints[0], store.config)
    try:
        request = etcd_pb2.RangeRequest(key=key.encode(), revision=revision)
        connection.call(lambda c: c.raw(c.kvstub.Range, request), 5.0)
    except CallFailed as error:
        assert "compacted" in str(error)
        return True
    finally:
        connection.close()
    return False


def test_the_scheduler_compacts_and_all_watchers_go_on(plain_store: Store) -> None:
    first = plain_store.put("/bagua/v1/x", b"1")
    plain_store.put("/bagua/v1/x", b"2")
    plain_store.put(cluster_keys.node("n0"), node("n0"))
    with scheduling(plain_store, compact_every_s=0.1, history_kept_s=0.3) as said:
        eventually(lambda: is_compacted(plain_store, "/bagua/v1/x", first), DEADLINE_S, lambda: f"{said}")
        submit(plain_store, "demo")
        eventually(lambda: ordered(plain_store) == ["demo"], DEADLINE_S, lambda: f"it decides; {said}")
    assert said.count("this node schedules the cluster's jobs") == 1, said


class WithoutRoom(Store):
    """Refuses what needs room: every write but that of the scheduler's key, which was there before."""

    is_full = True

    def transact(self, conditions: Any, puts: Any = (), *args: Any, **more: Any) -> Any:
        if self.is_full and any(put.key != cluster_keys.SCHEDULER for put in puts):
            raise StoreFull("its database is full")
        return super().transact(conditions, puts, *args, **more)


def test_it_compacts_an_etcd_without_room_for_a_removal_or_orders(plain_store: Store) -> None:
    submit(plain_store, "old")
    end(plain_store, "old", 40.0)
    submit(plain_store, "demo")
    plain_store.put(cluster_keys.node("n0"), node("n0"))
    first = plain_store.put("/bagua/v1/x", b"1")
    plain_store.put("/bagua/v1/x", b"2")
    full = WithoutRoom(plain_store.config)
    try:
        with scheduling(full, compact_every_s=0.1, history_kept_s=0.3) as said:
            eventually(lambda: is_compacted(plain_store, "/bagua/v1/x", first), DEADLINE_S, lambda: f"{said}")
            await_line(said, "its database is full; jobs stay as they are until it has room")
            full.is_full = False
            eventually(lambda: ordered(plain_store) == ["demo"], DEADLINE_S, lambda: f"it decides; {said}")
            await_line(said, "job old is removed")
        assert said.count("this node schedules the cluster's jobs") == 1, said
        assert sum("is full" in line for line in said) == 1, said
    finally:
        full.close()


def test_a_compaction_that_was_done_already_is_fine(plain_store: Store) -> None:
    before = plain_store.put("/bagua/v1/x", b"1")
    revision = plain_store.put("/bagua/v1/x", b"2")
    plain_store.compact(revision)
    plain_store.compact(revision)
    assert is_compacted(plain_store, "/bagua/v1/x", before)
    assert plain_store.get("/bagua/v1/x") is not None


def test_roles_suffice(etcd: EmbeddedEtcd, people: People) -> None:
    """An operator submits and deletes, a node schedules, removes and compacts; a viewer does none of it."""
    apply(store_config(etcd.endpoint, people.files["root"]), issued_in(people.folder, utc_now()))
    stores = {
        name: Store(store_config(etcd.endpoint, people.trusting_us(name)))
        for name in ("ann", "node-1", "vic")
    }
    operator, agent, viewer = stores.values()
    try:
        for name in ("by-hand", "by-age"):
            submit(operator, name)
            put_job_keys(agent, name, 3)
            end(agent, name, 40.0)
        with pytest.raises(UserError, match="denies it"):
            cluster_requests.delete(viewer, "by-hand", time.time())
        cluster_requests.delete(operator, "by-hand", time.time())
        first = agent.put("/bagua/v1/x", b"1")
        agent.put("/bagua/v1/x", b"2")
        with scheduling(agent, compact_every_s=0.1, history_kept_s=0.3) as said:
            await_kept(agent, said)
            eventually(lambda: is_compacted(agent, "/bagua/v1/x", first), DEADLINE_S, lambda: f"{said}")
        assert keys_of(operator, "by-age") == keys_of(operator, "by-hand") == []
    finally:
        for store in stores.values():
            store.close()


def test_empty_orders_of_a_node_that_does_not_come_back_go(plain_store: Store) -> None:
    plain_store.put(cluster_keys.node("here"), node("here"))
    plain_store.put(cluster_keys.node("broken"), b"\xff\xff")
    for name in ("here", "gone", "broken"):
        plain_store.put(cluster_keys.orders(name), orders())
    plain_store.put(cluster_keys.orders("busy"), orders("demo"))
    with scheduling(plain_store, orders_kept_s=0.0, put_back_within_s=0.0) as said:
        await_line(said, "node gone has not come back, so its empty orders are removed")
    left = {kv.key.rpartition("/")[2] for kv in plain_store.get_prefix(cluster_keys.ORDERS)[0]}
    assert left == {"here", "broken", "busy"}, said
