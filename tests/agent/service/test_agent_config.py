"""The accepted content of the daemon's file, and the error for each mistake."""

from __future__ import annotations

import os
import pwd
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bagua_agent.base.errors import UserError
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.security.certificate_files import utc_now
from bagua_agent.security.certificates import CertificateRefused
from bagua_agent.service.config import agent_config
from bagua_agent.service.config.agent_config import AgentConfig, check, read_agent_config
from bagua_agent.service.config.agent_config_keys import KEYS, example_config, single_machine
from bagua_agent.service.main import cli
from tests.agent.service.conftest import People

WHERE = "/etc/bagua/agent.toml"
TLS_FILES = {"ca_file": "/t/ca.pem", "cert_file": "/t/certificate.pem", "key_file": "/t/key.pem"}
LOCAL: dict[str, Any] = {"etcd": {"endpoints": ["127.0.0.1:2379"]}}
SAFE: dict[str, Any] = {"etcd": {"endpoints": ["etcd-1:2379"], **TLS_FILES}, "tls": TLS_FILES}


def checked(content: dict[str, Any], host_name: str = "h1") -> AgentConfig:
    return check(content, WHERE, host_name)


def complaint(content: dict[str, Any], host_name: str = "h1") -> str:
    with pytest.raises(UserError) as caught:
        checked(content, host_name)
    line = str(caught.value)
    assert line.startswith(f"{WHERE}: ") and "\n" not in line
    return line.removeprefix(f"{WHERE}: ")


def local(section: str, **keys: Any) -> dict[str, Any]:
    return {**LOCAL, section: {**LOCAL.get(section, {}), **keys}}


def safe(section: str, **keys: Any) -> dict[str, Any]:
    return {**SAFE, section: {**SAFE.get(section, {}), **keys}}


def test_defaults() -> None:
    config = checked(LOCAL)
    assert config.node_name == "h1"
    assert config.node_slots == "gpu"
    assert config.tls_files is None
    assert config.times_kill_grace_s == ClusterPolicy().kill_grace_s
    assert not config.insecure
    for key in KEYS:
        if key.default is not None and key.path != "node.name":
            assert getattr(config, key.field) == key.default, key.path


def test_defaults_are_values_that_could_be_written() -> None:
    for key in KEYS:
        for value in (key.default, key.example):
            if value is not None:
                assert key.read(list(value) if isinstance(value, tuple) else value) == value


def test_the_example_can_be_used_and_names_every_key() -> None:
    text = example_config()
    config = checked(tomllib.loads(text))
    assert config.tls_files is not None and config.store_credentials.cert_file == config.tls_cert_file
    everything = "\n".join(_without_comment(line) for line in text.splitlines())
    said = tomllib.loads(everything)
    paths = {
        name if not isinstance(value, dict) else f"{name}.{key}"
        for name, value in said.items()
        for key in (value if isinstance(value, dict) else [""])
    }
    assert paths == {key.path for key in KEYS}
    assert checked(said) == config
    assert all(len(line) <= 120 for line in text.splitlines())


def _without_comment(line: str) -> str:
    """`# key = value` as `key = value`; sentences stay comments."""
    bare = line.removeprefix("# ")
    is_key = bare.partition(" = ")[0] in {key.name for key in KEYS}
    return bare if is_key else line


def test_everything_can_be_said() -> None:
    config = checked(
        {
            "insecure": True,
            "etcd": {
                "endpoints": ["10.0.0.1:2379", "unix:/run/etcd:1"],
                "user": "h",
                "password_file": "/etc/p",
            },
            "node": {"name": "node-1", "slots": 4, "labels": {"rack": "r1"}},
            "listen": {"address": "10.0.0.5", "port": 7000},
            "jobs": {"default_user": "train", "users": ["ann", "root"], "environment": ["WANDB_*", "A*_B"]},
            "directories": {"state": "/s", "log": "/l"},
            "times": {"node_lease_s": 3, "kill_grace_s": 0},
        }
    )
    assert config.etcd_endpoints == ("10.0.0.1:2379", "unix:/run/etcd:1")
    assert (config.node_slots, config.node_labels) == (4, {"rack": "r1"})
    assert config.store_credentials.user == "h"
    assert config.times_node_lease_s == 3.0


