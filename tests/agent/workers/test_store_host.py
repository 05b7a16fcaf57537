"""Every generation of a restarted script has a store of its own, which no worker hosts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.start.warm_parent import WarmParent
from bagua_agent.workers.store_host import StoreHost
from tests.agent.workers.worker_lab import Workers, base_environment, is_running, wait_until
from tests.lab import launched, zygote

HOST = "127.0.0.1"
GROUP_LIMIT_S = 120.0
AGENT = """
import os, signal
from bagua_agent.workers.store_host import StoreHost
host = StoreHost(dict(os.environ))
print(host.open("127.0.0.1"), host.pid, flush=True)
signal.pause()
"""


@pytest.fixture(params=["spawned", "forked"])
def host(request: pytest.FixtureRequest, workers: Workers) -> Iterator[StoreHost]:
    warm = None
    if request.param == "forked":
        command = WorkerCommand(CommandKind.SCRIPT, str(workers.script("")))
        warm = WarmParent(command, base_environment(), directory=workers.directory, preimport=("torch",))
        warm.start()
        assert warm.wait_ready()
    made = StoreHost(base_environment(), directory=workers.directory, warm=warm)
    yield made
    made.stop()
    if warm is not None:
        warm.stop()


def run_group(directory: Path, port: int) -> None:
    """Two processes that rendezvous as torchrun's do, rank 0 being a client too."""
    words = [sys.executable, "-m", "tests.agent.workers.rendezvous_group"]
    address = {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    address |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    outputs = [directory / f"said-{port}-{rank}" for rank in range(2)]
    with ThreadPoolExecutor(2) as together:
        codes = together.map(
            lambda rank: zygote.run(
                words,
                launched.environment(**address, RANK=str(rank)),
                outputs[rank],
                directory,
                GROUP_LIMIT_S,
            ),
            range(2),
        )
        ended = [(code, output.read_text()) for code, output in zip(codes, outputs, strict=True)]
    assert all(code == 0 and "2 True\n" in said for code, said in ended), ended


def accepts(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_two_generations_have_stores_of_their_own(host: StoreHost, workers: Workers) -> None:
    first, second = host.open(HOST), host.open(HOST)
    assert first != second
    run_group(workers.directory, first)
    assert host.drop(first)
    assert not accepts(first)
    run_group(workers.directory, second)  # the same keys again: only in an empty store does this end
    assert not host.drop(first)
    pid = host.pid
    assert pid is not None
    host.stop()
    assert not is_running(pid) and not accepts(second)


def test_a_requested_port_a_taken_one_and_a_killed_host(workers: Workers) -> None:
    host = StoreHost(dict(os.environ), directory=workers.directory)
    try:
        port = host.open(HOST)
        assert host.drop(port)
        assert host.open(HOST, port) == port
        with socket.create_server((HOST, 0)) as taken, pytest.raises(InfrastructureLost):
            host.open(HOST, taken.getsockname()[1])
        before = host.pid
        assert before is not None
        os.kill(before, 9)
        wait_until(lambda: not accepts(port), "killed")
        assert host.open(HOST) > 0
        assert host.pid != before
    finally:
        host.stop()


def test_it_dies_with_the_agent() -> None:
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    try:
        port, pid = (int(word) for word in agent.stdout.readline().split())
        assert accepts(port)
    finally:
        agent.kill()
        agent.wait(10)
        agent.stdout.close()
    wait_until(lambda: not is_running(pid) and not accepts(port), "store host gone")
