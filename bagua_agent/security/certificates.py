"""A small certificate authority for etcd, daemons and people. Reads no files and no clock.

A certificate contains two facts: its common name is the holder's name, which is also etcd's user, and one URI among its
subject alternative names, urn:bagua:role:<role>, is the role. They are stored in no other place.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bagua_agent.base.errors import UserError

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 365
LONGEST_NAME = 64  # of a common name (RFC 5280)
ROOT_NAME = "root"  # etcd's own name for the user that may change its users
ETCD_MEMBER_NAME = "bagua-etcd"  # common name of all members; no etcd user is ever called so

_ROLE_URI = "urn:bagua:role:"
_CLOCK_SKEW = timedelta(hours=1)  # hosts whose clocks are behind must be able to use what was just made
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_DNS_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


class Role(Enum):
    OPERATOR = "operator"  # a person who submits, scales and stops
    VIEWER = "viewer"  # a person who looks
    AGENT = "agent"  # a node's daemon
    ETCD = "etcd"  # a member of etcd

    @property
    def serves(self) -> bool:
        """Whether others connect to the holder, at hosts that its certificate names."""
        return self in (Role.AGENT, Role.ETCD)

    def __str__(self) -> str:
        return self.value


class CertificateRefused(UserError):
    """The error of a certificate that is not accepted; one line says whose, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Credential:
    """A certificate with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def cert_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a certificate. expires: in UTC."""

    name: str
    role: Role
    expires: datetime


def make_authority(now: datetime, days: int = AUTHORITY_DAYS) -> Credential:
    """Makes a new authority. now: in UTC. Its name is unlike any other's, so that old and new can be trusted side by
    side."""
    _check_days(days)
    key = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    name = _common_name(f"Bagua authority {identifier.digest.hex()[:12]}")
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return Credential(certificate, key)


def issue(
    authority: Credential,
    name: str,
    role: Role,
    hosts: Iterable[str] = (),
    *,
    now: datetime,
    days: int = CERTIFICATE_DAYS,
) -> Credential:
    """Issues a certificate with a new key. hosts: names and addresses at which an agent or etcd is reached; none for
    people.

    Raises UserError for a name, host or lifetime that can't be.
    """
    hosts = tuple(dict.fromkeys(hosts))
    check_name(name, role)
    _check_days(days)
    if role.serves and not hosts:
        raise UserError(
            f"certificate {name!r}: role {role} needs the names or addresses it is reached at; name a host"
        )
    if hosts and not role.serves:
        raise UserError(
            f"certificate {name!r}: role {role} runs no server, so it has no hosts; leave out {hosts[0]!r}"
        )
    end = now + timedelta(days=days)
    authority_end = authority.certificate.not_valid_after_utc
    if end > authority_end:
        left = (authority_end - now).days
        raise UserError(
            f"certificate {name!r}: {days} days are more than its authority has, which ends on {_date(authority_end)}; "
            + (f"ask for at most {left}" if left > 0 else "make a new authority")
        )
    alternatives = [*(_host(host) for host in hosts), x509.UniformResourceIdentifier(_ROLE_URI + role.value)]
    # A member of etcd calls its peers and itself, and a daemon calls etcd, so who serves is also a client.
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if role.serves else [])]
    key = ec.generate_private_key(ec.SECP256R1())
    issuer_key = authority.certificate.public_key()
    assert isinstance(issuer_key, ec.EllipticCurvePublicKey)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_common_name(ETCD_MEMBER_NAME if role is Role.ETCD else name))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return Credential(certificate, key)


def check_name(name: str, role: Role) -> None:
    """Checks the name of a certificate. Raises UserError if no holder of this role may be called so."""
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise UserError(
            f"certificate name {name!r} is not allowed; use 1 to {LONGEST_NAME} of A-Z a-z 0-9 . _ -, beginning and "
            f"ending with a letter or digit"
        )
    if name == ROOT_NAME and role is not Role.OPERATOR:
        raise UserError(f"certificate name {name!r}: etcd lets its holder do everything; use role operator")
    if name == ETCD_MEMBER_NAME and role is not Role.ETCD:
        raise UserError(f"certificate name {name!r} is that of etcd's members; choose another")


