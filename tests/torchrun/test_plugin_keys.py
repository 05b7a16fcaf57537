"""The plugin of torchrun on a real etcd: the state of a rendezvous, the agents' store, and its options."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError, PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState
from torch.distributed.elastic.utils.store import barrier, synchronize

from bagua_agent.base.errors import OutcomeUnknown, UserError
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_torchrun.agents_store import AgentsStore
from bagua_torchrun.handler import handler_on
from bagua_torchrun.outage_credit import OutageCredit
from bagua_torchrun.run_lease import LeasedKeys
from bagua_torchrun.settings import OURS, Settings, parse
from bagua_torchrun.state_backend import HEADER, PROTOCOL, StateBackend
from bagua_torchrun.torchrun_plugin import get_handler


@pytest.fixture
def settings(etcd: EmbeddedEtcd, request: pytest.FixtureRequest) -> Settings:
    return parse(str(etcd.endpoint), request.node.name, {})


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    opened = Store(settings.store)
    yield opened
    opened.close()


def backend(store: Store, settings: Settings) -> StateBackend:
    return StateBackend(LeasedKeys(store, settings.ttl_s), settings.state_key, OutageCredit(2, 6))


def test_a_state_is_written_only_over_the_one_that_was_read(store: Store, settings: Settings) -> None:
    first, second = backend(store, settings), backend(store, settings)
    assert first.get_state() is None
    written = first.set_state(b"one")
    assert written is not None and (written[0], written[2]) == (b"one", True)
    refused = second.set_state(b"two")  # it knows no state, and there is one
    assert refused == (b"one", written[1], False)
    replaced = second.set_state(b"two", refused[1])
    assert replaced is not None and (replaced[0], replaced[2]) == (b"two", True)
    assert first.set_state(b"three", written[1]) == (b"two", replaced[1], False)


def state_of(*, closed: bool) -> bytes:
    state = _RendezvousState()
    state.closed = closed
    return pickle.dumps(state)


def test_a_state_that_etcd_has_lost_is_written_again(store: Store, settings: Settings) -> None:
    reader, writer = backend(store, settings), backend(store, settings)
    state, next_state = state_of(closed=False), state_of(closed=True)
    written = writer.set_state(state)
    assert written is not None and reader.get_state() == (state, written[1])
    store.delete(settings.state_key)
    found = reader.get_state()
    assert found is not None and found[0] == state
    newcomer = backend(store, settings)
    assert newcomer.get_state() == found, "it joins the others"

    store.delete(settings.state_key)
    refused = writer.set_state(next_state, written[1])
    assert refused is not None and refused[0] == state and not refused[2]
    assert writer.set_state(next_state, refused[1]) is not None


def test_a_state_that_another_agent_wrote_after_the_loss_stays(store: Store, settings: Settings) -> None:
    first, second = backend(store, settings), backend(store, settings)
    first.set_state(state_of(closed=False))
    store.delete(settings.state_key)
    second.set_state(b"anew")
    found = first.get_state()
    assert found is not None and found[0] == b"anew"


def test_a_closed_run_does_not_come_back(store: Store, settings: Settings) -> None:
    agent = backend(store, settings)
    agent.set_state(state_of(closed=True))
    store.delete(settings.state_key)
    assert agent.get_state() is None and store.get(settings.state_key) is None


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (state_of(closed=False), "no protocol number"),
        (HEADER.replace(b"%d" % PROTOCOL, b"%d" % (PROTOCOL + 1)) + b"state", f"protocol {PROTOCOL + 1}"),
        (b"", "no protocol number"),
    ],
)
def test_a_run_of_another_version_is_refused_and_stays_as_it_is(
    store: Store, settings: Settings, found: bytes, named: str
) -> None:
    store.put(settings.state_key, found)
    parameters = RendezvousParameters("bagua-etcd", "", "demo", 1, 2, "127.0.0.1")
    handler = handler_on(store, settings, parameters)
    with pytest.raises(RendezvousStateError, match=f"has {named}, and this version of Bagua has {PROTOCOL}"):
        handler.next_rendezvous()
    assert not handler.shutdown(), "torchrun calls it after an error, and would close the run"
    read = store.get(settings.state_key)
    assert read is not None and read.value == found


def test_a_version_without_protocol_numbers_can_not_read_the_state(store: Store, settings: Settings) -> None:
    backend(store, settings).set_state(state_of(closed=False))
    read = store.get(settings.state_key)
    assert read is not None
    with pytest.raises(pickle.PickleError):  # torch turns it into an error of the agent
        pickle.loads(read.value)


class Doubtful(Store):
    """Does what is asked and says that no answer came."""

    def transact(self, *words: Any, **keywords: Any) -> Any:
        super().transact(*words, **keywords)
        raise OutcomeUnknown("no answer")


def test_a_write_without_an_answer_is_looked_up(settings: Settings) -> None:
    store = Doubtful(settings.store)
    try:
        written = backend(store, settings).set_state(b"one")
        assert written is not None and (written[0], written[2]) == (b"one", True)
        with pytest.raises(DistStoreError, match="whether 'members' was counted"):
            AgentsStore(LeasedKeys(store, 60), settings.store_prefix).add("members", 1)
    finally:
        store.close()


def test_keys_hang_on_a_lease_that_is_replaced_before_its_half(store: Store, settings: Settings) -> None:
    clock = [0.0]
    keys = LeasedKeys(store, 60, now=lambda: clock[0])
    leases = []
    for clock[0] in (0.0, 29.0, 31.0):
        keys.put(settings.prefix + "key", b"")
        read = store.get(settings.prefix + "key")
        assert read is not None
        leases.append(read.lease_id)
    assert leases[0] == leases[1] != leases[2] and 0 not in leases
    store.lease_revoke(leases[2])  # as an etcd that lost its leases
    keys.put(settings.prefix + "key", b"again")
    read = store.get(settings.prefix + "key")
    assert read is not None and read.lease_id not in (0, *leases)


def test_the_agents_meet_over_the_store_as_torch_does(store: Store, settings: Settings) -> None:
    def agent(rank: int) -> None:
        kept = AgentsStore(LeasedKeys(store, 60), settings.store_prefix)  # C++ holds no reference to it
        mine = PrefixStore("round.1", kept)
        said[rank] = synchronize(mine, str(rank).encode(), rank, 2, "roles", timeout=30)
        barrier(mine, 2, "end", barrier_timeout=30, rank=rank)

    said: dict[int, list[bytes]] = {}
    agents = [threading.Thread(target=agent, args=(rank,)) for rank in (0, 1)]
    for one in agents:
        one.start()
    for one in agents:
        one.join(60)
    assert said == {0: [b"0", b"1"], 1: [b"0", b"1"]}


def test_additions_of_many_threads_all_count(store: Store, settings: Settings) -> None:
    def adder() -> None:
        mine = AgentsStore(LeasedKeys(store, 60), settings.store_prefix)
        for _ in range(5):
            mine.add("count", 2)

    adders = [threading.Thread(target=adder) for _ in range(4)]
    for one in adders:
        one.start()
    for one in adders:
        one.join(60)
    ours = AgentsStore(LeasedKeys(store, 60), settings.store_prefix)
    assert ours.get("count") == b"40"
    assert ours.check(["count"]) and not ours.check(["count", "other"])


def test_waiting_ends_and_names_what_is_missing(store: Store, settings: Settings) -> None:
    ours = AgentsStore(LeasedKeys(store, 60), settings.store_prefix)
    ours.set("here", "1")
    with pytest.raises(DistStoreError, match=r"not in etcd after 0.05 s: away, far$"):
        ours.wait(["here", "away", "far"], timedelta(seconds=0.05))
    ours.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(DistStoreError, match="away"):
        ours.get("away")


@pytest.mark.parametrize(
    ("endpoint", "run_id", "conf", "words"),
    [
        ("", "demo", {}, "--rdzv-endpoint is missing"),
        ("etcd-1", "", {}, "--rdzv-id is missing"),
        ("etcd-1", "none", {}, "--rdzv-id is missing"),
        ("etcd 1:2379", "demo", {}, "'etcd 1:2379' cannot be read"),
        ("etcd-1", "demo", {"ttl": "soon"}, "ttl=soon is not a whole number"),
        ("etcd-1", "demo", {"ssl_cert": "cert.pem"}, "needs both files"),
        ("etcd-1", "demo", {"cacert": "ca.pem"}, "--rdzv-conf cacert is not known; use ca_cert"),
        ("etcd-1", "demo", {"colour": "red"}, "--rdzv-conf colour is not known; use .*, ttl"),
        ("etcd-1", "demo", {"protocol": "https:"}, "protocol=https: is neither http nor https"),
        ("http://etcd-1", "demo", {"protocol": "https"}, "'http://etcd-1:2379' is not https"),
        ("etcd-1", "demo", {"protocol": "http", "ca_cert": "ca.pem"}, "is plain; write https://"),
    ],
)
def test_mistakes_are_named(endpoint: str, run_id: str, conf: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(endpoint, run_id, conf)


def test_the_protocol_is_that_of_endpoints_without_one() -> None:
    def uses_tls(endpoint: str, **conf: object) -> list[bool]:
        store = parse(endpoint, "demo", conf).store
        return [store.uses_tls(one) for one in store.endpoints]

    assert uses_tls("etcd-1,https://etcd-2", protocol="HTTPS") == [True, True]
    assert uses_tls("etcd-1,unix:/etcd", protocol="https") == [True, False]
    assert uses_tls("etcd-1", protocol="http") == uses_tls("etcd-1") == [False]


def test_settings_of_torch_are_taken() -> None:
    """`timeout` is always there; `is_host` belongs to a command line that had c10d."""
    parse("etcd-1", "demo", {"timeout": 900, "join_timeout": "60", "is_host": "1", **OURS})


def test_runs_have_keys_of_their_own() -> None:
    prefixes = {parse("etcd-1", run_id, {}).prefix for run_id in ("a", "a/state", "a/store", "ä b")}
    assert len(prefixes) == 4 and all(prefix.count("/") == 5 for prefix in prefixes)


def test_an_etcd_that_is_away_is_named() -> None:
    parameters = RendezvousParameters("bagua-etcd", "127.0.0.1:1", "demo", 1, 2, read_timeout="1")
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1"):
        get_handler()(parameters)