def test_who_may_run_and_what_may_be_set() -> None:
    config = checked(local("jobs", users=["ann"], environment=["NCCL_*", "A*Z", "PATH"]))
    assert [config.may_run_as(name) for name in ("bagua", "ann", "root", "bob", "")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    allowed = ("NCCL_DEBUG", "NCCL_", "AZ", "A_B_Z", "PATH")
    refused = ("NCCL", "XNCCL_A", "AZ2", "PATHS", "PATH\n", "path", "LD_PRELOAD")
    assert all(config.may_set(name) for name in allowed)
    assert not any(config.may_set(name) for name in refused)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"etcd": {"endpoint": ["a:1"]}}, "etcd.endpoint ['a:1']: there is no such key; use etcd.endpoints"),
        ({**LOCAL, "port": 7}, "port 7: there is no such key; use listen.port"),
        ({**LOCAL, "nodes": {"name": "x"}}, "nodes {'name': 'x'}: there is no such key; use"),
        ({**LOCAL, "node": "x"}, "node 'x' is not a section; write [node] with its keys below"),
        ({}, "etcd.endpoints is missing; write it"),
        ({"etcd": {"endpoints": []}}, "etcd.endpoints [] is empty; name at least one"),
        ({"etcd": {"endpoints": "a:1"}}, "etcd.endpoints 'a:1': not a list; use texts in brackets"),
        ({"etcd": {"endpoints": [1]}}, "etcd.endpoints [1]: not a text"),
        ({"etcd": {"endpoints": ["a:b"]}}, "etcd.endpoints: etcd endpoint 'a:b' cannot be read"),
        ({"etcd": {"endpoints": ["a:1,b:1"]}}, "etcd.endpoints: etcd endpoint 'a:1,b:1' cannot be read"),
        ({**LOCAL, "insecure": "yes"}, "insecure 'yes': neither true nor false; use true or false, without quotes"),
        ({**LOCAL, "insecure": 1}, "insecure 1: neither true nor false"),
        (local("node", slots=0), "node.slots 0: no number of slots; use a number from 1"),
        (local("node", slots=True), "node.slots True: no number of slots"),
        (local("node", slots="tpu"), "node.slots 'tpu': no number of slots"),
        (local("node", slots=1.5), "node.slots 1.5: no number of slots"),
        (local("node", name="a/b"), "node.name 'a/b': no name of a node"),
        (local("node", name=".."), "node.name '..': no name of a node"),
        (local("node", labels={"rack": 1}), "node.labels {'rack': 1}: 'rack' is no label"),
        (local("node", labels=["rack"]), "node.labels ['rack']: not a table"),
        (local("listen", port=0), "listen.port 0: not a port; use a number from 1 to 65535"),
        (local("listen", port=True), "listen.port True: not a port"),
        (local("listen", port="7461"), "listen.port '7461': not a port"),
        (local("listen", address="0.0.0.0"), "listen.address '0.0.0.0': no address that others can call"),
        (local("listen", address="::"), "listen.address '::': no address that others can call"),
        (local("listen", address="h1:7461"), "listen.address 'h1:7461': no host name or address"),
        (local("etcd", ca_file="tls/ca.pem"), "etcd.ca_file 'tls/ca.pem': not an absolute path"),
        (local("tls", key_file="/t/../key.pem"), "tls.key_file '/t/../key.pem': not an absolute path"),
        (local("directories", state="var"), "directories.state 'var': not an absolute path"),
        (local("directories", log=""), "directories.log '' is empty; name a directory"),
        (local("jobs", default_user="root"), "jobs.default_user 'root': every job that names no user would run as"),
        (local("jobs", default_user=""), "jobs.default_user '': no name of an account"),
        (local("jobs", users=["0"]), "jobs.users ['0']: no name of an account"),
        (local("jobs", users="ann"), "jobs.users 'ann': not a list"),
        (local("jobs", environment=["*"]), "jobs.environment ['*']: '*' allows every variable"),
        (local("jobs", environment=["**"]), "jobs.environment ['**']: '**' allows every variable"),
        (local("jobs", environment=["A-B"]), "jobs.environment ['A-B']: 'A-B' is no name of a variable"),
        (local("jobs", environment=["A=1"]), "jobs.environment ['A=1']: 'A=1' is no name of a variable"),
        (local("jobs", otel="collector:4318"), "jobs.otel 'collector:4318': no URL of a collector; use one such as"),
        (local("jobs", otel="http://c:99999"), "jobs.otel 'http://c:99999': no URL of a collector"),
        (local("jobs", otel=4318), "jobs.otel 4318: not a text"),
        (local("jobs", metrics="yes"), "jobs.metrics 'yes': neither true nor false"),
        (local("jobs", metrics=True), "jobs.metrics True is of no use without dashboard.listen; give both"),
        (local("jobs", memory_max="110%"), "jobs.memory_max '110%': no amount of memory; use one such as"),
        (local("jobs", memory_max="64G\nX"), "jobs.memory_max '64G\\nX': a text with control characters"),
        (local("jobs", memory_max=64), "jobs.memory_max 64: not a text"),
        (local("times", node_lease_s=1), "times.node_lease_s 1: no such time; use 2 to 3600 seconds"),
        (local("times", node_lease_s="5"), "times.node_lease_s '5': not a number"),
        (local("times", kill_grace_s=float("nan")), "times.kill_grace_s nan: no such time"),
        (local("times", kill_grace_s=True), "times.kill_grace_s True: not a number"),
        (local("etcd", cert_file="/c"), "etcd.cert_file '/c' is of no use without etcd.key_file; give both"),
        (local("etcd", key_file="/k"), "etcd.key_file '/k' is of no use without etcd.cert_file; give both"),
        (local("etcd", user="u"), "etcd.user 'u' is of no use without etcd.password_file; give both"),
        (local("tls", cert_file="/c", key_file="/k"), "tls.cert_file '/c' is of no use without tls.ca_file; give both"),
        (local("tls", revoked_file="/r"), "tls.revoked_file '/r' is of no use without tls.cert_file; give both"),
        (local("tls", ca_file="/c"), "tls.ca_file '/c' is of no use without tls.cert_file; give both"),
        (local("node", name="a\x00b"), r"node.name 'a\x00b': a text with control characters"),
    ],
)  # fmt: skip
def test_each_mistake_gets_one_line_with_key_value_and_next_move(content: dict[str, Any], line: str) -> None:
    said = complaint(content)
    assert said.startswith(line)
    assert ";" in said  # the next move


