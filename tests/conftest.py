"""Fixtures and settings for all tests."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import long_tests, suite_costs
from tests.rewritten_assertions import pytest_sessionstart
from tests.suite_costs import pytest_addoption

if TYPE_CHECKING:
    from bagua_agent.etcd.server.embedded import EmbeddedEtcd

__all__ = ["pytest_addoption", "pytest_configure", "pytest_sessionstart"]

# An example's time depends on what else the machine does. Fixtures of these tests hold nothing of an example. The usual
# run has the same examples each time, so that it judges a change; runs with long tests look for new ones.
for name, is_same in (("same examples", True), ("new examples", False)):
    settings.register_profile(
        name,
        deadline=None,
        derandomize=is_same,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
settings.load_profile("new examples" if "BAGUA_HISTORIES" in os.environ else "same examples")

# A shell that starts the tests in its background has them ignore SIGINT; so would every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    suite_costs.pytest_configure(config)
    if suite_costs.costs_of(config) == suite_costs.LONG_COSTS:
        settings.load_profile("new examples")


@pytest.hookimpl(tryfirst=True)  # before the selection by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long_tests.mark(items)
    suite_costs.pytest_collection_modifyitems(config, items)


_exit_status = pytest.StashKey[int]()
_let_go = [False]  # whether threads may still wait for operations of groups that were given up


@pytest.fixture(scope="module")
def etcd() -> Generator["EmbeddedEtcd"]:
    """An etcd on this machine, shared by a file's tests."""
    from bagua_agent.etcd.server.embedded import EmbeddedEtcd

    server = EmbeddedEtcd.start()
    yield server
    server.stop()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Generator[None]:
    """Run torch's operators on one thread: its threads wait for each other by computing, which costs more on these
    small tensors than the arithmetic, and five times as much where processors are shared."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _retired_groups_go() -> Generator[None]:
    """Destroy the Gloo groups that a file's tests gave up, with their hundreds of sockets, as a worker does in time."""
    yield
    retired_groups = sys.modules.get("bagua_core.communication.transports.retired_groups")
    if retired_groups is not None and retired_groups.any_retired():
        gc.collect()  # communicators in cycles with their tests' frames hold their groups
        retired_groups.let_go()
        _let_go[0] = True


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of later garbage collections, each of which would walk through it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    result = yield
    session.config.stash[_exit_status] = int(session.exitstatus)  # after other plugins changed it
    return result


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End a process that holds retired Gloo groups with os._exit, as a worker does.

    Interpreter finalization destroys the groups while their operations still run; an operation that fails then calls
    into Python, and the process ends by SIGABRT after all tests have passed.
    """
    retired_groups = sys.modules.get("bagua_core.communication.transports.retired_groups")
    if retired_groups is None or _exit_status not in config.stash:
        return
    if not (_let_go[0] or retired_groups.any_retired()):
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.stash[_exit_status])
