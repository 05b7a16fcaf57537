"""Certificates that could not be used are read again, whatever made them unusable."""

from __future__ import annotations

import logging
import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from bagua_agent.security.certificate_files import create_authority, files_in, issue_files, utc_now
from bagua_agent.security.certificates import Role
from bagua_agent.security.tls_renewal import RenewedTls

NOW = utc_now()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """In use: a certificate; in "new": another one of the same name."""
    create_authority(tmp_path, now=NOW)
    issue_files(tmp_path, "h1", Role.AGENT, ["127.0.0.1"], now=NOW)
    shutil.copytree(tmp_path / "h1", tmp_path / "used")
    issue_files(tmp_path, "h1", Role.AGENT, ["127.0.0.1"], now=NOW + timedelta(days=1), replace=True)
    shutil.copytree(tmp_path / "h1", tmp_path / "new")
    return tmp_path


def copy(folder: Path) -> None:
    """As `cp` does it: into the files that are there."""
    for file in ("certificate.pem", "key.pem"):
        (folder / "used" / file).write_bytes((folder / "new" / file).read_bytes())


def test_a_key_that_was_open_to_others_is_taken_once_it_is_closed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    tls = RenewedTls(files_in(folder / "used"), lambda: NOW + timedelta(days=2))
    before = tls.current().certificate.serial_number
    copy(folder)
    key = folder / "used" / "key.pem"
    key.chmod(0o644)
    for _ in range(3):
        assert tls.current().certificate.serial_number == before, "others may have read the new key"
    assert len(caplog.records) == 1 and "chmod 600" in caplog.records[0].message
    modified = key.stat().st_mtime_ns
    key.chmod(0o600)
    assert key.stat().st_mtime_ns == modified, "nothing but the mode has changed"
    assert tls.current().certificate.serial_number != before


def test_a_certificate_that_does_not_hold_yet_is_taken_when_it_does(folder: Path) -> None:
    now = NOW
    tls = RenewedTls(files_in(folder / "used"), lambda: now)
    before = tls.current().certificate.serial_number
    copy(folder)
    times = [os.stat(folder / "used" / file).st_ctime_ns for file in ("certificate.pem", "key.pem")]
    assert tls.current().certificate.serial_number == before
    now += timedelta(days=2)
    assert tls.current().certificate.serial_number != before
    assert times == [os.stat(folder / "used" / file).st_ctime_ns for file in ("certificate.pem", "key.pem")]


def test_a_key_that_is_opened_to_others_leaves_the_certificate_in_force(folder: Path) -> None:
    tls = RenewedTls(files_in(folder / "used"), lambda: NOW)
    before = tls.current()
    (folder / "used" / "key.pem").chmod(0o644)
    assert tls.current() == before