def test_a_host_name_that_is_no_node_name_is_said() -> None:
    assert complaint(LOCAL, host_name="ä").startswith("node.name is not given, and host name 'ä'")


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:2379", "127.8.0.1", "localhost:1", "[::1]:2379", "unix:/run/e:1", "http://localhost"],
)
def test_loopback_needs_no_certificates(endpoint: str) -> None:
    assert checked({"etcd": {"endpoints": [endpoint]}}).tls_files is None


@pytest.mark.parametrize(
    "endpoint", ["etcd-1:2379", "http://10.0.0.1:2379", "[fd00::1]:2379", "0.0.0.0:1", "localhost.evil.org"]
)
def test_a_plain_endpoint_beyond_this_host_needs_words(endpoint: str) -> None:
    content = {"etcd": {"endpoints": ["127.0.0.1:1", endpoint]}}
    assert "is plain and beyond this host" in complaint(content)
    assert "say insecure = true" in complaint(content)
    assert checked({**content, "insecure": True}).insecure


def test_tls_without_showing_who_one_is_needs_words() -> None:
    content = {"etcd": {"endpoints": ["https://etcd-1"], "ca_file": "/ca.pem"}, "tls": TLS_FILES}
    assert "lets every client in if it asks for no certificate" in complaint(content)
    assert checked({**content, "insecure": True})
    with_password = {**content["etcd"], "user": "u", "password_file": "/p"}
    assert checked({**content, "etcd": with_password})


def test_a_plain_endpoint_beside_certificates_is_a_mistake_whatever_the_words() -> None:
    for insecure in (True, False):
        assert "certificates are given; write https://" in complaint(
            {**safe("etcd", endpoints=["http://etcd-1:2379"]), "insecure": insecure}
        )


@pytest.mark.parametrize("listen", [{}, {"address": "10.0.0.5"}, {"address": "node-1"}])
def test_a_daemon_without_tls_beyond_this_host_needs_words(listen: dict[str, str]) -> None:
    content = {"etcd": SAFE["etcd"], "listen": listen}
    assert "beyond this host, and any caller of the daemon runs programs here" in complaint(content)
    assert checked({**content, "insecure": True})
    assert checked({**content, "tls": TLS_FILES})
    assert checked({**content, "listen": {"address": "127.0.0.1"}})


def test_a_page_without_tls_beyond_this_host_needs_words() -> None:
    content = {"etcd": {"endpoints": ["127.0.0.1:1"]}, "dashboard": {"listen": "10.0.0.5:7465"}}
    assert "dashboard.listen '10.0.0.5:7465' is beyond this host" in complaint(content)
    assert "give tls.ca_file, tls.cert_file and tls.key_file" in complaint(content)
    for better in ({"insecure": True}, {"tls": TLS_FILES}, {"dashboard": {"listen": "7465"}}):
        assert checked({**content, **better}).dashboard_listen
        assert checked({**content, **better, "jobs": {"metrics": True}}).jobs_metrics, "under the same rules"


def test_without_an_address_the_daemon_is_where_etcd_is() -> None:
    etcd = {**SAFE["etcd"], "endpoints": ["localhost:2379", "etcd-1:2379"]}
    assert "listen.address is not given, so the daemon listens beyond" in complaint({"etcd": etcd})
    assert checked({"etcd": {**etcd, "endpoints": ["localhost:2379"]}})


# ---- the file


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    path.chmod(0o644)
    return str(path)


def with_certificates(tmp_path: Path, people: People, name: str) -> str:
    files = people.trusting_us(name)
    keys = f'ca_file = "{files.ca_file}"\ncert_file = "{files.cert_file}"\nkey_file = "{files.key_file}"\n'
    return written(tmp_path, f'[etcd]\nendpoints = ["etcd-1"]\n{keys}[tls]\n{keys}')


