"""How is a member of etcd told to ask everybody for a certificate? Its flags; pure."""

from __future__ import annotations

from bagua_agent.security.certificate_files import TlsFiles
from bagua_agent.security.certificates import ETCD_MEMBER_NAME


def member_flags(files: TlsFiles) -> tuple[str, ...]:
    """For etcd's clients and peers alike. files: of a holder with role etcd; etcd reads their list of revoked
    certificates at every connection.

    Peers are told from clients by name: clients' certificates are of the same authority, and whoever speaks to
    members as a member can write anything.
    """
    revoked = (f"--client-crl-file={files.revoked_file}", f"--peer-crl-file={files.revoked_file}")
    return (
        f"--cert-file={files.cert_file}",
        f"--key-file={files.key_file}",
        f"--trusted-ca-file={files.ca_file}",
        "--client-cert-auth",
        f"--peer-cert-file={files.cert_file}",
        f"--peer-key-file={files.key_file}",
        f"--peer-trusted-ca-file={files.ca_file}",
        "--peer-client-cert-auth",
        f"--peer-cert-allowed-cn={ETCD_MEMBER_NAME}",
        *(revoked if files.revoked_file else ()),
    )
