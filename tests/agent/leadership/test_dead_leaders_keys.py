"""Removing a dead leader's keys: all in one transaction, or none if the leader or its agent is another by now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.leadership.leadership import Leadership
from bagua_agent.leadership.reports import Act, Report, WriteFailed, Written
from bagua_agent.rpc.job_identity import JobIdentity
from tests.lab.wait import eventually

KEYS = JobKeys("job")
DEADLINE_S = 20.0
OF_THE_LEADER = (KEYS.leader, KEYS.agent("a"), KEYS.member("a.0"), KEYS.suspicion("a.0"))


class Confirmer:
    """An agent that found the leader dead, beside keys of that leader and of another node."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.reports: list[Report] = []
        self.leadership = Leadership(
            store,
            KEYS,
            cast(LeasedKeys, None),
            cast(JobIdentity, None),
            0.5,
            self.reports.append,
            lambda record, addresses: pytest.fail("no record is written here"),
        )
        for key in (*OF_THE_LEADER, KEYS.agent("b"), KEYS.member("b.0")):
            store.put(key, b"stands")

    def revision(self, key: str) -> int:
        found = self.store.get(key)
        return 0 if found is None else found.create_revision

    def put_anew(self, key: str) -> None:
        self.store.delete(key)
        self.store.put(key, b"anew")

    def standing(self) -> set[str]:
        everything = (*OF_THE_LEADER, KEYS.agent("b"), KEYS.member("b.0"))
        return {key for key in everything if self.revision(key)}

    def remove(self, leader_revision: int, agent_revision: int) -> None:
        """Until the transaction was done or refused."""
        self.leadership.election.remove_dead_leader("a", leader_revision, agent_revision, ["a.0"])
        eventually(lambda: self.reports, DEADLINE_S, "an outcome")


@pytest.fixture
def confirmer(etcd: EmbeddedEtcd) -> Iterator[Confirmer]:
    store = Store(store_config((etcd.endpoint,), StoreCredentials()))
    store.connect(DEADLINE_S)
    found = Confirmer(store)
    yield found
    found.leadership.stop()
    store.delete_prefix(KEYS.prefix)
    store.close()


def test_its_part_in_the_job_goes_with_its_leadership(confirmer: Confirmer) -> None:
    confirmer.remove(confirmer.revision(KEYS.leader), confirmer.revision(KEYS.agent("a")))
    assert confirmer.standing() == {KEYS.agent("b"), KEYS.member("b.0")}
    assert confirmer.reports == [Written(Act.LEADER_REMOVAL)]


def test_an_agent_that_does_not_see_its_part_removes_its_leadership(confirmer: Confirmer) -> None:
    confirmer.remove(confirmer.revision(KEYS.leader), 0)
    assert confirmer.standing() == {*OF_THE_LEADER[1:], KEYS.agent("b"), KEYS.member("b.0")}


@pytest.mark.parametrize(
    "anew", [KEYS.leader, KEYS.agent("a")], ids=["another leads", "it put its key again"]
)
def test_nothing_is_removed_for_what_stood_before(confirmer: Confirmer, anew: str) -> None:
    asked_with = confirmer.revision(KEYS.leader), confirmer.revision(KEYS.agent("a"))
    confirmer.put_anew(anew)
    before = confirmer.standing()
    confirmer.leadership.election.remove_dead_leader("a", *asked_with, ["a.0"])
    eventually(lambda: confirmer.reports, DEADLINE_S, "the transaction is refused")
    assert confirmer.standing() == before
    assert confirmer.reports == [
        WriteFailed(Act.LEADER_REMOVAL, "removing a dead leader's keys", "a comparison failed")
    ]