def test_a_good_file_is_read(tmp_path: Path, people: People) -> None:
    config = read_agent_config(with_certificates(tmp_path, people, "node-1"), utc_now())
    assert config.tls_files is not None and config.tls_files.key_file == people.files["node-1"].key_file


def test_a_collector_needs_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[etcd]\nendpoints = ["127.0.0.1:1"]\n[jobs]\notel = "https://c:4318/otlp"\n'
    monkeypatch.setattr(agent_config, "OTEL_MODULES", ("json", "http.client"))
    assert read_agent_config(written(tmp_path, text), utc_now()).jobs_otel == "https://c:4318/otlp"
    for missing in ("no_such_module", "no_such_module.below"):
        monkeypatch.setattr(agent_config, "OTEL_MODULES", ("json", missing))
        with pytest.raises(
            UserError, match=r"agent\.toml: jobs\.otel .*pip install 'bagua-elastic\[otel\]', or leave"
        ):
            read_agent_config(written(tmp_path, text), utc_now())


@pytest.mark.parametrize("name", ["expired", "future", "stranger"])
def test_certificates_that_do_not_hold_are_named(tmp_path: Path, people: People, name: str) -> None:
    with pytest.raises(
        UserError, match=f"agent.toml: (etcd|tls): .*{name}/certificate.pem.*'{name}'"
    ) as caught:
        read_agent_config(with_certificates(tmp_path, people, name), utc_now())
    assert isinstance(caught.value.__cause__, CertificateRefused)


def test_a_certificate_that_expires_is_refused_from_then_on(tmp_path: Path, people: People) -> None:
    path = with_certificates(tmp_path, people, "node-1")
    with pytest.raises(UserError, match="'node-1' expired on"):
        read_agent_config(path, utc_now() + timedelta(days=400))


@pytest.mark.parametrize("which", ["key", "password"])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, people: People, which: str) -> None:
    secret = tmp_path / which
    secret.write_bytes(Path(people.files["node-1"].key_file).read_bytes())
    secret.chmod(0o644)
    certificate = people.files["node-1"].cert_file
    keys = {
        "key": f'cert_file = "{certificate}"\nkey_file = "{secret}"',
        "password": f'user = "u"\npassword_file = "{secret}"',
    }[which]
    path = written(tmp_path, f'[etcd]\nendpoints = ["127.0.0.1"]\n{keys}\n')
    with pytest.raises(
        UserError, match=rf"etcd: .*{secret}': others may use it \(mode 0644\); chmod 600 {secret}"
    ):
        read_agent_config(path, utc_now())
    secret.chmod(0o600)
    read_agent_config(path, utc_now())


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, '[etcd]\nendpoints = ["127.0.0.1"]\n')
    for mode in (0o664, 0o646):
        os.chmod(path, mode)
        with pytest.raises(UserError, match=rf"can be written by others \(mode {mode:04o}\).*chmod 644 it"):
            read_agent_config(path, utc_now())
    os.chmod(path, 0o600)
    assert read_agent_config(path, utc_now()).etcd_endpoints == ("127.0.0.1",)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_account_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, '[etcd]\nendpoints = ["127.0.0.1"]\n')
    os.chown(path, 12345, -1)
    with pytest.raises(UserError, match=r"belongs to user 12345.*chown root it"):
        read_agent_config(path, utc_now())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("port: 7461", "write TOML such as"),
        ("a = 1\na = 2", "write TOML such as"),
        ("[etcd]\nendpoints = ['h\\n", "write TOML such as"),
    ],
)
def test_what_is_no_toml_is_said(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        read_agent_config(written(tmp_path, text), utc_now())
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"nowhere.toml' can't be read: No such file or directory; name a readable"
    ):
        read_agent_config(str(tmp_path / "nowhere.toml"), utc_now())


@pytest.mark.parametrize("account", ["ann", "root"])
def test_the_file_of_a_single_machine_is_used_as_printed(account: str) -> None:
    text = example_config(single_machine(account, "/home/ann"))
    config = check(tomllib.loads(text), "agent.toml", "h1")
    assert config.etcd_endpoints == ("127.0.0.1:2379",)
    assert config.directories_state == "/home/ann/.bagua/state"
    assert config.may_run_as(account) and config.tls_files is None


@pytest.mark.parametrize("account", ["ann", "root"])
def test_root_learns_how_its_jobs_are_submitted(account: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = pwd.struct_passwd((account, "x", 1000, 1000, "", "/home/ann", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: entry)
    done = CliRunner().invoke(cli, ["example-config", "--single-machine"])
    assert done.exit_code == 0 and tomllib.loads(done.stdout)
    assert ("--user root" in done.stderr) == (account == "root")
