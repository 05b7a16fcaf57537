"""`bagua-agent install` sets the list of revoked certificates, and `check` notes when a daemon has none."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.security.certificate_files import TlsFiles, utc_now
from bagua_agent.service import install, main
from bagua_agent.service.config.agent_config import AgentConfig, check, read_agent_config
from bagua_agent.service.config.agent_config_keys import Value
from bagua_agent.service.node.node_checks import Weight, check_node, check_revocation
from tests.agent.service.conftest import People

NODE = "h1"


def typed(tmp_path: Path, *words: str) -> Mapping[str, Value]:
    """Keys that `bagua-agent install` asks for, with a CA file in tmp_path."""
    files = ("--ca-file", str(tmp_path / "ca.pem"), "--cert-file", "/c.pem", "--key-file", "/k.pem")
    line = ["--etcd", "https://etcd-1:2379", *files, *words]
    with main.cli.commands["install"].make_context("install", line) as context:
        return main._wanted({k: v for k, v in context.params.items() if k not in ("config", "as_json")})


def test_install_takes_the_list_beside_the_authority(tmp_path: Path) -> None:
    assert "tls.revoked_file" not in install.with_revocation_list(typed(tmp_path))
    (tmp_path / "revoked.pem").touch()
    wanted = install.with_revocation_list(typed(tmp_path))
    written = tomllib.loads(install.config_text(wanted))
    assert written["tls"]["revoked_file"] == str(tmp_path / "revoked.pem")
    assert check(written, "test", NODE).tls_revoked_file == str(tmp_path / "revoked.pem")


def test_a_list_that_is_named_is_the_one(tmp_path: Path) -> None:
    (tmp_path / "revoked.pem").touch()
    wanted = install.with_revocation_list(typed(tmp_path, "--revoked-file", "/etc/other.pem"))
    assert wanted["tls.revoked_file"] == "/etc/other.pem"


def test_without_tls_there_is_no_list() -> None:
    assert install.with_revocation_list({"etcd.endpoints": ("127.0.0.1:2379",)}) == {
        "etcd.endpoints": ("127.0.0.1:2379",)
    }


class Installed:
    """The certificates of a node in a directory, and `install` there without systemd and without an account."""

    def __init__(self, files: TlsFiles, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.list = folder / "revoked.pem"
        self.config = folder / "agent.toml"
        copies = {}
        for name in ("ca_file", "cert_file", "key_file"):
            source = Path(getattr(files, name))
            copies[name] = folder / source.name
            copies[name].write_bytes(source.read_bytes())
            copies[name].chmod(0o600)
        self.wanted: dict[str, Value] = {"etcd.endpoints": ("https://etcd-1:2379",), "node.name": NODE}
        self.wanted |= {f"{of}.{name}": str(path) for of in ("etcd", "tls") for name, path in copies.items()}
        self.wanted |= {f"directories.{name}": str(folder / name) for name in ("state", "log")}
        monkeypatch.setattr(install, "_program", lambda: "/opt/bagua/bin/bagua-agent")
        for step in ("_need_root_and_systemd", "_systemctl"):
            monkeypatch.setattr(install, step, lambda *words: None)
        monkeypatch.setattr(install, "_make_account", lambda config: [])
        monkeypatch.setattr(install, "_is_active", lambda: True)
        monkeypatch.setattr(install, "UNIT_PATH", str(folder / "bagua-agent.service"))
        monkeypatch.setattr(install, "SLICE_PATH", str(folder / "bagua.slice"))

    def again(self, **more: Value) -> AgentConfig:
        install.install(str(self.config), {**self.wanted, **more}, print)
        return read_agent_config(str(self.config), utc_now())


@pytest.fixture
def installed(people: People, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    return Installed(people.files["node-1"], tmp_path, monkeypatch)


def test_a_node_with_the_list_refuses_what_is_in_it(installed: Installed, people: People) -> None:
    installed.list.write_bytes((people.folder / "revoked.pem").read_bytes())
    tls = installed.again().tls_files
    assert tls is not None and tls.revoked_file == str(installed.list)


def test_a_list_that_comes_later_does_not_keep_install_from_running_again(
    installed: Installed, people: People
) -> None:
    assert installed.again().tls_revoked_file == ""
    installed.list.write_bytes((people.folder / "revoked.pem").read_bytes())
    assert installed.again().tls_revoked_file == "", "an existing configuration is never overwritten"
    with pytest.raises(UserError, match="is there and says something else"):
        installed.again(**{"tls.revoked_file": str(installed.list)})


def test_check_notes_a_daemon_that_refuses_no_retired_certificate(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = installed.again()
    [note] = check_revocation(without)
    assert note.weight is Weight.NOTE
    assert "accepts a retired certificate until it expires; copy the authority's revoked.pem" in note.text
    [fine] = check_revocation(replace(without, tls_revoked_file="/etc/bagua/tls/revoked.pem"))
    assert fine.weight is Weight.FINE and "/etc/bagua/tls/revoked.pem" in fine.text
    plain = dict.fromkeys(("tls_ca_file", "tls_cert_file", "tls_key_file"), "")
    assert check_revocation(replace(without, **plain)) == []

    # bagua-agent check says it; the looks that ask etcd or start programs are not needed for it
    from bagua_agent.service.node import node_checks

    monkeypatch.setattr(node_checks, "_etcd", lambda config: fine)
    for look in ("check_accounts", "look_for_trouble"):
        monkeypatch.setattr(node_checks, look, lambda config: [])
    monkeypatch.setattr(node_checks, "_nccl", list)
    assert note in check_node(without, daemon_runs=True)
