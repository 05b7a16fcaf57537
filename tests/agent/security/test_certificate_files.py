"""Folders of certificates: private, complete, never overwritten by accident."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.security.certificate_files import (
    TlsFiles,
    check_pair,
    create_authority,
    issue_files,
    issued_in,
    read_authority,
    read_tls,
    retire,
    retired_in,
    utc_now,
)
from bagua_agent.security.certificates import CertificateRefused, Role, revoked_in

NOW = utc_now()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_authority(tmp_path / "ca", now=NOW)
    return tmp_path / "ca"


def ann(folder: Path, role: Role = Role.OPERATOR, replace: bool = False) -> TlsFiles:
    return issue_files(folder, "ann", role, now=NOW, replace=replace)


def test_everything_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        create_authority(tmp_path / "ca", now=NOW)
        ann(tmp_path / "ca")
    finally:
        os.umask(before)
    seen = {
        path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "ca", *(tmp_path / "ca").rglob("*")]
    }
    assert {mode for path, mode in seen.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in seen.items() if path.is_file()} == {0o600}
    assert {path.name for path in seen if path.is_file()} == {
        "ca.pem",
        "certificate.pem",
        "key.pem",
        "serials",
        "revoked.pem",
    }


def test_what_was_issued_can_be_read(folder: Path) -> None:
    contents = read_tls(ann(folder), NOW)
    assert (contents.holder.name, contents.holder.role) == ("ann", Role.OPERATOR)
    assert contents.authorities == (read_authority(folder).certificate,)


def test_nothing_is_overwritten_unless_asked_and_a_name_keeps_its_role(folder: Path) -> None:
    files = ann(folder)
    before = read_tls(files, NOW)
    with pytest.raises(UserError, match=r"ann'.*there is a certificate; ask for replacement"):
        ann(folder)
    with pytest.raises(UserError, match=r"'ann' is for role operator.*choose another name"):
        ann(folder, Role.VIEWER, replace=True)
    with pytest.raises(UserError, match=r"there is an authority.*use another folder"):
        create_authority(folder, now=NOW)
    assert read_tls(files, NOW) == before
    ann(folder, replace=True)
    after = read_tls(files, NOW)
    assert after.key_pem != before.key_pem and after.authorities == before.authorities


def test_of_two_that_make_the_same_at_once_one_wins_whole(tmp_path: Path) -> None:
    refused: list[UserError] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait(10)
        try:
            create_authority(tmp_path / "ca", now=NOW)
        except UserError as error:
            refused.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(refused) == 7
    read_authority(tmp_path / "ca")  # its key fits its certificate
    left = {path.name for path in (tmp_path / "ca").iterdir()}
    assert left == {"authority", "revoked.pem"}  # and no draft


def test_a_lost_key_retires_the_name(folder: Path) -> None:
    files = ann(folder)
    issue_files(folder, "vic", Role.VIEWER, now=NOW)
    first, second = read_tls(files, NOW), read_tls(ann(folder, replace=True), NOW)
    revoked_file = retire(folder, "ann", now=NOW)
    assert revoked_in(revoked_file.read_bytes(), first.authorities) == {
        first.certificate.serial_number,
        second.certificate.serial_number,
    }
    assert not Path(files.key_file).exists()
    assert retired_in(folder) == ("ann",)
    assert [holder.name for holder in issued_in(folder, NOW)] == ["vic"]
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"'ann' was retired.*choose another name"):
            ann(folder, replace=overwrite)
    retire(folder, "ann", now=NOW)  # again is harmless
    assert len(revoked_in(revoked_file.read_bytes(), first.authorities)) == 2
    for name in ("bob", "authority", "../ca/vic", ""):
        with pytest.raises(UserError, match="no holder's certificate is there"):
            retire(folder, name, now=NOW)


def test_a_revoked_certificate_is_refused_where_the_list_is(folder: Path, tmp_path: Path) -> None:
    files = ann(folder)
    copy = tmp_path / "copy"
    shutil.copytree(folder / "ann", copy)
    revoked_file = str(retire(folder, "ann", now=NOW))
    stolen = TlsFiles(files.ca_file, str(copy / "certificate.pem"), str(copy / "key.pem"), revoked_file)
    with pytest.raises(
        CertificateRefused, match=r"'ann' was revoked, since its key may be in other hands; ask"
    ):
        read_tls(stolen, NOW)
    create_authority(tmp_path / "theirs", now=NOW)
    for wrong, complaint in (
        (
            tmp_path / "theirs/revoked.pem",
            r"theirs/revoked\.pem': the list of revoked certificates is of 'Bagua auth",
        ),
        (Path(files.ca_file), r"ca\.pem': it holds no list of revoked certificates"),
        (tmp_path / "nowhere.pem", r"list of revoked certificates .*nowhere\.pem' can't be read"),
    ):
        with pytest.raises(UserError, match=complaint):
            read_tls(replace(stolen, revoked_file=str(wrong)), NOW)


def test_what_etcd_cannot_do_without_is_not_retired(folder: Path) -> None:
    issue_files(folder, "etcd-1", Role.ETCD, ["etcd-1"], now=NOW)
    issue_files(folder, "root", Role.OPERATOR, now=NOW)
    for name in ("etcd-1", "root"):
        with pytest.raises(UserError, match=rf"'{name}' can't be retired.*new authority"):
            retire(folder, name, now=NOW)
    assert retired_in(folder) == ()


def test_expired_certificates_and_drafts_of_a_crash_have_no_rights(folder: Path) -> None:
    ann(folder)
    (folder / ".new-crashed").mkdir()
    (folder / ".new-crashed" / "certificate.pem").write_text("half")
    assert [holder.name for holder in issued_in(folder, NOW)] == ["ann"]
    assert issued_in(folder, NOW + timedelta(days=400)) == ()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o610])
def test_a_key_that_others_may_use_is_refused(folder: Path, mode: int) -> None:
    files = ann(folder)
    Path(files.key_file).chmod(mode)
    with pytest.raises(UserError, match=rf"key\.pem': others may use it \(mode {mode:04o}\); chmod 600 /"):
        read_tls(files, NOW)
    with pytest.raises(UserError, match="others may use it"):
        check_pair(files.cert_file, files.key_file, NOW)
    (folder / "authority" / "key.pem").chmod(mode)
    with pytest.raises(UserError, match="others may use it"):
        issue_files(folder, "bob", Role.VIEWER, now=NOW)


def test_a_folder_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca").mkdir(mode=0o755)
    (tmp_path / "ca").chmod(0o755)
    with pytest.raises(UserError, match=r"open to others \(mode 0755\); chmod 700"):
        create_authority(tmp_path / "ca", now=NOW)


def test_what_cannot_work_is_named(folder: Path, tmp_path: Path) -> None:
    files = ann(folder)
    other = issue_files(folder, "bob", Role.VIEWER, now=NOW)
    create_authority(tmp_path / "theirs", now=NOW)
    stranger = issue_files(tmp_path / "theirs", "eve", Role.OPERATOR, now=NOW)
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    empty.chmod(0o600)
    for broken, complaint in (
        (
            TlsFiles(files.ca_file, files.cert_file, other.key_file),
            r"bob/key\.pem' does not belong to.*ann/cert",
        ),
        (
            TlsFiles(files.ca_file, stranger.cert_file, stranger.key_file),
            r"eve/cert.*'eve' was issued by.*use one of",
        ),
        (
            TlsFiles(str(empty), files.cert_file, files.key_file),
            r"CA file .*empty\.pem' holds no certificate",
        ),
        (
            TlsFiles(files.ca_file, str(empty), files.key_file),
            r"certificate .*empty\.pem' holds no certificate",
        ),
        (TlsFiles(files.ca_file, files.cert_file, str(empty)), r"key .*empty\.pem' holds no private key"),
        (
            TlsFiles(files.ca_file, files.cert_file, "/nowhere/key"),
            r"'/nowhere/key' can't be read: No such file",
        ),
    ):
        with pytest.raises(UserError, match=complaint) as caught:
            read_tls(broken, NOW)
        assert "\n" not in str(caught.value)
    later = NOW + timedelta(days=366)
    for expired in (
        lambda: read_tls(files, later),
        lambda: check_pair(files.cert_file, files.key_file, later),
    ):
        with pytest.raises(
            CertificateRefused, match=r"ann/certificate\.pem': certificate of 'ann' expired on .*new one"
        ):
            expired()
    with pytest.raises(UserError, match="no authority is there; make one first"):
        issue_files(tmp_path / "nothing", "ann", Role.VIEWER, now=NOW)
    with pytest.raises(UserError, match="authority's own folder"):
        issue_files(folder, "authority", Role.VIEWER, now=NOW)
    with pytest.raises(UserError, match="can't be made: Not a directory"):
        create_authority(empty / "ca", now=NOW)
