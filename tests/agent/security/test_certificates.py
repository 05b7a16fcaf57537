"""The content of certificates, and the cases in which they are refused."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from bagua_agent.base.errors import UserError
from bagua_agent.security.certificates import (
    ETCD_MEMBER_NAME,
    CertificateRefused,
    Credential,
    Role,
    holder_of,
    issue,
    make_authority,
    revocation_list,
    revoked_in,
)

NOW = datetime(2031, 5, 6, 12, tzinfo=UTC)
AUTHORITY = make_authority(NOW)
HOSTS = ("node-1", "10.0.0.1", "fd00::1")


def role_of(certificate: x509.Certificate, authorities: Sequence[x509.Certificate], now: datetime) -> Role:
    return holder_of(certificate, authorities, now).role


def common_name(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string().removeprefix("CN=")


def signed_by_hand(
    authority: Credential,
    *alternatives: x509.GeneralName,
    ca: bool = False,
    names: tuple[str, ...] = ("eve",),
) -> x509.Certificate:
    """As other tools might issue one with the right key."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name) for name in names]))
        .issuer_name(authority.certificate.subject)
        .public_key(ec.generate_private_key(ec.SECP256R1()).public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return builder.sign(authority.key, hashes.SHA256())


@pytest.mark.parametrize("role", list(Role))
def test_a_certificate_says_who_and_in_which_role(role: Role) -> None:
    hosts = HOSTS if role.serves else ()
    certificate = issue(AUTHORITY, "somebody", role, hosts, now=NOW, days=30).certificate
    holder = holder_of(certificate, [AUTHORITY.certificate], NOW)
    assert holder.role is role_of(certificate, [AUTHORITY.certificate], NOW) is role
    assert holder.name == (ETCD_MEMBER_NAME if role is Role.ETCD else "somebody")
    assert holder.expires == NOW + timedelta(days=30)

    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert ExtendedKeyUsageOID.CLIENT_AUTH in usage
    assert (ExtendedKeyUsageOID.SERVER_AUTH in usage) is role.serves
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"urn:bagua:role:{role.value}"]
    if role.serves:
        assert names.get_values_for_type(x509.DNSName) == ["node-1"]
        assert {str(a) for a in names.get_values_for_type(x509.IPAddress)} == {"10.0.0.1", "fd00::1"}


def test_keys_are_of_p256_and_each_is_new() -> None:
    made = [issue(AUTHORITY, "ann", Role.VIEWER, now=NOW) for _ in range(2)]
    assert all(isinstance(one.key.curve, ec.SECP256R1) for one in [AUTHORITY, *made])
    assert made[0].key_pem != made[1].key_pem
    assert made[0].certificate.serial_number != made[1].certificate.serial_number


def test_a_certificate_is_good_at_once_on_hosts_whose_clock_is_behind_and_not_long_before() -> None:
    certificate = issue(AUTHORITY, "ann", Role.VIEWER, now=NOW, days=1).certificate
    trusted = [AUTHORITY.certificate]
    assert role_of(certificate, trusted, NOW - timedelta(minutes=59)) is Role.VIEWER
    with pytest.raises(
        CertificateRefused, match=r"'ann' is not valid before 2031-05-06 11:00 UTC; check.*clock"
    ):
        role_of(certificate, trusted, NOW - timedelta(minutes=61))
    assert role_of(certificate, trusted, NOW + timedelta(hours=23, minutes=59)) is Role.VIEWER
    with pytest.raises(CertificateRefused, match=r"'ann' expired on 2031-05-07 12:00 UTC; issue a new one"):
        role_of(certificate, trusted, NOW + timedelta(days=1))


def test_another_authoritys_certificate_is_refused_first_of_all() -> None:
    other = make_authority(NOW)
    expired_too = issue(other, "ann", Role.OPERATOR, now=NOW, days=1).certificate
    with pytest.raises(
        CertificateRefused, match=r"'ann' was issued by 'Bagua authority [0-9a-f]{12}', not by"
    ):
        role_of(expired_too, [AUTHORITY.certificate], NOW + timedelta(days=9))
    with pytest.raises(CertificateRefused, match=r"trusted here \(none\)"):
        role_of(expired_too, [], NOW)


def test_two_authorities_can_be_trusted_side_by_side() -> None:
    other = make_authority(NOW)
    both = [AUTHORITY.certificate, other.certificate]
    assert AUTHORITY.certificate.subject != other.certificate.subject
    for authority in (AUTHORITY, other):
        assert role_of(issue(authority, "ann", Role.VIEWER, now=NOW).certificate, both, NOW) is Role.VIEWER


