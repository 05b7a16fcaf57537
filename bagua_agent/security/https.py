"""Adds TLS to an HTTP server whose callers show a certificate, which is checked at each request.

Certificates are read anew when their files change, so a renewal needs no restart, and a caller's certificate that
expires or is revoked is refused from the next request on.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable
from datetime import datetime

from cryptography import x509

from bagua_agent.base.small_http import Answer
from bagua_agent.security.certificate_files import TlsContents, utc_now
from bagua_agent.security.certificates import CertificateRefused, Role, holder_of
from bagua_agent.security.grpc_security import satisfies
from bagua_agent.security.tls_renewal import RenewedTls

LEAST_ROLE = Role.VIEWER  # pages and metrics are read-only, and a page shows the output of workers


class HttpsSide:
    """Implements base.small_http.ServerTls for one server. Thread-safe."""

    def __init__(self, tls: RenewedTls, now: Callable[[], datetime] = utc_now) -> None:
        self._tls = tls
        self._now = now
        self._lock = threading.Lock()
        self._contents = tls.current()
        self._context = server_context(self._contents)

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """Returns the TLS side of a connection, without the handshake, which the caller makes within its bounds.
        `connection` is detached."""
        contents = self._tls.current()
        with self._lock:
            if contents is not self._contents:
                self._context, self._contents = server_context(contents), contents
            context = self._context
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def refusal(self, connection: ssl.SSLSocket) -> Answer | None:
        """Returns the answer that refuses the caller's request; None if the request may be answered."""
        shown = connection.getpeercert(binary_form=True)
        try:
            if shown is None:
                raise CertificateRefused("a certificate is asked for and none was shown; connect with one")
            tls = self._tls.current()
            certificate = x509.load_der_x509_certificate(shown)
            holder = holder_of(certificate, tls.authorities, self._now(), tls.revoked)
        except CertificateRefused as error:
            return Answer(403, f"{error}\n".encode())
        except ValueError as error:
            return Answer(403, f"the certificate shown can't be read ({error}); issue a new one\n".encode())
        if satisfies(holder, LEAST_ROLE):
            return None
        needs = f"this needs role {LEAST_ROLE}, and {holder.name!r} has role {holder.role}; use another certificate\n"
        return Answer(403, needs.encode())


def server_context(contents: TlsContents) -> ssl.SSLContext:
    """Returns the context for mutual TLS: callers need a certificate of an authority in `contents`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=contents.ca_pem.decode("ascii", "replace"))
    # The files may be renewed meanwhile, and what was checked are these bytes; ssl reads pairs from files alone.
    memory = os.memfd_create("bagua-https", os.MFD_CLOEXEC)
    with os.fdopen(memory, "wb") as file:
        file.write(contents.cert_pem + b"\n" + contents.key_pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    return context
