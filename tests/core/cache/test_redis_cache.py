"""Redis as the cache: real servers, sharded; a lost one costs its keys, a full one takes no more, our own one ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import bagua_core as bagua
from bagua_core.cache import cached_dataset, hosted_redis, redis_servers
from bagua_core.cache.errors import CacheOptionError, MissingPartError, StoreFault
from bagua_core.cache.fault_notices import FaultNotices
from bagua_core.cache.keys import digest_of
from bagua_core.cache.redis_servers import LONGEST_PAUSE_S, ServerHealth, Sharding
from bagua_core.cache.redis_store import RedisServers, Server, servers_of
from bagua_core.torch_api.contrib.utils.redis_store import RedisStore
from tests.core.cache.conftest import RedisProcess
from tests.core.cache.scripts_with_caches import Counted, right
from tests.lab.free_port import free_port
from tests.lab.wait import eventually

StartRedis = Callable[..., RedisProcess]

# -- decisions

NAMES = [f"10.0.0.{i}:6379" for i in range(5)]
KEYS = [digest_of(i) for i in range(5000)]


def test_shares_are_equal_and_do_not_depend_on_the_lists_order() -> None:
    sharding = Sharding(NAMES)
    owners = [sharding.owner(key) for key in KEYS]
    counts = [owners.count(i) for i in range(5)]
    assert min(counts) > 0.9 * len(KEYS) / 5 and max(counts) < 1.1 * len(KEYS) / 5
    turned = Sharding(NAMES[::-1])
    assert [4 - turned.owner(key) for key in KEYS] == owners


def test_a_server_more_or_less_moves_its_own_share_only() -> None:
    before, after = Sharding(NAMES), Sharding([*NAMES, "new:1"])
    moved = [key for key in KEYS if after.owner(key) != before.owner(key)]
    assert all(after.owner(key) == 5 for key in moved)
    assert 0.8 * len(KEYS) / 6 < len(moved) < 1.2 * len(KEYS) / 6
    fewer = Sharding(NAMES[:4])
    assert all(fewer.owner(key) == before.owner(key) for key in KEYS if before.owner(key) != 4)


def test_pauses_double_and_end() -> None:
    health = ServerHealth()
    now_s, pauses = 100.0, []
    assert health.may_ask(now_s) and not health.is_lost
    for _ in range(8):
        health.failed(now_s)
        pause_s = 0.0
        while not health.may_ask(now_s + pause_s):
            pause_s += 0.5
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses == [1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert health.answered() and health.may_ask(now_s) and not health.answered()


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        ["h"],
        ["h:x"],
        [{"host": "h"}],
        [{"host": "", "port": 1}],
        ["h:1", {"host": "h", "port": "1"}],
        [5],
        ["h:70000"],
    ],
)
def test_hosts_that_are_none(hosts: Any) -> None:
    with pytest.raises(CacheOptionError, match="hosts="):
        servers_of(hosts)


def test_hosts_in_both_forms() -> None:
    assert servers_of(["a:1", {"host": "b", "port": "2"}]) == (Server("a", 1), Server("b", 2))
    assert "secret" not in repr(servers_of([{"host": "b", "port": 2, "password": "secret"}]))


# -- servers


def cached(plain: Any, redis: list[RedisProcess], room: Path, **options: Any) -> bagua.CachedDataset:
    return bagua.CachedDataset(
        plain,
        "redis",
        hosts=[one.host for one in redis],
        directory=str(room),
        **{"dataset_name": "a", **options},
    )


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_servers, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(redis_servers, "LONGEST_PAUSE_S", 0.02)


def test_a_port_where_no_redis_answers_slows_and_stops_nothing(
    room: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another service, which says something that no Redis would."""
    plain = Counted(8, tmp_path / "log")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        dataset = bagua.CachedDataset(
            plain, "redis", hosts=[host], directory=str(room), dataset_name="strange"
        )
        assert all(str(dataset[i]) == str(plain[i]) for i in range(8))
        dataset.close()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5.0)
    assert not thread.is_alive() and caplog.text.count("no answer from Redis") == 1


