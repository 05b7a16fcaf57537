"""Chains of certificates that a viewer or a stranger can make up have no operator's right, at a daemon or in etcd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.security.certificate_files import TlsFiles, issued_in, utc_now
from bagua_agent.security.certificates import Credential, Role, issue
from bagua_agent.security.etcd_role_writer import apply
from bagua_agent.security.grpc_security import RoleInterceptor, server_credentials, server_options
from bagua_agent.security.tls_renewal import RenewedTls
from bagua_contract import etcd_pb2
from tests.agent.service.conftest import People, store_config

DEADLINE_S = 10.0
KEY = b"/bagua/v1/cluster/submissions/forged"

Shown = tuple[bytes, bytes]  # the chain and the key that a caller shows, in PEM


def credential(files: TlsFiles) -> Credential:
    key = serialization.load_pem_private_key(Path(files.key_file).read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return Credential(x509.load_pem_x509_certificate(Path(files.cert_file).read_bytes()), key)


def signed_by_a_viewer(people: People) -> Shown:
    viewer = credential(people.files["vic"])
    forged = issue(viewer, "ann", Role.OPERATOR, now=utc_now(), days=1)
    return forged.cert_pem + viewer.cert_pem, forged.key_pem


def signed_in_the_authoritys_name(people: People) -> Shown:
    authority = x509.load_pem_x509_certificate(Path(people.files["ann"].ca_file).read_bytes())
    forger = Credential(authority, ec.generate_private_key(ec.SECP256R1()))
    forged = issue(forger, "ann", Role.OPERATOR, now=utc_now(), days=1)
    return forged.cert_pem + forger.cert_pem, forged.key_pem


def with_another_key(people: People) -> Shown:
    return credential(people.files["ann"]).cert_pem, credential(people.files["vic"]).key_pem


def behind_a_viewers(people: People) -> Shown:
    viewer, operator = (credential(people.files[name]) for name in ("vic", "ann"))
    return viewer.cert_pem + operator.cert_pem, viewer.key_pem


def operators_own(people: People) -> Shown:
    operator = credential(people.files["ann"])
    return operator.cert_pem, operator.key_pem


Forge = Callable[[People], Shown]
NOT_LET_IN = [signed_by_a_viewer, signed_in_the_authoritys_name, with_another_key]


def called(address: str, people: People, shown: Shown, method: str, request: bytes) -> grpc.StatusCode:
    """What became of a call."""
    chain, key = shown
    credentials = grpc.ssl_channel_credentials(Path(people.files["ann"].ca_file).read_bytes(), key, chain)
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(address, credentials, options) as channel:
        try:
            channel.unary_unary(method)(request, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.fixture
def daemon(people: People) -> Iterator[tuple[str, list[bytes]]]:
    """Address of a server with one method, an operator's; and the requests that reached the method."""
    reached: list[bytes] = []

    def order(request: bytes, context: grpc.ServicerContext) -> bytes:
        reached.append(request)
        return request

    tls = RenewedTls(people.files["node-1"])
    interceptor = RoleInterceptor(tls, {"/test.Daemon/Order": Role.OPERATOR})
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[interceptor], options=server_options())
    method = grpc.unary_unary_rpc_method_handler(order)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Daemon", {"Order": method}),))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(tls))
    server.start()
    yield f"127.0.0.1:{port}", reached
    server.stop(0).wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("forge", "expected"),
    [
        (operators_own, grpc.StatusCode.OK),  # or the others would show nothing
        *((forge, grpc.StatusCode.UNAVAILABLE) for forge in NOT_LET_IN),
        (behind_a_viewers, grpc.StatusCode.PERMISSION_DENIED),
    ],
)
def test_a_daemon_gives_no_operators_right_to_it(
    daemon: tuple[str, list[bytes]], people: People, forge: Forge, expected: grpc.StatusCode
) -> None:
    address, reached = daemon
    assert called(address, people, forge(people), "/test.Daemon/Order", b"r") is expected
    assert reached == ([b"r"] if expected is grpc.StatusCode.OK else [])


@pytest.fixture(scope="module")
def guarded(etcd: EmbeddedEtcd, people: People) -> EmbeddedEtcd:
    apply(store_config(etcd.endpoint, people.files["root"]), issued_in(people.folder, utc_now()))
    return etcd


@pytest.mark.parametrize(
    ("forge", "expected"),
    [
        (operators_own, grpc.StatusCode.OK),
        *((forge, grpc.StatusCode.UNAVAILABLE) for forge in NOT_LET_IN),
        (behind_a_viewers, grpc.StatusCode.PERMISSION_DENIED),
    ],
)
def test_etcd_takes_no_submission_from_it(
    guarded: EmbeddedEtcd, people: People, forge: Forge, expected: grpc.StatusCode
) -> None:
    request = etcd_pb2.PutRequest(key=KEY, value=b"v").SerializeToString()
    assert (
        called(
            guarded.endpoint.removeprefix("https://"), people, forge(people), "/etcdserverpb.KV/Put", request
        )
        is expected
    )
