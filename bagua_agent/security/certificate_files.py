"""The folders of certificates: one of the authority, and one for each holder.

    FOLDER/authority/   certificate.pem key.pem         of the authority; its key never leaves this host
    FOLDER/revoked.pem                                  what etcd and daemons do not accept any more; to be copied there
    FOLDER/<name>/      ca.pem certificate.pem key.pem  to be copied to where they are used
                        serials                         of every certificate that the name ever had

Folders are 0700 and keys 0600. A holder's folder appears complete or not at all; an existing one is only renewed if
that is asked for, and then keeps its role: etcd knows users by name alone, so an old certificate would
have the rights of the new role too.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bagua_agent.base.errors import UserError
from bagua_agent.security.certificates import (
    AUTHORITY_DAYS,
    CERTIFICATE_DAYS,
    ROOT_NAME,
    CertificateRefused,
    Credential,
    Holder,
    Role,
    check_dates,
    check_name,
    holder_of,
    issue,
    make_authority,
    revocation_list,
    revoked_in,
)

AUTHORITY = "authority"
CA_FILE = "ca.pem"
CERTIFICATE_FILE = "certificate.pem"
KEY_FILE = "key.pem"
SERIALS_FILE = "serials"  # one a line, in hexadecimal
REVOKED_FILE = "revoked.pem"
RETIRED_FILE = "retired"  # marks a holder's folder whose name is not used any more

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files of one side. ca_file may hold several authorities, while one replaces another. revoked_file: what
    is not accepted though it would be valid; empty for none."""

    ca_file: str
    cert_file: str
    key_file: str
    revoked_file: str = ""


@dataclass(frozen=True, slots=True)
class TlsContents:
    """The contents of the files, byte for byte, and the holder of the certificate."""

    ca_pem: bytes
    cert_pem: bytes
    key_pem: bytes
    authorities: tuple[x509.Certificate, ...]
    certificate: x509.Certificate
    holder: Holder
    revoked: frozenset[int]


def files_in(folder: Path) -> TlsFiles:
    """Returns the files of a holder's folder."""
    return TlsFiles(str(folder / CA_FILE), str(folder / CERTIFICATE_FILE), str(folder / KEY_FILE))


def utc_now() -> datetime:
    return datetime.now(UTC)


def create_authority(folder: Path, *, now: datetime, days: int = AUTHORITY_DAYS) -> Path:
    """Makes a new authority in `folder`, which is made, and returns its certificate's path. Raises UserError if there
    is one."""
    authority = make_authority(now, days)
    home = folder / AUTHORITY
    if home.exists():
        raise UserError(
            f"{str(home)!r}: there is an authority, and hosts that trust it would be cut off; use another folder"
        )
    _private_folder(folder)
    _appear(home, {KEY_FILE: authority.key_pem, CERTIFICATE_FILE: authority.cert_pem})
    _overwrite(folder, {REVOKED_FILE: revocation_list(authority, (), now)})
    return home / CERTIFICATE_FILE


def issue_files(
    folder: Path,
    name: str,
    role: Role,
    hosts: Iterable[str] = (),
    *,
    now: datetime,
    days: int = CERTIFICATE_DAYS,
    replace: bool = False,
) -> TlsFiles:
    """Issues a certificate by the authority in `folder` into folder/<name>.

    Raises UserError if `name` has one and replace is not set, or if it has one for another role.
    """
    check_name(name, role)
    if name == AUTHORITY:
        raise UserError(f"certificate name {name!r} is that of the authority's own folder; choose another")
    authority = read_authority(folder)
    home = folder / name
    if (home / RETIRED_FILE).exists():
        raise UserError(
            f"certificate {name!r} was retired, and who has its lost key would come back; choose another name"
        )
    present = _claimed_role(home, authority.certificate)
    if present is not None and present is not role:
        raise UserError(
            f"certificate {name!r} is for role {present}, and etcd knows users by name alone, so its old certificate "
            f"would get the rights of role {role} too; choose another name"
        )
    if home.exists() and not replace:
        raise UserError(f"{str(home)!r}: there is a certificate; ask for replacement, or choose another name")
    credential = issue(authority, name, role, hosts, now=now, days=days)
    serials = {*_serials(home), credential.certificate.serial_number}
    contents = {
        # First: a certificate whose serial is not recorded could never be revoked.
        SERIALS_FILE: "".join(f"{serial:x}\n" for serial in sorted(serials)).encode(),
        KEY_FILE: credential.key_pem,
        CERTIFICATE_FILE: credential.cert_pem,
        CA_FILE: authority.cert_pem,
    }
    if home.exists():
        _private_folder(home)
        _overwrite(home, contents)
    else:
        _appear(home, contents)
    return files_in(home)


