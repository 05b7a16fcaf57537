from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from bagua_agent.base.errors import StoreUnavailable, UserError
from bagua_agent.etcd.client import Store, StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoints
from bagua_agent.etcd.server import embedded
from bagua_agent.etcd.server.embedded import EmbeddedEtcd, EtcdEnded, find_etcd
from tests.agent.etcd.conftest import wait_until
from tests.lab.free_port import free_port
from tests.lab.wait import HANG_S


def test_starts_in_a_private_directory_and_leaves_nothing() -> None:
    before = set(psutil.Process().children())
    etcd = EmbeddedEtcd.start()
    try:
        assert stat.S_IMODE(etcd.directory.stat().st_mode) == 0o700
        store = Store(StoreConfig(parse_endpoints(etcd.endpoint)))
        store.put("/a", b"")
        store.close()
        assert os.getsid(etcd.pid) == etcd.pid  # out of reach of the terminal's signals
        assert not psutil.Process(etcd.pid).net_connections("inet"), "a private etcd listens on no port"
    finally:
        etcd.stop()
    assert not etcd.directory.exists()
    assert not etcd.is_running
    assert set(psutil.Process().children()) == before
    etcd.stop()  # again is fine


def test_answers_soon() -> None:
    took = []
    for _ in range(3):
        began = time.monotonic()
        etcd = EmbeddedEtcd.start()
        took.append(time.monotonic() - began)
        etcd.stop()
    assert min(took) < 0.9, "with etcd's own election timeout it takes over a second"


def test_keeps_a_directory_that_was_given(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    for expected in (None, b"kept"):
        etcd = EmbeddedEtcd.start(listen, directory=tmp_path / "etcd")
        store = Store(StoreConfig(parse_endpoints(etcd.endpoint)))
        found = store.get("/a")
        assert (found.value if found else None) == expected
        store.put("/a", b"kept")
        store.close()
        etcd.stop()
        assert etcd.log_path.exists()


@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize("occupant", ["socket", "etcd"])
def test_a_taken_port_is_said(occupant: str) -> None:
    listen = f"127.0.0.1:{free_port()}"
    port = int(listen.rpartition(":")[2])
    if occupant == "etcd":
        other = EmbeddedEtcd.start(listen)
        end = other.stop
    else:
        listener = socket.create_server(("127.0.0.1", port))
        end = listener.close  # type: ignore[assignment]
    try:
        with pytest.raises(UserError, match="taken") as caught:
            EmbeddedEtcd.start(listen)
        assert listen in str(caught.value)
    finally:
        end()


def test_an_address_of_another_host_is_said() -> None:
    with pytest.raises(UserError, match="not an address of this host"):
        EmbeddedEtcd.start("192.0.2.1:2379")


@pytest.mark.parametrize("listen", ["unix:/x", "http://127.0.0.1:1", "127.0.0.1:x"])
def test_an_unreadable_address_is_said(listen: str) -> None:
    with pytest.raises(UserError, match=listen):
        EmbeddedEtcd.start(listen)


def test_a_path_too_long_for_a_socket_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="107"):
        EmbeddedEtcd.start(directory=tmp_path / ("x" * 100))


def test_a_long_tmpdir_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    etcd = EmbeddedEtcd.start()
    etcd.stop()
    assert not list(long.iterdir())


def test_a_missing_etcd_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(embedded, "_bundled_etcd", lambda: None)
    with pytest.raises(UserError, match="etcd-server"):
        EmbeddedEtcd.start()


def test_a_bundled_etcd_is_made_executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "etcd"
    binary.write_bytes(b"\x7fELF")
    binary.chmod(0o644)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(embedded, "_bundled_etcd", lambda: str(binary))
    assert find_etcd() == str(binary)
    assert os.access(binary, os.X_OK)


def test_a_script_named_etcd_is_not_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etcd").write_text("#!/bin/sh\n")
    (tmp_path / "etcd").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded, "_bundled_etcd", lambda: sys.executable)
    assert find_etcd() == sys.executable
    monkeypatch.setattr(embedded, "_bundled_etcd", lambda: None)
    assert find_etcd() == str(tmp_path / "etcd")


@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize(
    ("script", "timeout_s", "error", "said"),
    [
        ("echo it hurts; exit 7", 30.0, UserError, "it hurts"),
        ("echo thinking; exec sleep 60", 0.5, StoreUnavailable, "thinking"),
    ],
)
def test_a_server_that_does_not_come_up_shows_its_last_words(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    timeout_s: float,
    error: type[Exception],
    said: str,
) -> None:
    binary = tmp_path / "etcd"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    monkeypatch.setattr(embedded, "find_etcd", lambda: str(binary))
    with pytest.raises(error, match=said):
        EmbeddedEtcd.start(timeout_s=timeout_s)


def test_dies_with_its_owner() -> None:
    program = """
        import sys
        from bagua_agent.etcd.server.embedded import EmbeddedEtcd
        etcd = EmbeddedEtcd.start()
        print(etcd.pid, etcd.directory, flush=True)
        sys.stdin.read()
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().split()
        assert psutil.pid_exists(int(pid))
        owner.send_signal(signal.SIGKILL)
        owner.wait(5)
        wait_until(lambda: not _runs(int(pid)))
    finally:
        owner.kill()
        owner.communicate(timeout=HANG_S)
    shutil.rmtree(directory)  # no process was left to do it


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_frozen_server_is_stopped_by_force() -> None:
    etcd = EmbeddedEtcd.start()
    os.kill(etcd.pid, signal.SIGSTOP)
    etcd.stop(timeout_s=0.2)
    assert not etcd.is_running and not etcd.directory.exists()


def test_the_environment_does_not_configure_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://192.0.2.1:1")
    EmbeddedEtcd.start().stop()


def test_data_that_cannot_be_read_are_said_or_left_behind(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd.start(directory=tmp_path / "e")
    etcd.kill()
    database = etcd.directory / "data" / "member" / "snap" / "db"
    database.write_bytes(b"no database")
    with pytest.raises(EtcdEnded, match="failed to open database") as caught:
        EmbeddedEtcd.start(directory=etcd.directory)
    assert caught.value.status > 0
    assert len(str(caught.value)) < 300, "no stack trace"
    EmbeddedEtcd.start(directory=etcd.directory, empty=True).stop()


def test_one_that_is_killed_while_it_starts_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "etcd"
    binary.write_text("#!/bin/sh\nkill -9 $$\n")
    binary.chmod(0o755)
    monkeypatch.setattr(embedded, "find_etcd", lambda: str(binary))
    with pytest.raises(EtcdEnded) as caught:
        EmbeddedEtcd.start()
    assert caught.value.status == -signal.SIGKILL


def test_one_that_no_thread_waits_for_any_more_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "etcd"
    binary.write_text("#!/bin/sh\nexec sleep 60\n")
    binary.chmod(0o755)
    monkeypatch.setattr(embedded, "find_etcd", lambda: str(binary))
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match="not wanted"):
        EmbeddedEtcd.start(unwanted=lambda: time.monotonic() > began_s + 0.1)
    assert time.monotonic() - began_s < 5.0
