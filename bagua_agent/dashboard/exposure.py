"""Decides how a dashboard is served: beyond loopback over TLS alone, to callers that show a certificate.

A page shows the output of workers, so it is as secret as that.
"""

from __future__ import annotations

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.dashboard.listening import Listening
from bagua_agent.security.certificate_files import TlsFiles
from bagua_agent.security.https import HttpsSide
from bagua_agent.security.tls_renewal import RenewedTls
from bagua_contract.addresses import is_loopback, joined


def why_refused(listening: Listening, option: str, *, has_certificates: bool) -> str:
    """Returns why a page of a job, or of a command, is not served at a place; empty: it is. option: the option that
    names the place. Pure."""
    if has_certificates or is_loopback(listening.host):
        return ""
    return (
        f"{option}: {joined(listening.host, listening.port)} is beyond this host, and the page shows workers' output; "
        "leave the host out and forward the port (ssh -L), or give --etcd-ca, --etcd-cert and --etcd-key of a node's "
        "certificate for TLS"
    )


def https_side(listening: Listening, credentials: StoreCredentials, option: str) -> HttpsSide | None:
    """Returns the TLS of a page by the certificates that etcd is shown; None at loopback. Raises UserError for a place
    that is refused, and for certificates that serve nothing."""
    ca, certificate, key = credentials.ca_file, credentials.cert_file, credentials.key_file
    refused = why_refused(listening, option, has_certificates=bool(ca and certificate and key))
    if refused:
        raise UserError(refused)
    if is_loopback(listening.host) or ca is None or certificate is None or key is None:
        return None
    tls = RenewedTls(TlsFiles(ca, certificate, key))
    holder = tls.current().holder
    if not holder.role.serves:
        raise UserError(
            f"{option}: certificate {holder.name!r} has role {holder.role}, which serves no page beyond this host; "
            "leave the host out and forward the port (ssh -L), or use the page of a node's daemon"
        )
    return HttpsSide(tls)
