"""What agents and `bagua-agent check` say of etcd's releases."""

from __future__ import annotations

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.etcd.client import Store, StoreConfig, StoreStatus
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.known_defects import can_diverge, warning
from bagua_agent.job.open_store import JobStore, known_defect
from bagua_agent.job_state.store_lines import store_opened
from tests.lab.free_port import free_port


@pytest.mark.parametrize(
    ("version", "affected"),
    [
        ("3.4.23", False),
        ("3.5.0", True),
        ("3.5.1", True),
        ("3.5.5", True),
        ("3.5.6", False),
        ("3.5.16", False),
        ("3.6.0", False),
        ("3.6.0-rc.1", False),
        ("3.5.0-alpha.0", True),
        ("3.5.²", False),
        ("mine", False),
        ("", False),
    ],
)
def test_releases_whose_members_can_differ(version: str, affected: bool) -> None:
    assert can_diverge(version) is affected
    assert bool(warning(version, 3)) is affected and not warning(version, 1)
    if affected:
        assert warning(version, 3).startswith(f"the 3 members of etcd {version} ")


class _OldCluster(Store):
    def status(self, timeout_s: float | None = None):  # type: ignore[no-untyped-def]
        return type("Status", (), {"version": "3.5.1"})()

    def member_names(self, timeout_s: float | None = None) -> frozenset[str]:
        return frozenset({"m0", "m1", "m2"})


def test_a_job_on_such_a_cluster_begins_with_a_warning() -> None:
    store = _OldCluster(StoreConfig((parse_endpoint("127.0.0.1:1"),)))
    defect = known_defect(JobStore(store, "127.0.0.1:1"))
    config = JobConfig("demo", WorkerCommand(CommandKind.SCRIPT, "train.py"))
    said = list(
        store_opened(
            config,
            "127.0.0.1:1",
            hosts_for_others=False,
            exposed=False,
            defect=defect,
        )
    )
    assert said[1].startswith("WARNING: the 3 members of etcd 3.5.1 can come to hold different data")
    store.close()


class _TellsRootAlone(Store):
    def status(self, timeout_s: float | None = None) -> StoreStatus:
        raise UserError("status: etcd at 127.0.0.1:1 denies it")


def test_an_etcd_that_tells_its_release_to_root_alone_keeps_no_job_from_starting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As etcd 3.6 with users."""
    store = _TellsRootAlone(StoreConfig((parse_endpoint("127.0.0.1:1"),)))
    with caplog.at_level("INFO"):
        assert known_defect(JobStore(store, "127.0.0.1:1")) == ""
    assert "the release of etcd is not known: status" in caplog.text
    store.close()


def test_an_etcd_that_does_not_answer_has_no_known_defect(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(StoreConfig((parse_endpoint(f"127.0.0.1:{free_port()}"),), request_timeout_s=0.2))
    with caplog.at_level("INFO"):
        assert known_defect(JobStore(store, "nowhere")) == ""
    assert "the release of etcd is not known" in caplog.text
    store.close()
