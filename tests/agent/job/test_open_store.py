"""The location of a job's store: private, hosted for others, or given; each with real etcd servers."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bagua_agent.base.errors import StoreUnavailable, UserError
from bagua_agent.config.job_config import CommandKind, JobConfig, StoreCredentials, WorkerCommand
from bagua_agent.etcd.endpoints import DEFAULT_PORT
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.job.open_store import JobStore, is_exposed, open_store
from bagua_agent.node import listening_address
from tests.agent.etcd.slow_relay import MakeSlowRelay, make_slow_relay
from tests.lab.free_port import free_port
from tests.lab.ipv6 import IPV6_HERE, needs_ipv6

__all__ = ["make_slow_relay"]

COMMAND = WorkerCommand(CommandKind.SCRIPT, "train.py")
Open = Callable[..., JobStore]


def config(**settings: object) -> JobConfig:
    return JobConfig(job_id="job", command=COMMAND, **settings)  # type: ignore[arg-type]


def never() -> bool:
    return False


def _connected(store: JobStore | None) -> JobStore:
    assert store is not None
    return store


def free_endpoint() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    stores: list[JobStore] = []

    def open_it(address: str = "127.0.0.1", **settings: object) -> JobStore:
        directory = tmp_path / str(len(stores))
        stores.append(_connected(open_store(config(**settings), address, directory, never)))
        return stores[-1]

    yield open_it
    for store in reversed(stores):
        store.close()


def serves(store: JobStore) -> bool:
    store.store.put("/key", b"value")
    found = store.store.get("/key")
    return found is not None and found.value == b"value"


def test_a_job_of_one_node_has_a_private_store(opened: Open) -> None:
    store = opened()
    assert serves(store)
    assert store.server is not None and store.endpoint.startswith("unix:")
    directory = Path(store.server.directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    listening = socket.socket()
    with listening:
        assert listening.connect_ex(("127.0.0.1", DEFAULT_PORT)) != 0 or store.endpoint.startswith("unix:")
    pid = store.server.pid
    store.close()
    assert not directory.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_etcd_of_the_job_itself_needs_no_credentials(opened: Open) -> None:
    of_a_cluster = StoreCredentials(user="u", password_file="/no/such/file")
    for nodes in (1, 2):
        assert serves(opened(max_nodes=nodes, store_credentials=of_a_cluster))


def test_a_job_of_more_nodes_hosts_its_store_for_them(opened: Open) -> None:
    host = opened(max_nodes=3)
    assert serves(host)
    assert host.server is not None
    address, _, port = host.endpoint.rpartition(":")
    assert address == "127.0.0.1" and port.isdecimal(), "as --rdzv-endpoint takes it"
    follower = opened(max_nodes=3, endpoints=(host.endpoint,))
    assert follower.server is None
    assert follower.store.get("/key") is not None


@needs_ipv6
def test_a_node_with_an_address_of_version_6_hosts_its_store_there(opened: Open) -> None:
    host = opened(IPV6_HERE, max_nodes=2)
    assert serves(host)
    assert host.endpoint.startswith(f"[{IPV6_HERE}]:")
    assert serves(opened(IPV6_HERE, max_nodes=2, endpoints=(host.endpoint,)))


def test_a_second_job_on_the_node_hosts_at_another_port(opened: Open) -> None:
    one, other = opened(max_nodes=2), opened(max_nodes=2)
    assert one.endpoint != other.endpoint
    one.store.put("/only/here", b"")
    assert other.store.get("/only/here") is None


def test_the_first_agent_hosts_at_the_endpoint_and_the_rest_use_it(opened: Open) -> None:
    endpoint = free_endpoint()
    first = opened(max_nodes=2, endpoints=(endpoint,), hosts_store=True)
    second = opened(max_nodes=2, endpoints=(endpoint,), hosts_store=True)
    assert first.server is not None and second.server is None
    assert serves(first) and second.store.get("/key") is not None


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_the_endpoints_that_were_given_are_used(opened: Open, scheme: str) -> None:
    etcd = EmbeddedEtcd.start(free_endpoint())
    try:
        target = etcd.endpoint.removeprefix("http://")
        store = opened(max_nodes=2, endpoints=(free_endpoint(), scheme + target))
        assert serves(store) and store.server is None
        assert target in store.endpoint
        store.close()
        assert etcd.is_running, "a server of another process is left alone"
    finally:
        etcd.stop()


# -- errors


def test_a_port_that_something_else_has_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=f"etcd cannot listen on {endpoint}: the port is taken"):
            open_store(
                config(max_nodes=2, endpoints=(endpoint,), hosts_store=True), "127.0.0.1", tmp_path, never
            )


def test_agents_of_one_host_that_start_together_share_what_one_of_them_hosts(tmp_path: Path) -> None:
    settings = config(max_nodes=2, endpoints=(free_endpoint(),), hosts_store=True)

    def open_at(number: int) -> JobStore:
        return _connected(open_store(settings, "127.0.0.1", tmp_path / str(number), never))

    with ThreadPoolExecutor(3) as pool:  # an etcd ends with the thread that started it
        stores = list(pool.map(open_at, range(3)))
        try:
            assert sum(store.server is not None for store in stores) == 1
            assert all(serves(store) for store in stores)
        finally:
            for store in sorted(stores, key=lambda each: each.server is not None):
                store.close()


def test_an_address_that_is_translated_on_the_way_is_hosted_at_every_address(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening_address, "own_addresses", lambda host: [])  # as in a container
    port = free_endpoint().rpartition(":")[2]
    host = opened(max_nodes=2, endpoints=(f"127.0.0.9:{port}",), hosts_store=True)
    assert host.server is not None and serves(host)
    assert serves(opened(max_nodes=2, endpoints=(f"127.0.0.8:{port}",)))


def test_a_wait_for_etcd_is_told_at_once_and_its_end_too(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    etcd: list[EmbeddedEtcd] = []
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == 1:
            etcd.append(EmbeddedEtcd.start(endpoint))

    try:
        settings = config(max_nodes=2, endpoints=(endpoint,))
        _connected(open_store(settings, "127.0.0.1", tmp_path, never, tell)).close()
    finally:
        for each in etcd:
            each.stop()
    assert endpoint in told[0] and "onnection refused" in told[0] and "trying for up to 600 s" in told[0]
    assert told[1:] == ["etcd answers"]


@pytest.mark.parametrize("how", ["no listener", "no answer"])
def test_an_endpoint_that_cannot_be_reached_is_bounded_and_named(how: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = free_endpoint() if how == "no listener" else f"127.0.0.1:{silent.getsockname()[1]}"
        began_s = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            open_store(
                config(max_nodes=2, endpoints=(endpoint,), join_timeout_s=0.6), "127.0.0.1", tmp_path, never
            )
        took_s = time.monotonic() - began_s
    assert endpoint in str(caught.value)
    assert 0.5 <= took_s < 5.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"endpoints": ("etcd:port",)}, "'etcd:port' cannot be read"),
        (
            {
                "endpoints": ("127.0.0.1:1",),
                "store_credentials": StoreCredentials(user="u", password_file="/no/such/file"),
            },
            "'/no/such/file' can't be read",
        ),
    ],
)
def test_what_cannot_be_read_is_named_at_once(
    settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        open_store(config(max_nodes=2, **settings), "127.0.0.1", tmp_path, never)


# -- the warning


@pytest.mark.parametrize(
    ("endpoints", "exposed"),
    [
        (None, False),
        (("127.0.0.1:2379",), False),
        (("localhost",), False),
        (("[::1]:2379",), False),
        (("unix:/run/etcd/client:1",), False),
        (("https://etcd-1:2379",), False),
        (("etcd-1:2379",), True),
        (("http://10.0.0.1:2379",), True),
        (("127.0.0.1:2379", "etcd-2:2379"), True),
        (("localhost.example.org:2379",), True),
        (("127.example.org:2379",), True),
    ],
)
def test_a_store_beyond_this_machine_without_tls_is_worth_a_warning(
    endpoints: tuple[str, ...] | None, exposed: bool
) -> None:
    assert is_exposed(config(endpoints=endpoints)) is exposed


def test_with_certificates_plain_endpoints_use_tls() -> None:
    assert not is_exposed(
        config(endpoints=("etcd-1:2379",), store_credentials=StoreCredentials(ca_file="/etc/ca.pem"))
    )


def test_a_signal_ends_the_wait_for_an_etcd_that_never_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        began_s = time.monotonic()
        interrupted = lambda: time.monotonic() > began_s + 0.2  # noqa: E731
        assert (
            open_store(config(max_nodes=2, endpoints=(endpoint,)), "127.0.0.1", tmp_path, interrupted) is None
        )
        assert time.monotonic() - began_s < 10.0


def test_an_etcd_that_answers_slowly_is_joined(tmp_path: Path, make_slow_relay: MakeSlowRelay) -> None:
    """Its answers take longer than a first look."""
    etcd = EmbeddedEtcd.start(free_endpoint())
    try:
        relay = make_slow_relay(etcd.endpoint, 0.7)
        settings = config(max_nodes=2, endpoints=(relay.endpoint,), join_timeout_s=20.0)
        _connected(open_store(settings, "127.0.0.1", tmp_path, never)).close()
    finally:
        etcd.stop()
