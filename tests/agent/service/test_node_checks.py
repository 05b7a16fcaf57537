"""The checks of a node: their troubles, their notes, and the advice in each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd.client import Store
from bagua_agent.service.node import node_checks
from bagua_agent.service.node.node_checks import (
    LEAST_FREE_BYTES,
    DiskSpace,
    Finding,
    Weight,
    disk_space,
    judge_account,
    judge_disk,
    judge_gpus,
    judge_slow_import,
    troubles,
)


def weights(found: list[Finding]) -> list[Weight]:
    return [f.weight for f in found]


@pytest.mark.parametrize(
    ("slots", "driver", "answer", "said"),
    [
        (4, 0, None, ["ok      GPU: none, and none is asked for"]),
        ("cpu", 0, None, ["ok      GPU: none, and none is asked for"]),
        ("gpu", 0, None, ["TROUBLE GPU: none is there; load the driver, or set node.slots"]),
        ("gpu", 2, "0, 0\n1, 0\n", ["ok      GPU: 2, without memory errors"]),
        ("gpu", 2, "0, [N/A]\n1, [N/A]\n", ["ok      GPU: 2, without memory errors"]),
        ("gpu", 1, None, ["nvidia-smi does not answer"]),
        ("gpu", 2, "0, 0\n", ["lists 2, nvidia-smi 1; one has fallen off the bus"]),
        ("gpu", 2, "0, 0\n1, 3\n", ["GPU 1 has 3 uncorrected memory errors; reset it"]),
        ("gpu", 3, "0, 1\n1, 0\n", ["fallen off", "GPU 0 has 1 uncorrected"]),
    ],
)
def test_gpus(slots: int | str, driver: int, answer: str | None, said: list[str]) -> None:
    found = judge_gpus(slots, driver, answer)
    assert len(found) == len(said)
    for finding, words in zip(found, said, strict=True):
        assert words in str(finding)
        assert (finding.weight is Weight.FINE) == words.startswith("ok"), finding


def test_a_full_disk_keeps_jobs_away() -> None:
    assert judge_disk("/var/log", DiskSpace(1 << 30, LEAST_FREE_BYTES)).weight is Weight.FINE
    full = judge_disk("/var/log", DiskSpace(1 << 30, LEAST_FREE_BYTES - 1))
    assert troubles([full]) == ("disk: nearly full: less than 0.3 GB are free in /var/log; make room",)


@pytest.mark.parametrize(
    ("size_gib", "free_gib", "weight"),
    [
        (20, 1.1, Weight.FINE),
        (20, 0.9, Weight.TROUBLE),
        (10_000, 4.1, Weight.FINE),
        (10_000, 3.9, Weight.TROUBLE),
    ],
)
def test_how_much_is_nearly_full(size_gib: int, free_gib: float, weight: Weight) -> None:
    assert judge_disk("/", DiskSpace(size_gib << 30, int(free_gib * (1 << 30)))).weight is weight


def test_a_disk_without_room_for_files_is_nearly_full() -> None:
    assert "fewer than 1000 files" in judge_disk("/", DiskSpace(1 << 40, 1 << 39, 999)).text
    assert judge_disk("/", DiskSpace(1 << 40, 1 << 39, 1000)).weight is Weight.FINE


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_a_disk_that_fills_up_is_seen(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320m", "tmpfs", str(disk)], check=True)
    try:
        later_made = str(disk / "log" / "bagua")
        assert judge_disk(later_made, disk_space(later_made)).weight is Weight.FINE
        (disk / "output").write_bytes(bytes(80 << 20))
        found = judge_disk(later_made, disk_space(later_made))
        assert found.weight is Weight.TROUBLE and str(disk) in found.text, found
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_account_must_be_there_and_be_able_to_run_this_interpreter() -> None:
    assert judge_account("bagua", True, None).weight is Weight.FINE
    assert "useradd --create-home bagua" in judge_account("bagua", False, None).text
    told = judge_account("bagua", True, "Permission denied").text
    assert sys.executable in told and "as in /opt" in told


def test_a_slow_import_keeps_no_job_away() -> None:
    found = judge_slow_import("bagua", 30.0)
    assert "not imported within 30 s" in found.text and troubles([found]) == ()


def test_notes_keep_no_job_away() -> None:
    found = [
        Finding("clock", Weight.NOTE, "x"),
        Finding("etcd", Weight.FINE, "y"),
        Finding("GPU", Weight.TROUBLE, "z"),
    ]
    assert troubles(found) == ("GPU: z",)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look at what another account may do")
def test_a_real_account_is_looked_at() -> None:
    from bagua_agent.service.node import node_checks

    assert node_checks._account("no-such-user").weight is Weight.TROUBLE
    own = node_checks._account("root")
    assert own.weight is Weight.FINE, own


def test_an_etcd_that_does_not_tell_its_release_keeps_no_job_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(store: Store, timeout_s: float) -> None:
        raise UserError("status: etcd denies it to node n1")

    monkeypatch.setattr(Store, "connect", lambda store, timeout_s: None)
    monkeypatch.setattr(Store, "status", refused)
    config = SimpleNamespace(etcd_endpoints=("127.0.0.1:1",), store_credentials=StoreCredentials())
    finding = node_checks._etcd(config)  # type: ignore[arg-type]
    assert finding.weight is Weight.NOTE and "etcd denies it to node n1" in finding.text
