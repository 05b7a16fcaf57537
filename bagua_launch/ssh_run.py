"""Runs a job on several hosts from one terminal, without daemons: one ssh process for each host, and an etcd here.

The etcd accepts only clients with certificates that are made for this job and sent through ssh: no configuration is
needed, and no other host on the network has access. The job lives as long as this process: when it ends, all nodes
end.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagua_agent.base.errors import UserError
from bagua_agent.base.signals import SignalsToInbox
from bagua_agent.etcd.server.embedded import ServerTls
from bagua_agent.etcd.server.hosted import HostedEtcd
from bagua_agent.node.local_address import UnknownStoreName, local_address
from bagua_agent.node.node_address import address_towards
from bagua_agent.security.certificate_files import create_authority, issue_files, utc_now
from bagua_agent.security.certificates import Role
from bagua_contract.addresses import family_of, joined
from bagua_launch.input_files import current_directory
from bagua_launch.node_facts import ThisNode
from bagua_launch.ssh_hosts import LEAVE, SSH_FAILED, SshHost, node_arguments, only_typed_on_hosts
from bagua_launch.written_values import WrittenValue

SSH_PORT = 22
DAYS = 365
FILES = "@FILES@"
CREDENTIALS = {"--etcd-ca": "ca.pem", "--etcd-cert": "cert.pem", "--etcd-key": "key.pem"}
END_TIMEOUT_S = 60.0


def terminal_address(given: str | None, hosts: Sequence[SshHost]) -> str:
    """Returns the address at which hosts reach this one. given: --local-addr. Raises UserError if it is no address."""
    try:
        return address_towards(given, [f"{host.address}:{SSH_PORT}" for host in hosts], single_node=False)
    except UnknownStoreName:
        # names that ssh alone knows, of its own configuration
        address = local_address(given, None, single_node=False)
        print(
            f"bagua-launch: no name in --hosts can be resolved; the hosts will connect to this one at {address} "
            "(--local-addr ADDRESS gives another)",
            file=sys.stderr,
            flush=True,
        )
        return address


class SshJob:
    """Runs one job on `hosts`. environment: of the nodes, beside what ssh gives them."""

    def __init__(
        self,
        hosts: Sequence[SshHost],
        values: Mapping[str, WrittenValue],
        program: Sequence[str],
        *,
        job_id: str,
        environment: Mapping[str, str],
    ) -> None:
        self._hosts = hosts
        self._values = values
        self._program = program
        self._job_id = job_id
        self._environment = environment
        self._ssh = shlex.split(values["ssh"].text) if "ssh" in values else ["ssh", "-o", "BatchMode=yes"]
        self._python = values["remote_python"].text if "remote_python" in values else sys.executable
        self._nodes: dict[SshHost, subprocess.Popen[bytes]] = {}
        self._asked: set[SshHost] = set()  # to leave
        self._lock = threading.Lock()  # signals come in a thread of their own

    def run(self) -> int:
        """Runs the job and returns its exit code. Raises UserError, InfrastructureLost if it can't begin."""
        if shutil.which(self._ssh[0]) is None:
            raise UserError(
                f"no program {self._ssh[0]!r}; install OpenSSH's client, or name another with --ssh"
            )
        given = self._values["local_addr"].text if "local_addr" in self._values else None
        address = terminal_address(given, self._hosts)
        names = ["SIGINT", "SIGTERM"]
        if not ThisNode().ignores("SIGHUP"):
            names.append("SIGHUP")
        with (
            # outermost: no signal may end this process before the authority's key is removed
            SignalsToInbox(names, self._signalled) as signals,
            tempfile.TemporaryDirectory(prefix="bagua-hosts-") as made,
        ):
            place = Path(made)
            now = utc_now()
            create_authority(place / "ca", now=now, days=DAYS + 2)
            server = issue_files(place / "ca", "etcd", Role.ETCD, [address], now=now, days=DAYS)
            client = issue_files(place / "ca", "nodes", Role.OPERATOR, now=now, days=DAYS)
            etcd = HostedEtcd.start(
                _listen_at(address),
                directory=place / "etcd",
                tls=ServerTls(server.cert_file, server.key_file, server.ca_file, require_client_cert=True),
            )
            try:
                etcd.keep_up(
                    lambda pid: None, lambda text: print(f"bagua-launch: {text}", file=sys.stderr, flush=True)
                )
                files = {
                    "ca.pem": Path(client.ca_file).read_text(),
                    "cert.pem": Path(client.cert_file).read_text(),
                    "key.pem": Path(client.key_file).read_text(),
                }
                return self._run_nodes(etcd.endpoint, files, signals)
            finally:
                etcd.stop()

    def _run_nodes(self, endpoint: str, files: Mapping[str, str], signals: SignalsToInbox) -> int:
        if signals.first is not None:
            return 128 + signals.first
        try:
            for host in self._hosts:
                self._start(host, endpoint, files)
            if signals.first is not None:
                self._ask_to_leave(again=False)  # those that were started since
            codes = {host: node.wait() for host, node in self._nodes.items()}
        finally:
            for node in self._nodes.values():
                _end(node)
        for host, code in codes.items():
            if code == SSH_FAILED:
                print(f"bagua-launch: {host.target}: ssh failed, see above", file=sys.stderr, flush=True)
        return exit_code(list(codes.values()))

    def _start(self, host: SshHost, endpoint: str, files: Mapping[str, str]) -> None:
        nodes = self._values["nnodes"].text if "nnodes" in self._values else str(len(self._hosts))
        request = {
            "arguments": node_arguments(
                host,
                self._values,
                self._program,
                nodes=nodes,
                endpoint=endpoint,
                job_id=self._job_id,
                credentials={option: f"{FILES}/{name}" for option, name in CREDENTIALS.items()},
            ),
            "only_typed": sorted(only_typed_on_hosts(self._values)),
            "environment": dict(self._environment),
            "directory": current_directory(),
            "files": dict(files),
        }
        command = f"exec {shlex.quote(self._python)} -m bagua_launch.remote_node"
        paths = self._environment.get("PYTHONPATH")
        if paths:  # needed before it can read its input
            command = f"PYTHONPATH={shlex.quote(paths)} {command}"
        node = subprocess.Popen(
            [*self._ssh, host.target, command],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        with self._lock:
            self._nodes[host] = node
        assert node.stdin is not None
        try:
            node.stdin.write(json.dumps(request).encode() + b"\n")
            node.stdin.flush()
        except BrokenPipeError:
            return  # ssh has said why

    def _signalled(self, number: int) -> None:
        self._ask_to_leave(again=number != signal.SIGHUP)  # a terminal that closes sends two of it

    def _ask_to_leave(self, *, again: bool) -> None:
        """Asks the nodes to leave. again: also those asked before; for a node each time is one more Ctrl-C."""
        with self._lock:
            hosts = [host for host in self._nodes if again or host not in self._asked]
            self._asked.update(hosts)
            for host in hosts:
                threading.Thread(target=_ask_to_leave, args=(self._nodes[host],), daemon=True).start()


def exit_code(codes: Sequence[int]) -> int:
    """Returns the job's exit code. Pure.

    It is 0 if a node that stayed to the end says so, else that of the first node whose code is not ssh's own. No node
    ends with that one (remote_node.py).
    """
    own = [code if code >= 0 else 128 - code for code in codes]
    if 0 in own and all(code in (0, SSH_FAILED) for code in own):
        return 0
    return next((code for code in own if code not in (0, SSH_FAILED)), max(own, default=0))


def _listen_at(address: str) -> str:
    with socket.socket(family_of(address)) as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    return joined(address, port)


def _ask_to_leave(node: subprocess.Popen[bytes]) -> None:
    assert node.stdin is not None
    try:
        node.stdin.write(f"{LEAVE}\n".encode())
        node.stdin.flush()
    except (BrokenPipeError, ValueError):
        return  # it has ended


def _end(node: subprocess.Popen[bytes]) -> None:
    """Ends a node, whatever happened here: its remote side sees the end of its input, and leaves."""
    assert node.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        node.stdin.close()
    try:
        node.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()