def holder_of(
    certificate: x509.Certificate,
    authorities: Sequence[x509.Certificate],
    now: datetime,
    revoked: Collection[int] = (),
) -> Holder:
    """Returns the holder of `certificate`, if one of `authorities` issued it and it is valid at `now` (UTC).

    revoked: serial numbers. Raises CertificateRefused. The issuer is checked first: nothing else in the certificate can
    be believed before.
    """
    whose = f"certificate of {_claimed_name(certificate)!r}"
    if not any(_issued_by(certificate, authority) for authority in authorities):
        raise CertificateRefused(
            f"{whose} was issued by {_short(certificate.issuer)}, not by the authority that is trusted here "
            f"({', '.join(_short(authority.subject) for authority in authorities) or 'none'}); use one of its"
        )
    check_dates(certificate, now)
    if certificate.serial_number in revoked:
        raise CertificateRefused(
            f"{whose} was revoked, since its key may be in other hands; ask for one in another name"
        )
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    roles = _role_texts(certificate)
    if len(names) != 1 or len(roles) != 1:
        raise CertificateRefused(
            f"{whose} has {len(names)} names and {len(roles)} roles instead of one each; issue a new one"
        )
    known = {role.value: role for role in Role}
    if roles[0] not in known:
        raise CertificateRefused(
            f"{whose} has the unknown role {roles[0]!r}; use one with {', '.join(known)}"
        )
    return Holder(_claimed_name(certificate), known[roles[0]], certificate.not_valid_after_utc)


def revocation_list(authority: Credential, serials: Iterable[int], now: datetime) -> bytes:
    """Returns a list in PEM, as etcd and daemons read it, by which the certificates with these serial numbers are not
    valid any more."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.certificate.subject)
        .last_update(now)
        .next_update(authority.certificate.not_valid_after_utc)  # it is valid until a longer one replaces it
    )
    for serial in sorted(set(serials)):
        revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        builder = builder.add_revoked_certificate(revoked)
    return builder.sign(authority.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def revoked_in(content: bytes, authorities: Iterable[x509.Certificate]) -> frozenset[int]:
    """Returns the serial numbers in a list (PEM) that one of `authorities` signed. Raises CertificateRefused."""
    try:
        revoked = x509.load_pem_x509_crl(content)
    except ValueError as error:
        raise CertificateRefused(
            f"it holds no list of revoked certificates ({error}); copy it again"
        ) from error
    if not any(revoked.is_signature_valid(authority.public_key()) for authority in authorities):  # type: ignore[arg-type]
        raise CertificateRefused(
            f"the list of revoked certificates is of {_short(revoked.issuer)}, not of the authority that is trusted "
            f"here; copy the right one"
        )
    return frozenset(one.serial_number for one in revoked)


def check_dates(certificate: x509.Certificate, now: datetime) -> None:
    """Checks the dates of a certificate. Raises CertificateRefused if it is not valid at `now` (UTC)."""
    whose = f"certificate of {_claimed_name(certificate)!r}"
    if now < certificate.not_valid_before_utc:
        raise CertificateRefused(
            f"{whose} is not valid before {_date(certificate.not_valid_before_utc)}; check this host's clock"
        )
    if now >= certificate.not_valid_after_utc:
        raise CertificateRefused(
            f"{whose} expired on {_date(certificate.not_valid_after_utc)}; issue a new one"
        )


def _issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
        certificate.verify_directly_issued_by(authority)
    except (x509.ExtensionNotFound, InvalidSignature, ValueError, TypeError):
        # other name, other key, other kind
        return False
    return constraints.ca and certificate != authority


def _role_texts(certificate: x509.Certificate) -> list[str]:
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    uris = alternatives.get_values_for_type(x509.UniformResourceIdentifier)
    return [uri.removeprefix(_ROLE_URI) for uri in uris if uri.startswith(_ROLE_URI)]


def _claimed_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass  # a name, or neither
    labels = host.split(".")
    if len(host) > 253 or not all(_DNS_LABEL.fullmatch(label) for label in labels) or labels[-1].isdigit():
        raise UserError(
            f"certificate host {host!r} is neither a host name nor an address; write node-1 or 10.0.0.1"
        )
    return x509.DNSName(host)


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _check_days(days: int) -> None:
    if not 1 <= days <= 36500:
        raise UserError(f"a certificate for {days} days is not possible; use 1 to 36500")


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _short(name: x509.Name) -> str:
    return repr(name.rfc4514_string().removeprefix("CN="))


def _date(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M UTC")
