"""The commands and outputs that docs/security.md shows, in their order, with a real etcd of three members."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.base.errors import StoreUnavailable, UserError
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.server.embedded import find_etcd
from bagua_agent.security.certificate_files import files_in
from tests.agent.service.conftest import store_config
from tests.docs.page_blocks import ROOT, Block
from tests.docs.printed import printed_block, replaced
from tests.lab.free_port import free_port
from tests.lab.wait import HANG_S, eventually, patiently

MEMBERS = 3
START_S = 60.0  # for etcd to be up, however busy the machine
ALIAS = "alias certificates='bagua-agent certs'\n"  # of the page's first block, for all others
NAMES = ["ca.pem", "certificate.pem", "key.pem"]


def undated(text: str) -> str:
    """All days and times are one."""
    return re.sub(r"\d{4}-\d\d-\d\d", "DAY", re.sub(r"\d\d:\d\d UTC", "TIME", text))


class Reader:
    """The host of the authority, whose terminal is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "bin/bagua-agent"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bagua_agent.service "$@"\n')
        program.chmod(0o700)
        self.environment = {
            **os.environ,
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}",
        }

    def types(self, block: Block, given: dict[str, str]) -> None:
        """Types the commands of the block and finds what it shows. given: as of printed()."""
        typed, shown = [], []
        for line in replaced(block.text.splitlines(), given, f"{block.page}:{block.line}"):
            if line.startswith("$ "):
                typed.append(line[2:])
            elif line == "...":
                shown.append(r"(?:.*\n)*")
            else:
                shown.append(re.escape(undated(line) + "\n"))
        script = ("" if any(line.startswith("alias ") for line in typed) else ALIAS) + "\n".join(typed)
        done = subprocess.run(
            ["sh", "-e", "-c", script],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
        assert re.fullmatch("".join(shown), undated(done.stdout)), done.stdout

    def store(self, directory: str, endpoint: str) -> Store:
        return Store(store_config(endpoint, files_in(self.folder / directory)))


class Members:
    """An etcd of three members on loopback, with the options of the page."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        urls = [f"https://127.0.0.1:{free_port()}" for _ in range(2 * MEMBERS)]
        clients, peers = urls[:MEMBERS], urls[MEMBERS:]
        self.endpoints = [url.removeprefix("https://") for url in clients]
        self.logs = [folder / f"member-{number}.log" for number in range(MEMBERS)]
        self.processes = []
        cluster = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
        for number, (client, peer, log) in enumerate(zip(clients, peers, self.logs, strict=True)):
            own = [f"--name=m{number}", f"--data-dir={folder / f'member-{number}'}"]
            own += [f"--initial-cluster={cluster}", f"--initial-advertise-peer-urls={peer}"]
            own += [f"--listen-peer-urls={peer}", f"--listen-client-urls={client}"]
            own += [f"--advertise-client-urls={client}"]
            with log.open("wb") as output:
                self.processes.append(
                    subprocess.Popen([find_etcd(), *own, *options], stdout=output, stderr=output)
                )

    def await_up(self, reader: Reader) -> None:
        def answers(endpoint: str) -> bool:
            store = reader.store("bagua-ca/root", endpoint)
            try:
                store.get("/bagua/v1/any")
            except StoreUnavailable:
                return False
            finally:
                store.close()
            return True

        for endpoint, log in zip(self.endpoints, self.logs, strict=True):
            eventually(lambda e=endpoint: answers(e), START_S, lambda log=log: log.read_text()[-3000:])  # type: ignore[misc]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()  # of SIGTERM the members would tell each other first
        for process in self.processes:
            patiently(process.wait, START_S)


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    if shutil.which("scp") is None:
        pytest.skip("no scp: install openssh-client")
    return Reader(tmp_path)


@pytest.fixture
def tls(reader: Reader) -> Path:
    """The directory of a member's files. The authority has issued what the page says."""
    block = printed_block("docs/security.md", "$ certificates authority bagua-ca")
    assert ALIAS in block.text
    reader.types(block, {})
    made = reader.folder / "etcd-tls"
    made.mkdir(mode=0o700)
    for name in NAMES:
        shutil.copy(reader.folder / "bagua-ca/etcd-1" / name, made)
    shutil.copy(reader.folder / "bagua-ca/revoked.pem", made)
    return made


@pytest.fixture
def members(reader: Reader, tls: Path) -> Iterator[Members]:
    options = shlex.split(printed_block("docs/security.md", "--peer-cert-allowed-cn=bagua-etcd").text)
    absolute = {f"={name}": f"={tls / name}" for name in [*NAMES, "revoked.pem"]}
    made = Members(reader.folder, replaced(options, absolute, "docs/security.md"))
    try:
        made.await_up(reader)
        yield made
    finally:
        made.stop()


def test_a_cluster_gets_its_users_and_a_lost_key_is_replaced(
    reader: Reader, tls: Path, members: Members
) -> None:
    all_of_them = {"etcd-1:2379,etcd-2:2379,etcd-3:2379": ",".join(members.endpoints)}
    reader.types(printed_block("docs/security.md", "authentication enabled"), all_of_them)
    first = members.endpoints[0]
    open_before, viewer = (
        reader.store("bagua-ca/ann", first),
        reader.store("bagua-ca/vic", members.endpoints[1]),
    )
    try:
        open_before.put("/bagua/v1/of-ann", b"1")
        with pytest.raises(UserError, match="denies it"):
            viewer.put("/bagua/v1/of-vic", b"1")

        shutil.copytree(reader.folder / "bagua-ca/ann", reader.folder / "bagua-copy/ann")
        lost = printed_block("docs/security.md", "$ certificates retire bagua-ca ann\n")
        node = reader.folder / "node-tls"
        node.mkdir()
        copies = {"etcd-1:/etc/bagua/etcd-tls/": f"{tls}/", "h1:/etc/bagua/tls/": f"{node}/"}
        reader.types(lost, {**copies, "etcd-1:2379": first})
        assert (node / "revoked.pem").read_bytes() == (tls / "revoked.pem").read_bytes()
        with pytest.raises(UserError, match="denies it"):
            open_before.put("/bagua/v1/of-ann", b"2")
    finally:
        open_before.close()
        viewer.close()
    # the same member refuses a new connection with the old certificate, and takes one with the new name's
    for directory, works in (("bagua-copy/ann", False), ("bagua-ca/ann-2", True)):
        store = reader.store(directory, first)
        try:
            if works:
                store.put("/bagua/v1/of-ann", b"3")
            else:
                with pytest.raises(StoreUnavailable, match="no etcd endpoint answered"):
                    store.put("/bagua/v1/of-ann", b"3")
        finally:
            store.close()