def retire(folder: Path, name: str, *, now: datetime) -> Path:
    """Retires `name`: it is never issued again, its key is removed here, and every certificate that it ever had is in
    the list of revoked ones, whose path is returned. Raises UserError if it has no certificate."""
    home = folder / name
    if name not in {home.name for home in _homes(folder)}:
        raise UserError(
            f"{str(home)!r}: no holder's certificate is there; names that can be retired have a folder"
        )
    authority = read_authority(folder)
    if name == ROOT_NAME or _claimed_role(home, authority.certificate) is Role.ETCD:
        raise UserError(
            f"{str(home)!r}: {name!r} can't be retired, for etcd needs its root, and clients take any member's "
            f"certificate; if its key was lost, change to a new authority"
        )
    _overwrite(home, {RETIRED_FILE: b""})
    (home / KEY_FILE).unlink(missing_ok=True)
    serials = [serial for retired in retired_in(folder) for serial in _serials(folder / retired)]
    _overwrite(folder, {REVOKED_FILE: revocation_list(authority, serials, now)})
    return folder / REVOKED_FILE


def read_authority(folder: Path) -> Credential:
    """Returns the authority in `folder`. Raises UserError if there is none, or if others may read its key."""
    home = folder / AUTHORITY
    if not home.is_dir():
        raise UserError(f"{str(home)!r}: no authority is there; make one first, or name its folder")
    certificate = read_certificates(home / CERTIFICATE_FILE, "authority's certificate")[0]
    key_path = home / KEY_FILE
    key = _parsed_key(_read(key_path, "key"), key_path, home / CERTIFICATE_FILE, certificate)
    return Credential(certificate, key)


def issued_in(folder: Path, now: datetime) -> tuple[Holder, ...]:
    """Returns the holders of a certificate of the authority in `folder` that is valid and not retired, by name.

    Members of etcd all have one name and appear once.
    """
    authority = read_authority(folder).certificate
    holders: dict[str, Holder] = {}
    for home in _homes(folder):
        if (home / RETIRED_FILE).exists():
            continue
        try:
            holder = holder_of(
                read_certificates(home / CERTIFICATE_FILE, "certificate")[0], (authority,), now
            )
        except CertificateRefused:
            continue  # expired: it opens nothing any more
        holders[holder.name] = holder
    return tuple(holders[name] for name in sorted(holders))


def retired_in(folder: Path) -> tuple[str, ...]:
    return tuple(home.name for home in _homes(folder) if (home / RETIRED_FILE).exists())


def read_tls(files: TlsFiles, now: datetime) -> TlsContents:
    """Returns everything in `files`, if it can work: the key is private and fits the certificate, which an authority in
    ca_file issued and which is valid now. Raises UserError (CertificateRefused) naming the file."""
    ca_pem = _read(Path(files.ca_file), "CA file")
    cert_pem = _read(Path(files.cert_file), "certificate")
    key_pem = _read(Path(files.key_file), "key")
    # All that follows looks at these bytes alone: the files may be renewed meanwhile.
    authorities = _parsed_certificates(ca_pem, Path(files.ca_file), "CA file")
    certificate = _parsed_certificates(cert_pem, Path(files.cert_file), "certificate")[0]
    _parsed_key(key_pem, Path(files.key_file), Path(files.cert_file), certificate)
    revoked: frozenset[int] = frozenset()
    if files.revoked_file:
        try:
            revoked = revoked_in(_read(Path(files.revoked_file), "list of revoked certificates"), authorities)
        except CertificateRefused as error:
            raise CertificateRefused(f"{files.revoked_file!r}: {error}") from error
    try:
        holder = holder_of(certificate, authorities, now, revoked)
    except CertificateRefused as error:
        raise CertificateRefused(f"{files.cert_file!r}: {error}") from error
    return TlsContents(ca_pem, cert_pem, key_pem, tuple(authorities), certificate, holder, revoked)


def read_certificates(path: Path, what: str) -> list[x509.Certificate]:
    """Returns the certificates of a file, at least one. what: the file holds, for complaints. Raises UserError."""
    return _parsed_certificates(_read(path, what), path, what)


