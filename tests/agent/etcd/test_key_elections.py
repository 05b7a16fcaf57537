"""Elections by put_if_absent on real servers: one winner, and what an attempt without an answer leaves."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bagua_agent.base.errors import OutcomeUnknown, StoreUnavailable
from bagua_agent.etcd.client import Store, Transaction
from bagua_agent.etcd.leased_keys import (
    LeasedKeys,
    LeaseGranted,
    LeaseLapsed,
)
from tests.agent.etcd.conftest import DEADLINE_S, Server
from tests.agent.etcd.kept_keys import Keep, MakeStore, kinds, read, values


def test_one_of_many_wins(unix_server: Server, make_store: MakeStore, keep: Keep) -> None:
    contenders = [keep(make_store(unix_server.endpoint))[0] for _ in range(4)]
    ready = threading.Barrier(4)

    def contend(i: int) -> int | None:
        ready.wait(5)
        return contenders[i].put_if_absent("/leader", f"{i}".encode())

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(contend, range(4)))
    winners = [i for i, revision in enumerate(won) if revision is not None]
    assert len(winners) == 1
    store = make_store(unix_server.endpoint)
    leader = read(store, "/leader")
    assert leader.value == f"{winners[0]}".encode()
    assert leader.create_revision == won[winners[0]]
    # Still ours
    assert contenders[winners[0]].put_if_absent("/leader", leader.value) == leader.create_revision

    contenders[winners[0]].remove("/leader")
    assert contenders[winners[0]].flush(5)
    loser = next(i for i in range(4) if i != winners[0])
    assert contenders[loser].put_if_absent("/leader", b"next") is not None


def test_standing_again_while_leading_changes_nothing(
    unix_server: Server, make_store: MakeStore, keep: Keep
) -> None:
    store = make_store(unix_server.endpoint)
    leader, other = keep(store, 1)[0], keep(store, 1)[0]
    won = leader.put_if_absent("/leader", b"me")
    assert other.put_if_absent("/leader", b"other") is None
    assert leader.put_if_absent("/leader", b"me again") == won
    leader.recheck()
    leader.put("/x", b"")
    assert leader.flush(5)  # the check came before it
    assert read(store, "/leader").create_revision == won
    assert read(store, "/leader").value == b"me"


def test_resigning_and_standing_again(unix_server: Server, make_store: MakeStore, keep: Keep) -> None:
    store = make_store(unix_server.endpoint)
    keys, _ = keep(store)
    last = 0
    for _ in range(20):
        revision = keys.put_if_absent("/leader", b"me")
        assert revision is not None and revision > last
        last = revision
        assert read(store, "/leader").create_revision == revision
        keys.remove("/leader")


def test_an_election_without_etcd_ends_in_time(
    unix_server: Server, make_store: MakeStore, keep: Keep
) -> None:
    keys, events = keep(make_store(unix_server.endpoint), 1)
    events.wait_for(lambda e: kinds(e) == [LeaseGranted])
    unix_server.kill()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        keys.put_if_absent("/leader", b"me", timeout_s=0.4)
    assert time.monotonic() - began < 1.5
    assert not keys.flush(0.05) or keys.lease_id


def test_an_election_on_a_lost_lease_takes_the_next(
    unix_server: Server, make_store: MakeStore, keep: Keep
) -> None:
    store = make_store(unix_server.endpoint)
    keys, events = keep(store, 30)
    events.wait_for(lambda e: kinds(e) == [LeaseGranted])
    store.lease_revoke(keys.lease_id)
    assert keys.put_if_absent("/leader", b"me") is not None
    assert read(store, "/leader").lease_id == keys.lease_id
    assert kinds(events.calls) == [LeaseGranted, LeaseLapsed, LeaseGranted]


class LateStore(Store):
    """While `losing`, transactions on /leader are done and their answers are lost, until the caller gives up."""

    losing = False

    def transact(self, *words: Any, **keywords: Any) -> Transaction:
        answer = super().transact(*words, **keywords)
        if not (self.losing and any(put.key == "/leader" for put in words[1])):
            return answer
        if answer.succeeded:
            raise OutcomeUnknown("no answer, as the test wants it")
        raise StoreUnavailable("no answer, as the test wants it")


def await_three_renewals(keys: LeasedKeys) -> None:
    for number in range(3):
        keys.recheck()
        keys.put("/renewed", f"{number}".encode())
        assert keys.flush(DEADLINE_S)  # the check came before it


@pytest.mark.parametrize("lost_by", ["a removal", "the end of the lease"])
def test_a_key_won_before_is_removed_after_an_uncertain_attempt(
    unix_server: Server, make_store: MakeStore, keep: Keep, lost_by: str
) -> None:
    store = make_store(unix_server.endpoint)
    late = LateStore(store.config)
    keys, events = keep(late, 30)
    assert keys.put_if_absent("/leader", b"me") is not None
    if lost_by == "a removal":
        store.delete("/leader")
    else:
        store.lease_revoke(keys.lease_id)
        keys.recheck()
        events.wait_for(lambda e: kinds(e) == [LeaseGranted, LeaseLapsed, LeaseGranted])
    late.losing = True
    with pytest.raises(StoreUnavailable, match="as the test wants it"):
        keys.put_if_absent("/leader", b"me again")
    late.losing = False
    assert read(store, "/leader").lease_id == keys.lease_id, "the attempt was carried out"
    await_three_renewals(keys)
    assert values(store).keys() == {"/renewed"}
    assert keys.put_if_absent("/leader", b"at last") == read(store, "/leader").create_revision
    await_three_renewals(keys)
    assert values(store)["/leader"] == b"at last"
    late.close()


def test_a_key_that_is_held_outlasts_an_uncertain_attempt(
    unix_server: Server, make_store: MakeStore, keep: Keep
) -> None:
    store = make_store(unix_server.endpoint)
    late = LateStore(store.config)
    keys, _ = keep(late, 30)
    won = keys.put_if_absent("/leader", b"me")
    late.losing = True
    with pytest.raises(StoreUnavailable, match="as the test wants it"):
        keys.put_if_absent("/leader", b"me")
    await_three_renewals(keys)
    assert read(store, "/leader").create_revision == won
    late.close()
