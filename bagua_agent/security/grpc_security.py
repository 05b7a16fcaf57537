"""Authenticates callers of a daemon by mutual TLS, and checks their role against a table of methods.

TLS checks a certificate once, when a connection is made; the interceptor checks it again at each call, so one that
expires or is revoked meanwhile is refused from the next call on. A method that is not in the table is refused to every
caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import grpc
from cryptography import x509

from bagua_agent.base.errors import BaguaError, InfrastructureLost, UserError
from bagua_agent.rpc.job_identity import limits_of_connections
from bagua_agent.security.certificate_files import TlsContents, TlsFiles, read_tls, utc_now
from bagua_agent.security.certificates import CertificateRefused, Holder, Role, holder_of
from bagua_agent.security.tls_renewal import RenewedTls

MOST_REQUEST_BYTES = 1 << 20  # a submission goes into etcd, which takes 1.5 MiB a request
_MOST_METADATA_BYTES = 16 << 10
_MOST_STREAMS_OF_A_CONNECTION = 100
_KEEPALIVE_MS = 10_000  # to a question, and then to the end of the connection on which it has no answer
# In what gRPC says of a server's certificate; the last one up to some release after 1.65.
_NOT_TRUSTED = ("handshake failed", "verification check failed", "not in peer certificate")

# Who satisfies a least role. A node's certificate reads what viewers read, but gives no orders: it lies on a machine
# on which other people's code runs.
_SATISFIED_BY: Mapping[Role, frozenset[Role]] = {
    Role.VIEWER: frozenset({Role.VIEWER, Role.OPERATOR, Role.AGENT}),
    Role.OPERATOR: frozenset({Role.OPERATOR}),
    Role.AGENT: frozenset({Role.AGENT}),
    Role.ETCD: frozenset(),  # etcd calls no daemon
}


def refusal(method: str, holder: Holder, least_roles: Mapping[str, Role]) -> str | None:
    """Returns why `holder` may not call `method` ("/package.Service/Method"), in one line; None if it may. Pure.

    least_roles: for each method the least role.
    """
    least = least_roles.get(method)
    if least is None:
        return f"{method} is allowed for no role; this daemon may be older than the command"
    if satisfies(holder, least):
        return None
    return f"{method} needs role {least}, and {holder.name!r} has role {holder.role}; use a certificate with that role"


def satisfies(holder: Holder, least: Role) -> bool:
    """Tells whether a holder may do what needs at least this role."""
    return holder.role in _SATISFIED_BY[least]


class RoleInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls for which the caller's certificate is not enough. Methods learn nothing of roles."""

    def __init__(
        self,
        tls: RenewedTls,
        least_roles: Mapping[str, Role],
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._tls = tls
        self._least_roles = dict(least_roles)
        self._now = now

    def intercept_service(
        self, continuation: Callable[[Any], grpc.RpcMethodHandler | None], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(details)
        if handler is None:
            return None  # no such method
        method = details.method
        return _guarded(handler, lambda context: self._admit(method, context))

    def _admit(self, method: str, context: grpc.ServicerContext) -> None:
        """Returns if the caller may call `method`; else ends the call with an exception."""
        try:
            holder = self._caller(context)
        except CertificateRefused as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise  # abort has raised; for readers, and for contexts that do not
        why = refusal(method, holder, self._least_roles)
        if why is not None:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, why)

    def _caller(self, context: grpc.ServicerContext) -> Holder:
        """Returns the holder of the caller's certificate. Raises CertificateRefused."""
        chain = context.auth_context().get("x509_pem_cert")
        if not chain:
            raise CertificateRefused("a certificate is asked for and none was shown; connect with one")
        try:
            certificate = x509.load_pem_x509_certificate(chain[0])
        except ValueError as error:
            raise CertificateRefused(
                f"the certificate shown can't be read ({error}); issue a new one"
            ) from error
        tls = self._tls.current()
        return holder_of(certificate, tls.authorities, self._now(), tls.revoked)


def _guarded(
    handler: grpc.RpcMethodHandler, admit: Callable[[grpc.ServicerContext], None]
) -> grpc.RpcMethodHandler:
    """Returns `handler`, with `admit` called before anything of it runs."""
    inner: Callable[[Any, grpc.ServicerContext], Any]
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        inner = getattr(handler, kind)
        if inner is not None:
            break

    def behaviour(request: Any, context: grpc.ServicerContext) -> Any:
        admit(context)
        return inner(request, context)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        behaviour,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def server_options() -> list[tuple[str, int]]:
    """Returns the options for grpc.server: limits for what any caller may send and hold."""
    return [
        ("grpc.max_receive_message_length", MOST_REQUEST_BYTES),
        ("grpc.max_metadata_size", _MOST_METADATA_BYTES),
        ("grpc.max_concurrent_streams", _MOST_STREAMS_OF_A_CONNECTION),
        ("grpc.so_reuseport", 0),  # a taken port must fail, not share
        *limits_of_connections(),
        # A caller whose host is gone sends nothing that ends its connection; its streams would keep their places.
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_MS),  # as long as gRPC waits for an answer to any ping
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit: a job may print nothing for hours
    ]