def check_pair(cert_file: str, key_file: str, now: datetime) -> None:
    """Checks that certificate and key can be presented to a peer: of any authority, with or without role.

    Raises UserError (CertificateRefused) naming the file.
    """
    certificate = read_certificates(Path(cert_file), "certificate")[0]
    _parsed_key(_read(Path(key_file), "key"), Path(key_file), Path(cert_file), certificate)
    try:
        check_dates(certificate, now)
    except CertificateRefused as error:
        raise CertificateRefused(f"{cert_file!r}: {error}") from error


def secret_file_trouble(path: Path) -> str | None:
    """Returns why the file is no place for a secret, and what to do; None if it is one. Raises UserError."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise UserError(f"{str(path)!r} can't be read: {error.strerror or error}") from error
    return f"others may use it (mode {mode:04o}); chmod 600 {path}" if mode & _OTHERS else None


def _claimed_role(home: Path, authority: x509.Certificate) -> Role | None:
    """Returns the role of the certificate in `home`, whether or not it is still valid."""
    file = home / CERTIFICATE_FILE
    if not file.exists():
        return None
    certificate = read_certificates(file, "certificate")[0]
    return holder_of(certificate, (authority,), certificate.not_valid_before_utc).role


def _serials(home: Path) -> list[int]:
    path = home / SERIALS_FILE
    if not path.exists():
        return []
    try:
        return [int(line, 16) for line in _read(path, "serial numbers").split()]
    except ValueError as error:
        raise UserError(
            f"{str(path)!r} is no list of serial numbers ({error}); restore it from a copy"
        ) from error


def _homes(folder: Path) -> list[Path]:
    """Returns the folders of holders, by name; a name begins with a letter or digit, so drafts left by a crash are
    none."""
    files = sorted(folder.glob(f"[A-Za-z0-9]*/{CERTIFICATE_FILE}"))
    return [file.parent for file in files if file.parent.name != AUTHORITY]


def _parsed_certificates(content: bytes, path: Path, what: str) -> list[x509.Certificate]:
    """Returns the certificates in `content`, at least one. Raises UserError if there is none."""
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise UserError(f"{what} {str(path)!r} holds no certificate in PEM; name another file") from error


def _parsed_key(
    content: bytes, path: Path, certificate_path: Path, certificate: x509.Certificate
) -> ec.EllipticCurvePrivateKey:
    trouble = secret_file_trouble(path)
    if trouble is not None:
        raise UserError(f"key {str(path)!r}: {trouble}")
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError) as error:  # no PEM, or one with a passphrase
        raise UserError(
            f"key {str(path)!r} holds no private key in PEM without passphrase; name another file"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(
            f"key {str(path)!r} is not of an elliptic curve; issue a new certificate with its key"
        )
    if key.public_key() != certificate.public_key():
        raise UserError(
            f"key {str(path)!r} does not belong to certificate {str(certificate_path)!r}; copy both from one issue"
        )
    return key


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{what} {str(path)!r} can't be read: {error.strerror or error}") from error


def _private_folder(folder: Path) -> None:
    """Returns `folder`, made if need be, closed to others. Raises UserError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError as error:
        raise UserError(f"folder {str(folder)!r} can't be made: {error.strerror or error}") from error
    if mode & _OTHERS:
        raise UserError(f"folder {str(folder)!r} is open to others (mode {mode:04o}); chmod 700 it")


def _appear(home: Path, contents: Mapping[str, bytes]) -> None:
    """Makes `home` with its files, all at once, and only if no other process made it meanwhile."""
    try:
        draft = Path(tempfile.mkdtemp(prefix=".new-", dir=home.parent))  # 0700
        try:
            for file, content in contents.items():
                _write(draft / file, content)
            os.rename(draft, home)  # onto a folder with anything in it, this fails
            _sync(home.parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise UserError(f"folder {str(home)!r} can't be made: {error.strerror or error}") from error


def _overwrite(home: Path, contents: Mapping[str, bytes]) -> None:
    try:
        for file, content in contents.items():
            _write(home / file, content)
    except OSError as error:
        raise UserError(f"folder {str(home)!r} can't be written: {error.strerror or error}") from error


def _write(path: Path, content: bytes) -> None:
    """Writes a file atomically, readable by the owner alone."""
    handle, draft = tempfile.mkstemp(prefix=".new-", dir=path.parent)  # 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:  # no key is left behind in an unknown file
        Path(draft).unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
