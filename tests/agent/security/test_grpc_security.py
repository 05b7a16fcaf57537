"""The callers that reach a daemon's methods over real TLS, and the refusals of all others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from bagua_agent.base.errors import BaguaError, InfrastructureLost, UserError
from bagua_agent.security.certificate_files import (
    TlsFiles,
    create_authority,
    files_in,
    issue_files,
    retire,
    utc_now,
)
from bagua_agent.security.certificates import CertificateRefused, Holder, Role
from bagua_agent.security.grpc_security import (
    MOST_REQUEST_BYTES,
    RoleInterceptor,
    channel_credentials,
    refusal,
    server_credentials,
    server_options,
    why_not_served,
)
from bagua_agent.security.tls_renewal import RenewedTls
from tests.agent.service.conftest import LOOPBACK, People

DEADLINE_S = 10.0
LEAST_ROLES = {
    "/test.Daemon/Look": Role.VIEWER,
    "/test.Daemon/Submit": Role.OPERATOR,
    "/test.Daemon/Follow": Role.VIEWER,
    "/test.Daemon/Upload": Role.OPERATOR,
    "/test.Daemon/Talk": Role.OPERATOR,
    "/test.Daemon/Gossip": Role.AGENT,
}


class Daemon:
    """A server whose methods remember that they ran. Requests and answers are bytes."""

    def __init__(self, files: TlsFiles) -> None:
        self.calls: list[str] = []
        self.clock_ahead = timedelta(0)
        tls = RenewedTls(files)
        interceptor = RoleInterceptor(tls, LEAST_ROLES, now=lambda: utc_now() + self.clock_ahead)
        self._server = grpc.server(
            ThreadPoolExecutor(4), interceptors=[interceptor], options=server_options()
        )
        handlers = {
            **{
                name: grpc.unary_unary_rpc_method_handler(self._remembering(name, lambda r: r))
                for name in ("Look", "Submit", "Gossip", "Forgotten")
            },
            "Follow": grpc.unary_stream_rpc_method_handler(
                self._remembering("Follow", lambda r: iter([r, r]))
            ),
            "Upload": grpc.stream_unary_rpc_method_handler(
                self._remembering("Upload", lambda r: b"".join(r))
            ),
            "Talk": grpc.stream_stream_rpc_method_handler(self._remembering("Talk", lambda r: r)),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Daemon", handlers),)
        )
        self.port = self._server.add_secure_port("127.0.0.1:0", server_credentials(tls))
        self._server.start()

    def _remembering(self, name: str, answer: Callable[[object], object]) -> Callable[..., object]:
        def method(request: object, context: grpc.ServicerContext) -> object:
            self.calls.append(name)
            return answer(request)

        return method

    def end(self) -> None:
        self._server.stop(0).wait(DEADLINE_S)


@pytest.fixture
def start() -> Iterator[Callable[..., Daemon]]:
    daemons: list[Daemon] = []

    def start_daemon(files: TlsFiles) -> Daemon:
        daemons.append(Daemon(files))
        return daemons[-1]

    yield start_daemon
    for daemon in daemons:
        daemon.end()


@pytest.fixture
def daemon(start: Callable[..., Daemon], people: People) -> Daemon:
    return start(people.files["node-1"])


class Caller:
    """A channel with one's certificate; failed calls raise the error that the caller sees."""

    def __init__(self, daemon: Daemon, credentials: grpc.ChannelCredentials | None) -> None:
        self._address = f"127.0.0.1:{daemon.port}"
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = (
            grpc.insecure_channel(self._address, options)
            if credentials is None
            else grpc.secure_channel(self._address, credentials, options)
        )

    def call(self, method: str, request: bytes = b"r") -> bytes:
        return self._told(
            lambda: self._channel.unary_unary(f"/test.Daemon/{method}")(request, timeout=DEADLINE_S)
        )

    def follow(self) -> list[bytes]:
        return self._told(
            lambda: list(self._channel.unary_stream("/test.Daemon/Follow")(b"r", timeout=DEADLINE_S))
        )

    def upload(self) -> bytes:
        call = self._channel.stream_unary("/test.Daemon/Upload")
        return self._told(lambda: call(iter([b"a", b"b"]), timeout=DEADLINE_S))

    def talk(self) -> list[bytes]:
        call = self._channel.stream_stream("/test.Daemon/Talk")
        return self._told(lambda: list(call(iter([b"a", b"b"]), timeout=DEADLINE_S)))

    def _told(self, call: Callable[[], object]) -> object:
        try:
            return call()
        except grpc.RpcError as error:
            told = why_not_served(error.code(), error.details(), self._address)
            assert "\n" not in str(told)
            raise told from error

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., Caller]]:
    callers: list[Caller] = []

    def connect_to(daemon: Daemon, files: TlsFiles | None) -> Caller:
        """As a careless client: whatever the files hold is shown."""
        credentials = None if files is None else _unchecked(files)
        callers.append(Caller(daemon, credentials))
        return callers[-1]

    yield connect_to
    for caller in callers:
        caller.close()


