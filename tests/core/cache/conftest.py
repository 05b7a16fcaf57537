"""Directories for caches on a memory file system, and redis-servers that end with the test."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bagua_core.cache.redis_store import client_package
from tests.lab.free_port import free_port
from tests.lab.wait import eventually


@pytest.fixture
def room() -> Iterator[Path]:
    """A directory in shared memory; nothing may be left in it but what the test left."""
    path = Path(tempfile.mkdtemp(prefix="bagua-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@dataclass
class RedisProcess:
    port: int
    directory: Path
    options: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def host(self) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": str(self.port)}

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(
                    "redis-server",
                    "--bind",
                    "127.0.0.1",
                    "--port",
                    str(self.port),
                    "--save",
                    "",
                    "--appendonly",
                    "no",
                ),
                *(
                    "--dir",
                    str(self.directory),
                    "--logfile",
                    str(self.directory / f"{self.port}.log"),
                    *self.options,
                ),
            ]
        )
        eventually(self.answers, 10, lambda: (self.directory / f"{self.port}.log").read_text())

    def answers(self) -> bool:
        package = client_package()
        with package.Redis(port=self.port, socket_timeout=1) as client:
            try:
                return bool(client.ping())
            except package.exceptions.ConnectionError:
                return False

    def client(self) -> Any:
        return client_package().Redis(port=self.port, socket_timeout=5)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Callable[..., RedisProcess]]:
    if shutil.which("redis-server") is None:
        pytest.fail("redis-server is not installed: scripts/test brings it, or apt-get install redis-server")
    started: list[RedisProcess] = []

    def start(*options: str) -> RedisProcess:
        one = RedisProcess(free_port(), tmp_path, options)
        started.append(one)
        one.start()
        return one

    yield start
    for one in started:
        one.kill()
