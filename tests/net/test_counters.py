"""The counters of Bagua-Net, read from outside the process that has the plugin."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from bagua_contract import net_counters as counters
from bagua_core.net import build
from bagua_core.net.__main__ import main
from benchmarks.net_driver.pair import connect
from benchmarks.net_driver.process import CallFailedError, Driver
from tests.docs.printed import printed
from tests.lab.wait import HANG_S
from tests.net.conftest import MakeDriver
from tests.net.exchange import close, move

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

SIZES = [0, 1, 70_000, 3_000_001]
STREAMS = 3


def a_pair(make_driver: MakeDriver) -> tuple[Driver, Driver]:
    words = [build.library(), "12"]
    pair = [make_driver("plugin", words=words, BAGUA_NET_STREAMS=str(STREAMS)) for _ in range(2)]
    for driver in pair:
        driver.ask("init")
    return pair[0], pair[1]


def test_counters_say_what_was_moved(make_driver: MakeDriver) -> None:
    sender, receiver = a_pair(make_driver)
    assert set(counters.read(sender.pid).values()) == {0}
    connect(receiver, sender, "c")
    for seed, size in enumerate(SIZES):
        move(sender, receiver, "c", size, seed)
    sent, received = counters.read(sender.pid), counters.read(receiver.pid)
    assert sent["bytes_sent"] == received["bytes_received"] == sum(SIZES)
    assert sent["messages_sent"] == received["messages_received"] == len(SIZES)
    assert sent["chunks_sent"] >= len(SIZES) and received["chunks_sent"] == 0
    assert sent["connections_open"] == received["connections_open"] == STREAMS
    close(sender, receiver, "c")
    for driver in (sender, receiver):
        now = counters.read(driver.pid)
        assert (now["connections_opened"], now["connections_open"], now["failures"]) == (STREAMS, 0, 0)


RELOADED = """
import _ctypes, ctypes, os, sys
from bagua_core.net.check import interfaces
from pathlib import Path
for _ in range(3):
    interfaces(Path(sys.argv[1]))
    plugin = ctypes.CDLL(sys.argv[1])
    for _ in range(2):
        _ctypes.dlclose(plugin._handle)
print(sum("bagua-net-counters" in os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
    if os.path.exists(f"/proc/self/fd/{n}") or os.path.islink(f"/proc/self/fd/{n}")))
"""


def test_a_plugin_that_is_loaded_again_has_one_set_of_counters() -> None:
    """NCCL unloads a plugin with its last communicator, where no variable forbids it."""
    done = subprocess.run(
        [sys.executable, "-c", RELOADED, str(build.library())],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout.split() == ["1"], done.stderr


def test_stalls_and_failures_are_counted(make_driver: MakeDriver) -> None:
    sender, receiver = a_pair(make_driver)
    connect(receiver, sender, "c")
    size = 64 << 20  # more than the kernel takes: the receiver has posted nothing
    sender.ask(f"buffer from {size} 1")
    sender.ask(f"isend s c from {size} 0")
    assert counters.read(sender.pid)["stalls"] > 0
    receiver.ask("close-receive c")
    with pytest.raises(CallFailedError, match="failed 6"):
        sender.ask("wait 10 s")
    assert counters.read(sender.pid)["failures"] == 1


def test_command_prints_the_counters_of_processes(
    make_driver: MakeDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    sender, receiver = a_pair(make_driver)
    given = {"[PID": str(sender.pid), "...]": str(receiver.pid)}
    option, module, *words = printed("docs/bagua-net.md", "counters", given)
    assert (option, module) == ("-m", "bagua_core.net")
    assert main(words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["pid"] for line in lines] == [sender.pid, receiver.pid]
    assert all({"bytes_sent", "connections_open", "retransmits", "stalls"} <= line.keys() for line in lines)
    assert main(["counters"]) == 0
    every = {json.loads(line)["pid"] for line in capsys.readouterr().out.splitlines()}
    assert {sender.pid, receiver.pid} <= every


def test_process_without_the_plugin_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    # This process may have loaded it for another test
    other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        assert main(["counters", str(other.pid)]) == 1
        assert f"process {other.pid} has not loaded Bagua-Net" in capsys.readouterr().err
        assert other.pid not in dict(counters.processes())
    finally:
        other.communicate(timeout=HANG_S)
    with pytest.raises(counters.NoCountersError, match="there is no process"):
        counters.read(other.pid)
    with pytest.raises(SystemExit, match="2"):
        main(["counters", "first"])


def test_memory_of_another_version_is_refused() -> None:
    for content in (b"", b"BNETCNT9" + bytes(4000), b"BNETCNT1" + b"\xff" * 8 + bytes(4000)):
        with pytest.raises(counters.NoCountersError):
            counters.parse(content)