def _unchecked(files: TlsFiles) -> grpc.ChannelCredentials:
    shown = [Path(file).read_bytes() for file in (files.ca_file, files.key_file, files.cert_file) if file]
    return grpc.ssl_channel_credentials(*shown)


def test_each_role_may_do_what_it_is_for(
    daemon: Daemon, people: People, connect: Callable[..., Caller]
) -> None:
    allowed = {
        "ann": {"Look", "Submit"},
        "vic": {"Look"},
        "node-1": {"Look", "Gossip"},
        "etcd-1": set(),
    }
    for name, methods in allowed.items():
        caller = connect(daemon, people.files[name])
        for method in ("Look", "Submit", "Gossip"):
            daemon.calls.clear()
            if method in methods:
                assert caller.call(method) == b"r"
                assert daemon.calls == [method]
            else:
                with pytest.raises(
                    UserError, match=rf"refuses it: /test\.Daemon/{method} needs role .* has role"
                ):
                    caller.call(method)
                assert daemon.calls == []


def test_a_viewer_is_told_what_an_operators_method_needs(
    daemon: Daemon, people: People, connect: Callable[..., Caller]
) -> None:
    with pytest.raises(UserError) as caught:
        connect(daemon, people.files["vic"]).call("Submit")
    assert str(caught.value) == (
        f"the daemon at 127.0.0.1:{daemon.port} refuses it: /test.Daemon/Submit needs role operator, and 'vic' has "
        f"role viewer; use a certificate with that role"
    )
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert caught.value.__cause__.code() is grpc.StatusCode.PERMISSION_DENIED


def test_streams_are_guarded_as_well(daemon: Daemon, people: People, connect: Callable[..., Caller]) -> None:
    operator, viewer, member = (connect(daemon, people.files[name]) for name in ("ann", "vic", "etcd-1"))
    assert viewer.follow() == operator.follow() == [b"r", b"r"]
    assert operator.upload() == b"ab"
    assert operator.talk() == [b"a", b"b"]
    daemon.calls.clear()
    for refused in (member.follow, viewer.upload, viewer.talk):
        with pytest.raises(UserError, match="needs role"):
            refused()
    assert daemon.calls == []


def test_a_method_that_the_table_forgot_is_allowed_for_no_role(
    daemon: Daemon, people: People, connect: Callable[..., Caller]
) -> None:
    with pytest.raises(UserError, match="Forgotten is allowed for no role"):
        connect(daemon, people.files["ann"]).call("Forgotten")
    with pytest.raises(UserError, match="does not know this command; upgrade it"):
        connect(daemon, people.files["ann"]).call("NeverWritten")
    assert daemon.calls == []


@pytest.mark.parametrize("name", ["expired", "future", "stranger"])
def test_certificates_that_do_not_hold_do_not_get_in(
    daemon: Daemon, people: People, connect: Callable[..., Caller], name: str
) -> None:
    with pytest.raises(UserError, match="hung up at once; it takes only certificates of its own authority"):
        connect(daemon, people.trusting_us(name)).call("Look")
    assert daemon.calls == []
    with pytest.raises(CertificateRefused, match=f"'{name}'"):  # what a careful client says before it calls
        channel_credentials(people.trusting_us(name), utc_now())


def test_without_a_certificate_or_tls_no_caller_gets_in(
    daemon: Daemon, people: People, connect: Callable[..., Caller]
) -> None:
    for files in (TlsFiles(people.files["ann"].ca_file, "", ""), None):
        with pytest.raises(UserError, match="hung up at once"):
            connect(daemon, files).call("Look")
    assert daemon.calls == []


def test_a_daemon_of_another_authority_or_host_is_not_believed(
    start: Callable[..., Daemon], people: People, connect: Callable[..., Caller]
) -> None:
    elsewhere = issue_files(people.folder, "elsewhere", Role.AGENT, ["10.9.8.7"], now=utc_now(), replace=True)
    for files in (people.files["their-node"], elsewhere):
        impostor = start(files)
        with pytest.raises(UserError, match="shows no certificate that is trusted here for that address"):
            connect(impostor, people.files["ann"]).call("Look")
        assert impostor.calls == []


def test_a_person_cannot_play_a_daemon(
    start: Callable[..., Daemon], people: People, connect: Callable[..., Caller]
) -> None:
    impostor = start(people.files["ann"])
    with pytest.raises(UserError, match="shows no certificate that is trusted"):
        connect(impostor, people.files["vic"]).call("Look")
    assert impostor.calls == []


def test_an_open_connection_ends_to_be_of_use_when_its_certificate_expires(
    daemon: Daemon, people: People, connect: Callable[..., Caller]
) -> None:
    operator = connect(daemon, people.files["ann"])
    assert operator.call("Submit") == b"r"
    daemon.clock_ahead = timedelta(days=400)
    with pytest.raises(UserError, match=r"'ann' expired on .*; issue a new one") as caught:
        operator.call("Submit")
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert caught.value.__cause__.code() is grpc.StatusCode.UNAUTHENTICATED
    assert daemon.calls == ["Submit"]