def test_a_list_of_revoked_certificates_is_of_one_authority_that_is_trusted() -> None:
    other = make_authority(NOW)
    certificate = issue(AUTHORITY, "ann", Role.VIEWER, now=NOW).certificate
    content = revocation_list(AUTHORITY, [certificate.serial_number, 7], NOW)
    both = [other.certificate, AUTHORITY.certificate]
    revoked = revoked_in(content, both)
    assert revoked == {certificate.serial_number, 7}
    with pytest.raises(CertificateRefused, match="'ann' was revoked"):
        holder_of(certificate, both, NOW, revoked)
    with pytest.raises(CertificateRefused, match="not of the authority that is trusted here"):
        revoked_in(content, [other.certificate])
    with pytest.raises(CertificateRefused, match="no list of revoked certificates"):
        revoked_in(b"", both)
    assert revoked_in(revocation_list(AUTHORITY, [], NOW), both) == frozenset()


def test_the_authoritys_name_alone_proves_nothing() -> None:
    forger = Credential(AUTHORITY.certificate, ec.generate_private_key(ec.SECP256R1()))
    forged = issue(forger, "ann", Role.OPERATOR, now=NOW).certificate
    assert forged.issuer == AUTHORITY.certificate.subject
    with pytest.raises(CertificateRefused, match="not by the authority"):
        role_of(forged, [AUTHORITY.certificate], NOW)


def test_a_holder_is_no_authority() -> None:
    node = issue(AUTHORITY, "node-1", Role.AGENT, HOSTS, now=NOW)
    made_up = signed_by_hand(node, x509.UniformResourceIdentifier("urn:bagua:role:operator"))
    with pytest.raises(CertificateRefused, match="not by the authority"):
        role_of(made_up, [AUTHORITY.certificate, node.certificate], NOW)
    with pytest.raises(CertificateRefused, match="not by the authority"):
        role_of(AUTHORITY.certificate, [AUTHORITY.certificate], NOW)


@pytest.mark.parametrize(
    ("uris", "complaint"),
    [
        ((), "1 names and 0 roles"),
        (("urn:bagua:role:operator", "urn:bagua:role:viewer"), "1 names and 2 roles"),
        (("urn:bagua:role:king",), "unknown role 'king'; use one with operator, viewer, agent, etcd"),
        (("urn:other:role:operator",), "0 roles"),
    ],
)
def test_a_certificate_without_one_known_role_is_refused(uris: tuple[str, ...], complaint: str) -> None:
    certificate = signed_by_hand(AUTHORITY, *(x509.UniformResourceIdentifier(uri) for uri in uris))
    with pytest.raises(CertificateRefused, match=complaint):
        role_of(certificate, [AUTHORITY.certificate], NOW)


def test_a_certificate_with_two_names_is_refused() -> None:
    role = x509.UniformResourceIdentifier("urn:bagua:role:viewer")
    for names in ((), ("ann", "bob")):
        with pytest.raises(CertificateRefused, match=f"{len(names)} names"):
            role_of(signed_by_hand(AUTHORITY, role, names=names), [AUTHORITY.certificate], NOW)


@pytest.mark.parametrize(
    ("name", "role", "hosts", "days", "complaint"),
    [
        ("", Role.VIEWER, (), 1, "name '' is not allowed"),
        ("a/b", Role.VIEWER, (), 1, "'a/b' is not allowed"),
        ("../ann", Role.VIEWER, (), 1, "is not allowed"),
        ("ann\n", Role.VIEWER, (), 1, "is not allowed"),
        ("a" * 65, Role.VIEWER, (), 1, "1 to 64"),
        ("root", Role.VIEWER, (), 1, "'root'.*use role operator"),
        ("root", Role.AGENT, ("h",), 1, "'root'.*use role operator"),
        (ETCD_MEMBER_NAME, Role.OPERATOR, (), 1, "that of etcd's members"),
        ("ann", Role.OPERATOR, ("h",), 1, "leave out 'h'"),
        ("node", Role.AGENT, (), 1, "name a host"),
        ("node", Role.AGENT, ("*.example.org",), 1, r"host '\*.example.org' is neither"),
        ("node", Role.AGENT, ("10.0.0",), 1, "host '10.0.0' is neither"),
        ("node", Role.AGENT, ("",), 1, "host '' is neither"),
        ("ann", Role.VIEWER, (), 0, "for 0 days is not possible"),
        ("ann", Role.VIEWER, (), 3651, "3651 days are more.*ask for at most 3650"),
    ],
)
def test_what_cannot_be_issued(
    name: str, role: Role, hosts: tuple[str, ...], days: int, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        issue(AUTHORITY, name, role, hosts, now=NOW, days=days)
    assert "\n" not in str(caught.value)
