"""The agent starts quickly: it never loads torch, numpy or the core; the command line not even gRPC."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.wait import HANG_S

ROOT = Path(__file__).parents[1]

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.endswith(("_pb2", "_pb2_grpc", "__main__")):
        importlib.import_module(name)
print(len(names), *sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


def packages_loaded_by(program: str) -> tuple[int, set[str]]:
    """The number that the program prints, and the top-level packages that it has loaded by then."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    count, *packages = done.stdout.split()
    return int(count), set(packages)


@pytest.mark.parametrize(
    ("package", "least_modules", "loaded"),
    [("bagua_agent", 40, {"bagua_agent", "grpc", "etcd3"}), ("bagua_launch", 10, {"bagua_launch", "click"})],
)
def test_no_module_loads_torch_numpy_or_the_core(package: str, least_modules: int, loaded: set[str]) -> None:
    count, packages = packages_loaded_by(IMPORT_ALL.format(package=package))
    assert count >= least_modules and loaded <= packages, "the walk found too little to mean anything"
    assert not packages & {"torch", "numpy", "optuna", "bagua_core"}


def test_the_contract_loads_neither_side() -> None:
    _, packages = packages_loaded_by(IMPORT_ALL.format(package="bagua_contract"))
    assert not packages & {"torch", "numpy", "bagua_core", "bagua_agent", "bagua_launch"}


def test_a_command_line_is_read_without_grpc_and_etcd3() -> None:
    _, packages = packages_loaded_by("import bagua_launch.main, sys; print(0, *sys.modules)")
    assert "bagua_launch" in packages
    assert not packages & {"grpc", "etcd3", "google.protobuf", "torch"}


def test_workers_are_started_before_grpc_protobuf_and_http_are_loaded() -> None:
    """What `bagua-launch` loads until it has started the process that imports torch: it delays each start."""
    _, packages = packages_loaded_by(
        "import bagua_launch.main, bagua_agent.job.run, sys; print(0, *sys.modules)"
    )
    assert "bagua_agent.job.run" in packages
    assert not packages & {"grpc", "etcd3", "google.protobuf", "http", "ssl", "asyncio", "importlib.metadata"}


LOAD_LOOP = """
import gc
import bagua_agent.job.run as run
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
run._load_loop()
gc.callbacks.clear()
print(len(collections), gc.get_freeze_count() > 0, gc.isenabled(), "bagua_agent.job.loop" in run.sys.modules)
"""


def test_the_agent_loads_its_loop_without_collecting_garbage() -> None:
    count, rest = packages_loaded_by(LOAD_LOOP)
    assert (count, rest) == (0, {"True"})