def test_a_lost_key_is_shut_out_at_once(
    tmp_path: Path, start: Callable[..., Daemon], connect: Callable[..., Caller]
) -> None:
    now = utc_now()
    folder = tmp_path / "ca"
    create_authority(folder, now=now)
    issue_files(folder, "node", Role.AGENT, LOOPBACK, now=now)
    lost, kept = (issue_files(folder, name, Role.OPERATOR, now=now) for name in ("lost", "kept"))
    daemon = start(replace(files_in(folder / "node"), revoked_file=str(folder / "revoked.pem")))
    open_before, other = connect(daemon, lost), connect(daemon, kept)
    open_after = connect(daemon, lost)  # connects when it first calls
    assert open_before.call("Submit") == other.call("Submit") == b"r"
    retire(folder, "lost", now=now)
    for caller in (open_before, open_after):
        with pytest.raises(UserError, match="'lost' was revoked"):
            caller.call("Look")
    assert other.call("Look") == b"r"
    assert daemon.calls == ["Submit", "Submit", "Look"]


def test_requests_have_a_greatest_size(
    daemon: Daemon, people: People, connect: Callable[..., Caller]
) -> None:
    operator = connect(daemon, people.files["ann"])
    assert len(operator.call("Submit", bytes(MOST_REQUEST_BYTES))) == MOST_REQUEST_BYTES
    with pytest.raises(
        UserError, match=rf"at most {MOST_REQUEST_BYTES} bytes .*{MOST_REQUEST_BYTES + 1} vs.*send less"
    ):
        operator.call("Submit", bytes(MOST_REQUEST_BYTES + 1))
    assert daemon.calls == ["Submit"]


def test_a_daemon_that_is_away_is_no_matter_of_certificates(
    daemon: Daemon, people: People, connect: Callable[..., Caller]
) -> None:
    caller = connect(daemon, people.files["ann"])
    daemon.end()
    with pytest.raises(InfrastructureLost, match="does not answer") as caught:
        caller.call("Look")
    assert not isinstance(caught.value, UserError)


def test_renewed_certificates_and_authorities_need_no_restart(
    tmp_path: Path, start: Callable[..., Daemon], connect: Callable[..., Caller]
) -> None:
    now = utc_now()
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        create_authority(folder, now=now)
        issue_files(folder, "node", Role.AGENT, LOOPBACK, now=now)
        issue_files(folder, "ann", Role.OPERATOR, now=now)
    daemon = start(files_in(old / "node"))
    trusts_both = tmp_path / "both.pem"
    trusts_both.write_bytes(
        b"".join((folder / "authority/certificate.pem").read_bytes() for folder in (old, new))
    )

    def ann_of(folder: Path) -> Caller:
        return connect(daemon, replace(files_in(folder / "ann"), ca_file=str(trusts_both)))

    assert ann_of(old).call("Submit") == b"r"
    with pytest.raises(UserError, match="hung up"):
        ann_of(new).call("Submit")

    _renew(old / "node/ca.pem", trusts_both)  # first both are trusted,
    assert ann_of(old).call("Submit") == ann_of(new).call("Submit") == b"r"
    _renew(old / "node/key.pem", new / "node/key.pem")  # halfway: a key that does not fit yet
    assert ann_of(old).call("Submit") == b"r"
    _renew(old / "node/certificate.pem", new / "node/certificate.pem")  # then the daemon shows the new one,
    connection = ann_of(old)
    assert connection.call("Submit") == b"r"
    _renew(old / "node/ca.pem", new / "node/ca.pem")  # and in the end the old one is trusted no more
    assert ann_of(new).call("Submit") == b"r"
    with pytest.raises(UserError, match="hung up"):
        ann_of(old).call("Submit")
    with pytest.raises(UserError, match=r"'ann' was issued by .* not by the authority that is trusted"):
        connection.call("Submit")


def _renew(file: Path, by: Path) -> None:
    draft = file.with_suffix(".draft")
    shutil.copy2(by, draft)
    draft.chmod(0o600)
    os.replace(draft, file)


@pytest.mark.parametrize("least", list(Role))
def test_who_satisfies_a_least_role(least: Role) -> None:
    satisfied = {
        role for role in Role if refusal("/s/M", Holder("x", role, utc_now()), {"/s/M": least}) is None
    }
    assert (
        satisfied
        == {
            Role.VIEWER: {Role.VIEWER, Role.OPERATOR, Role.AGENT},
            Role.OPERATOR: {Role.OPERATOR},
            Role.AGENT: {Role.AGENT},
            Role.ETCD: set(),
        }[least]
    )


def test_failures_that_say_nothing_of_security_stay_what_they_are() -> None:
    told = why_not_served(grpc.StatusCode.DEADLINE_EXCEEDED, None, "node-1:7461")
    assert isinstance(told, BaguaError) and not isinstance(told, UserError)
    assert "node-1:7461 does not answer" in str(told)