def server_credentials(tls: RenewedTls) -> grpc.ServerCredentials:
    """Returns the credentials for mutual TLS: callers need a certificate of an authority in `tls`, which is read anew
    when it changed."""

    def configuration(contents: TlsContents) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(contents.key_pem, contents.cert_pem)], root_certificates=contents.ca_pem
        )

    given = tls.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Returns the certificates for the core of gRPC, which asks at each connection. None: as before."""
        # With each configuration the core frees the one before, even while another connection takes it (grpc#36693):
        # a stranger's handshakes would end the process if this gave one at each connection.
        nonlocal given
        contents = tls.current()
        if contents is given:
            return None
        given = contents
        return configuration(contents)

    return grpc.dynamic_ssl_server_credentials(
        configuration(given), changed, require_client_authentication=True
    )


def channel_credentials(files: TlsFiles, now: datetime) -> grpc.ChannelCredentials:
    """Returns the credentials for calls to a daemon. Raises UserError if the files can't be used: the daemon could only
    hang up on them."""
    contents = read_tls(files, now)
    return grpc.ssl_channel_credentials(contents.ca_pem, contents.key_pem, contents.cert_pem)


def is_too_large(details: str | None) -> bool:
    """Tells whether RESOURCE_EXHAUSTED means that a message was larger than its receiver takes, by the text of it."""
    return "larger than max" in (details or "")


def why_not_served(code: grpc.StatusCode, details: str | None, address: str) -> BaguaError:
    """Returns the error that a failed call to the daemon at `address` means for the person who made it, in one line.
    Pure."""
    text = " ".join((details or "").split())
    match code:
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return UserError(f"the daemon at {address} refuses it: {text}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if is_too_large(text):
            return UserError(
                f"the daemon at {address} takes requests of at most {MOST_REQUEST_BYTES} bytes ({text}); send less, "
                f"and keep large things in files that every node sees"
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return InfrastructureLost(f"the daemon at {address} takes no more calls now: {text}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return UserError(f"the daemon at {address} does not know this command; upgrade it ({text})")
        case grpc.StatusCode.UNAVAILABLE if any(sign in text.lower() for sign in _NOT_TRUSTED):
            return UserError(
                f"the daemon at {address} shows no certificate that is trusted here for that address ({text}); check "
                f"the CA file, and that the daemon's certificate names this host"
            )
        case grpc.StatusCode.UNAVAILABLE if "socket closed" in text.lower():
            return UserError(
                f"the daemon at {address} hung up at once; it takes only certificates of its own authority, so check "
                f"which one issued yours, and that the daemon runs"
            )
        case _:
            return InfrastructureLost(
                f"the daemon at {address} does not answer ({text}); check that it runs and is reached"
            )
