"""Brings etcd's users to the desired state: reads what etcd holds, and adds what etcd_roles.py finds missing.

Calls etcd's Auth service as the user root. Idempotent: after an interruption, run it again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from bagua_agent.base.errors import StoreUnavailable, UserError
from bagua_agent.etcd.connection import Connection, EtcdClient, StoreConfig
from bagua_agent.etcd.failures import CallFailed, Trouble
from bagua_agent.etcd.stubs import AuthStub
from bagua_agent.security.certificate_files import TlsFiles, read_tls, utc_now
from bagua_agent.security.certificates import ROOT_NAME, Holder, Role
from bagua_agent.security.etcd_roles import Access, AuthCall, EtcdRights, Permission, plan
from bagua_contract import etcd_pb2 as pb

_CALL_TIMEOUT_S = 5.0


def apply(
    config: StoreConfig, holders: Iterable[Holder], retired: Iterable[str] = (), timeout_s: float = 30.0
) -> tuple[AuthCall, ...]:
    """Makes etcd's rights those of `holders`, and returns what had to be done. Harmless to repeat, however it ended.

    config: with root's certificate, or no client could ever change a user again. Raises UserError, StoreUnavailable.
    """
    _check_caller(config)
    holders, retired = tuple(holders), tuple(retired)
    plan(EtcdRights(), holders, retired)  # what can't be planned at all is said before anything is touched
    deadline = time.monotonic() + timeout_s
    etcd = _AuthApi(config, deadline)
    try:
        present = etcd.read()
        if not present.enabled:
            _check_server(config, etcd.endpoint_index, deadline)
        steps = plan(present, holders, retired)
        for step in steps:
            etcd.perform(step)
        return steps
    finally:
        etcd.close()


def _check_caller(config: StoreConfig) -> None:
    if config.ca_cert is None or config.cert is None or config.key is None:
        raise UserError(
            f"etcd's users are told apart by certificates; give the authority's certificate, and certificate and key "
            f"of {ROOT_NAME!r}"
        )
    name = read_tls(TlsFiles(config.ca_cert, config.cert, config.key), utc_now()).holder.name
    if name != ROOT_NAME:
        raise UserError(
            f"etcd lets {ROOT_NAME!r} alone change users, and {config.cert!r} is the certificate of {name!r}; "
            f"issue one for {ROOT_NAME!r} with role {Role.OPERATOR}"
        )


def _check_server(config: StoreConfig, endpoint_index: int, deadline: float) -> None:
    """Checks that etcd asks for certificates, before authentication is enabled: an etcd that does not read certificates
    would refuse every client then."""
    endpoint = config.endpoints[endpoint_index]
    anonymous = Connection(endpoint, StoreConfig((endpoint,), ca_cert=config.ca_cert))
    try:
        anonymous.call(lambda c: c.get_response(b"\0"), min(_CALL_TIMEOUT_S, _left(deadline)))
    except CallFailed as error:
        if error.failure.trouble is not Trouble.DENIED and not error.failure.is_timeout:
            return  # its handshake failed
        raise StoreUnavailable(
            f"etcd at {endpoint} does not say whether it asks for certificates ({error.failure.detail}); try again"
        ) from error
    finally:
        anonymous.close()
    raise UserError(
        f"etcd at {endpoint} serves clients without a certificate, so it can't tell users apart; start it with "
        f"--client-cert-auth and --trusted-ca-file"
    )


class _AuthApi:
    """Calls etcd's Auth service at the first endpoint that answers. Not thread-safe."""

    def __init__(self, config: StoreConfig, deadline: float) -> None:
        self._config = config
        self._deadline = deadline
        self.endpoint_index = 0
        self._connection = Connection(config.endpoints[0], config)

    def close(self) -> None:
        self._connection.close()

    def read(self) -> EtcdRights:
        """Returns the users, roles and permissions that etcd holds now."""
        enabled = self._find_endpoint()
        roles = {
            role: self._permissions(role) for role in self._ask("RoleList", pb.AuthRoleListRequest()).roles
        }
        users = {
            user: frozenset(self._ask("UserGet", pb.AuthUserGetRequest(name=user)).roles)
            for user in self._ask("UserList", pb.AuthUserListRequest()).users
        }
        return EtcdRights(enabled, roles, users)

    def perform(self, step: AuthCall) -> None:
        self._ask(step.method, step.request)

    def _find_endpoint(self) -> bool:
        """Finds the first endpoint that answers, and returns whether authentication is enabled there."""
        reasons: list[str] = []
        for index, endpoint in enumerate(self._config.endpoints):
            if index:
                self._connection.close()
                self._connection = Connection(endpoint, self._config)
                self.endpoint_index = index
            try:
                return bool(self._attempt("AuthStatus", pb.AuthStatusRequest()).enabled)
            except CallFailed as error:
                if error.failure.trouble is Trouble.NOT_ETCD:
                    return False  # before 3.5 there is no such question; to enable it again is harmless
                reasons.append(f"{endpoint}: {error.failure.detail}")
        raise StoreUnavailable(
            f"etcd's users can't be read: no endpoint answers ({'; '.join(reasons)}). Check that etcd runs there, and "
            f"that its certificate and yours are of one authority"
        )

    def _permissions(self, role: str) -> frozenset[Permission]:
        answer = self._ask("RoleGet", pb.AuthRoleGetRequest(role=role))
        return frozenset(Permission(Access(perm.permType), perm.key, perm.range_end) for perm in answer.perm)

    def _ask(self, method: str, request: Any) -> Any:
        try:
            return self._attempt(method, request)
        except CallFailed as error:
            where = f"etcd at {self._config.endpoints[self.endpoint_index]}"
            if error.failure.trouble in (Trouble.DENIED, Trouble.TOKEN_REJECTED):
                raise UserError(
                    f"{where} does not take {self._config.cert!r} for {ROOT_NAME!r} ({error.failure.detail}); start it "
                    f"with --client-cert-auth, and use {ROOT_NAME}'s certificate"
                ) from error
            raise StoreUnavailable(
                f"{where}: {method} failed ({error.failure.detail}); do it again"
            ) from error

    def _attempt(self, method: str, request: Any) -> Any:
        def attempt(client: EtcdClient) -> Any:
            return client.raw(getattr(AuthStub(client.channel), method), request)

        return self._connection.call(attempt, min(_CALL_TIMEOUT_S, _left(self._deadline)))


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