def test_two_jobs_without_names_never_see_each_others_samples(
    redis: StartRedis, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data sets of one type and length, on one server that outlives both; nodes of one job do share."""
    server = redis()
    data = {"a": [f"a{i}" for i in range(20)], "b": [f"b{i}" for i in range(20)]}
    for job_id, hits in (("a", 0), ("b", 0), ("a", 20)):
        for name, value in (("SESSION_SOCKET", "x"), ("AGENT_ID", "h1"), ("JOB_ID", job_id)):
            monkeypatch.setenv(f"BAGUA_{name}", value)
        cached_dataset._made.clear()  # as in another process
        dataset = cached(data[job_id], [server], room, dataset_name="")
        assert dataset.__getitems__(list(range(20))) == data[job_id]
        assert dataset.stats().hits == hits
        dataset.close()
        assert list(room.iterdir()) == [], "or the next one goes on with its counts"


def test_commands_that_a_server_refuses_are_said(
    redis: StartRedis, room: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As to an account without the rights for them."""
    server = redis("--rename-command", "INFO", "", "--rename-command", "SCAN", "")
    dataset = cached(Counted(5, tmp_path / "log"), [server], room)
    assert dataset[3][1] == 3
    dataset.cache_loader.flush()
    assert dataset.stats().stored == 1
    for forbidden in (dataset.cache_loader.num_keys, dataset.cache_loader.clear):
        with pytest.raises(StoreFault, match="refuses: unknown command"):
            forbidden()
    assert caplog.text.count("refuses: unknown command") == 1
    dataset.close()


def test_samples_are_shared_by_nodes(redis: StartRedis, room: Path, tmp_path: Path) -> None:
    """Two nodes are two directories here."""
    servers = [redis(), redis()]
    plain = Counted(60, tmp_path / "log")
    (room / "n1").mkdir(), (room / "n2").mkdir()
    first = cached(plain, servers, room / "n1")
    assert all(right(batch) for batch in DataLoader(first, 7, num_workers=2))
    assert first.stats().stored == 60
    second = cached(plain, servers[::-1], room / "n2")
    assert all(right(batch) for batch in DataLoader(second, 7, num_workers=2))
    assert sorted(plain.computed()) == list(range(60))
    assert (second.stats().hits, first.stats().misses, second.cache_loader.num_keys()) == (60, 60, 60)
    sizes = [one.client().dbsize() for one in servers]
    assert sum(sizes) == 60 and min(sizes) > 10
    other = cached(plain, servers, room / "n1", fingerprint="v2")
    other[0]
    assert plain.computed().count(0) == 2, "another fingerprint is another cache"
    second.cache_loader.clear()
    assert second.cache_loader.num_keys() == 0 and other.cache_loader.num_keys() == 1


def test_a_killed_server_costs_its_share_and_comes_back(
    redis: StartRedis,
    room: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = [redis(), redis(), redis()]
    plain = Counted(60, tmp_path / "log")
    dataset = cached(plain, servers, room)
    batches = [list(range(begin, begin + 10)) for begin in range(0, 60, 10)]

    def epoch() -> list[int]:
        before = len(plain.computed())
        for batch in batches:
            assert [number for _, number in dataset.__getitems__(batch)] == batch
        dataset.cache_loader.flush()
        return sorted(plain.computed()[before:])

    assert epoch() == list(range(60)) and epoch() == []
    shares = [one.client().dbsize() for one in servers]
    servers[1].kill()
    lost = epoch()
    assert len(lost) == shares[1], "its share and nothing else"
    assert epoch() == lost
    assert caplog.text.count("no answer from Redis") == 1, "said once"
    assert not RedisServers(servers_of([one.host for one in servers]), b"", FaultNotices(None, "")).is_whole()
    quick(monkeypatch)
    servers[1].start()
    eventually(lambda: not epoch(), 40, "its share is filled again")
    assert sum(record.message.endswith(f"{servers[1].port} is back") for record in caplog.records) == 1
    assert servers[1].client().dbsize() == shares[1]


def test_a_server_that_hangs_costs_a_timeout_now_and_then(
    redis: StartRedis, room: Path, tmp_path: Path
) -> None:
    server = redis()
    plain = Counted(200, tmp_path / "log")
    dataset = cached(plain, [server], room)
    dataset[0]
    dataset.cache_loader.flush()
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        for index in range(100):
            assert dataset[index][1] == index
        took_s = time.monotonic() - start
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert took_s < 8, "100 reads, each of which would wait a second"


def test_a_full_server_takes_no_more_and_stays_useful(
    redis: StartRedis, room: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = redis("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    plain = Counted(100, tmp_path / "log", size=25_000)
    dataset = cached(plain, [server], room)
    for index in range(100):
        assert dataset[index][1] == index
    dataset.cache_loader.flush()
    stored = dataset.stats().stored
    for index in range(100):
        assert dataset[index][1] == index
    stats = dataset.stats()
    assert 10 < stored < 60 and stats.hits >= stored and stats.refused > 40
    assert caplog.text.count("is full") == 1


def test_damaged_values_are_loaded_anew_and_mended(
    redis: StartRedis, room: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = redis()
    plain = Counted(3, tmp_path / "log")
    dataset = cached(plain, [server], room)
    dataset.__getitems__([0, 1, 2])
    dataset.cache_loader.flush()
    client = server.client()
    names = sorted(client.keys())
    client.set(names[0], client.get(names[0])[:-20])
    client.set(names[1], b"\x80\x04c__builtin__\nexit\n.")
    assert [number for _, number in dataset.__getitems__([0, 1, 2])] == [0, 1, 2]
    dataset.cache_loader.flush()
    assert dataset.stats().unreadable == 2 and len(plain.computed()) == 5
    dataset.__getitems__([0, 1, 2])
    assert len(plain.computed()) == 5 and caplog.text.count("is damaged") == 1


def test_no_server_at_all_is_training_without_a_cache(
    room: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    dataset = bagua.CachedDataset(
        Counted(20, tmp_path / "log"), "redis", "none", hosts=[f"127.0.0.1:{port}"], directory=str(room)
    )
    for _ in range(2):
        assert all(right(batch) for batch in DataLoader(dataset, 5, num_workers=2))
    assert dataset.stats().hits == 0 and dataset.stats().misses == 40


def test_one_server_for_each_node(redis: StartRedis, room: Path, tmp_path: Path) -> None:
    servers = [redis(), redis()]
    dataset = cached(Counted(20, tmp_path / "log"), servers, room, cluster_mode=False)
    dataset.__getitems__(list(range(20)))
    dataset.cache_loader.flush()
    assert sorted(one.client().dbsize() for one in servers) == [0, 20]


def test_a_password(redis: StartRedis, room: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = redis()
    server.client().config_set("requirepass", "secret")
    known = bagua.CacheLoader(
        "redis", "a", hosts=[{**server.host, "password": "secret"}], directory=str(room)
    )
    known.get("x", lambda key: 1)
    assert known.num_keys() == 1
    unknown = bagua.CacheLoader("redis", "b", hosts=[server.host], directory=str(room))
    assert unknown.get("x", lambda key: 2) == 2
    assert "uthentication" in caplog.text and "secret" not in caplog.text


# -- a server of this node's own


def own_servers(room: Path) -> list[psutil.Process]:
    """redis-servers and their keepers of this test."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(room) in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return found


def all_ended(room: Path) -> bool:
    return not own_servers(room) and list(room.glob("bagua-cache-*/*")) == []


def test_a_server_of_the_nodes_own_ends_with_its_last_user(room: Path, tmp_path: Path) -> None:
    plain = Counted(20, tmp_path / "log")
    options: dict[str, Any] = {"directory": str(room), "capacity_per_node": 64 << 20}
    dataset = bagua.CachedDataset(plain, "redis", "own", **options)
    assert all(right(batch) for batch in DataLoader(dataset, 5, num_workers=2))
    assert all(right(batch) for batch in DataLoader(dataset, 5, num_workers=2))
    assert sorted(plain.computed()) == list(range(20)) and dataset.stats().capacity_bytes == 64 << 20
    other = bagua.CachedDataset(plain, "redis", "own", **options)
    other[3]
    assert len(own_servers(room)) == 2, "a keeper and one server, for both"
    assert not any(c.status == "LISTEN" for p in own_servers(room) for c in p.net_connections("tcp")), (
        "no port"
    )
    dataset.close()
    assert other[3][1] == 3 and len(plain.computed()) == 20
    other.close()
    eventually(lambda: all_ended(room), 15, "server, keeper and directory are gone")


def use_and_wait(room: Path, log: Path, ready: Any) -> None:
    dataset = bagua.CachedDataset(Counted(20, log), "redis", "own", directory=str(room))
    dataset.__getitems__(list(range(20)))
    dataset.cache_loader.flush()
    ready.set()
    time.sleep(600)


def test_a_server_of_the_nodes_own_ends_when_its_users_are_killed(room: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    user = context.Process(target=use_and_wait, args=(room, tmp_path / "log", ready))
    user.start()
    assert ready.wait(30) and len(own_servers(room)) == 2
    user.kill()
    user.join()
    eventually(lambda: all_ended(room), 15, "server, keeper and directory are gone")


def test_if_the_keeper_is_killed_the_server_ends_and_training_goes_on(room: Path, tmp_path: Path) -> None:
    plain = Counted(20, tmp_path / "log")
    dataset = bagua.CachedDataset(plain, "redis", "own", directory=str(room))
    dataset[0]
    (keeper,) = [p for p in own_servers(room) if "redis_keeper" in " ".join(p.cmdline())]
    keeper.kill()
    eventually(lambda: not own_servers(room), 10, "the server goes with its keeper")
    assert [dataset[i][1] for i in range(20)] == list(range(20))
    dataset.close()
    assert list(room.glob("bagua-cache-*/*")) == []


def test_without_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingPartError, match=r"apt-get install redis-server.*backend='embedded'"):
        bagua.CacheLoader("redis")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingPartError, match=r"pip install bagua-elastic\[redis\]"):
        bagua.CacheLoader("redis", hosts=["h:1"])
    assert bagua.CacheLoader("embedded", "works").get("a", len) == 1


def test_a_program_that_does_not_start_is_training_without_a_cache(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(hosted_redis, "program", lambda: str(program))
    dataset = bagua.CachedDataset(Counted(5, tmp_path / "log"), "redis", "own", directory=str(room))
    assert [dataset[i][1] for i in range(5)] == list(range(5))
    assert "redis-server did not start" in caplog.text
    dataset.close()
    eventually(lambda: all_ended(room), 10, "nothing is left")


def test_importing_needs_no_redis() -> None:
    assert (
        os.system(f"{sys.executable} -c \"import sys; sys.modules['redis'] = None; import bagua_core\"") == 0
    )


# -- the original's store


def test_the_originals_store(redis: StartRedis) -> None:
    servers = [redis(), redis()]
    store = RedisStore(hosts=[one.host for one in servers], cluster_mode=True)
    store.set("a", 1)
    store.mset({str(i): torch.full((3,), i) for i in range(20)})
    store.set("a", {"x": 2})
    assert store.get("a") == {"x": 2} and store.get("missing") is None
    assert [int(value[0]) for value in store.mget([str(i) for i in range(20)])] == list(range(20))
    assert store.num_keys() == 21 and store.status()
    servers[0].kill()
    assert not store.status()
    found = store.mget([str(i) for i in range(20)])
    assert any(value is None for value in found) and any(value is not None for value in found)
    servers[0].start()
    store.shutdown()
    again = RedisStore(hosts=[one.host for one in servers])
    again.clear()
    assert again.num_keys() == 0
    again.shutdown()


def test_a_value_that_cannot_replace_another_leaves_none(redis: StartRedis) -> None:
    server = redis("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    store = RedisStore(hosts=[server.host])
    store.mset({"a": 1, "b": 2, "c": 3})
    store.set("a", object())
    assert store.get("a") is None and store.num_keys() == 2
    store.set("large", torch.zeros(1 << 20))
    store.set("b", torch.zeros(1 << 20))
    assert store.mget(["b", "c"]) == [None, 3]
    store.shutdown()


@given(
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=6, unique=True),
    st.binary(max_size=8),
)
def test_every_key_has_one_owner(names: list[str], key: bytes) -> None:
    assert 0 <= Sharding(names).owner(key) < len(names)
    with pytest.raises(ValueError):
        Sharding([*names, names[0]])
