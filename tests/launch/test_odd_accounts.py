"""Commands for accounts without a name, and with texts that are not UTF-8: done, or refused with one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.service.main import cli as bagua_agent_cli
from bagua_agent.workers.process.account import find_account
from bagua_contract import cluster_pb2 as pb
from tests.launch.launcher import Launcher

NOT_UTF8 = os.fsdecode(b"caf\xe9")
NAMELESS = {name: None for name in ("LOGNAME", "USER", "LNAME", "USERNAME")}
UID = 54_321_987


@pytest.fixture
def store(etcd: EmbeddedEtcd) -> Iterator[Store]:
    client = Store(store_config([etcd.endpoint], StoreCredentials()))
    client.delete_prefix("/")
    yield client
    client.close()


@pytest.fixture
def nameless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An account of a container, that is in no passwd file; pytest has named its directories before."""
    for name in NAMELESS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: UID)
    monkeypatch.setattr(os, "geteuid", lambda: UID)


def submitter(store: Store, job_id: str) -> str:
    found = store.get(cluster_keys.submission(job_id))
    assert found is not None
    return str(pb.Submission.FromString(found.value).submitter)


@pytest.mark.usefixtures("nameless")
def test_an_account_without_a_name_submits_by_its_number(launch: Launcher, store: Store) -> None:
    done = launch("submit", "--name", "demo", "train.py", env={"BAGUA_ETCD": store.endpoint})
    assert (done.exit_code, done.output) == (0, "demo\n")
    assert submitter(store, "demo").startswith(f"uid {UID}@")


@pytest.mark.usefixtures("nameless")
def test_an_account_without_a_name_traces(launch: Launcher, store: Store) -> None:
    said = launch.refusal("trace", "demo", env={"BAGUA_ETCD": store.endpoint})
    assert said.startswith("no job 'demo' in this etcd")


def test_an_account_that_may_not_write_a_trace_is_refused_before_the_job_records(
    launch: Launcher, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    said = launch.refusal("trace", "demo", env={"BAGUA_ETCD": store.endpoint})
    assert said.startswith("can't write demo.trace.json: permission denied")


def test_a_name_that_is_not_utf8_is_shown_escaped(launch: Launcher, store: Store) -> None:
    env = {"BAGUA_ETCD": store.endpoint, "LOGNAME": NOT_UTF8}
    done = launch("submit", "--name", "demo", "train.py", env=env)
    assert done.exit_code == 0, done.exception
    assert submitter(store, "demo").startswith("caf\\udce9@")
    assert launch.refusal("trace", "other", env=env).startswith("no job 'other' in this etcd")


def test_what_etcd_can_not_hold_is_refused_with_one_line(
    launch: Launcher, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"BAGUA_ETCD": store.endpoint, "BAD": NOT_UTF8}
    for words in (("train.py", NOT_UTF8), ("--env", "BAD", "train.py")):
        assert "not UTF-8" in launch.refusal("submit", *words, env=env), words
    store.put(cluster_keys.node("n0"), pb.Node(protocol=1, node_name="n0", slots=1).SerializeToString())
    assert launch("drain", "n0", "--reason", NOT_UTF8, env=env).exit_code == 0, (
        "a reason is for people, so it is escaped"
    )
    odd = launch.directory / NOT_UTF8
    odd.mkdir()
    (odd / "train.py").touch()
    monkeypatch.chdir(odd)
    assert "not UTF-8" in launch.refusal("submit", "train.py", env=env)


def test_options_of_a_submission_that_are_not_utf8_are_refused_with_one_line(
    launch: Launcher, store: Store
) -> None:
    env = {"BAGUA_ETCD": store.endpoint}
    for option in ("--user", "--role", "--checkpoint-dir", "--env"):
        said = launch.refusal("submit", option, f"A={NOT_UTF8}", "train.py", env=env)
        assert said == f"{option} 'A=caf\\udce9' is not UTF-8; submit with another"
    by_variable = launch.refusal("submit", "train.py", env={**env, "PET_ROLE": NOT_UTF8})
    assert by_variable == "PET_ROLE 'caf\\udce9' is not UTF-8; submit with another"


def test_a_file_that_only_the_terminal_reads_may_have_any_name(launch: Launcher, store: Store) -> None:
    password = launch.directory / NOT_UTF8
    password.write_text("x")
    password.chmod(0o600)
    credentials = ("--etcd-user", "ann", "--etcd-password-file", str(password))
    done = launch("submit", "--name", "demo", *credentials, "train.py", env={"BAGUA_ETCD": store.endpoint})
    assert (done.exit_code, done.output) == (0, "demo\n"), done.stderr


@pytest.mark.usefixtures("nameless")
def test_an_agent_of_an_account_without_a_name_refuses_others() -> None:
    with pytest.raises(UserError, match=f"this agent runs as 'uid {UID}', and only root can change users"):
        find_account("root")


@pytest.mark.usefixtures("nameless")
def test_an_account_without_a_name_gets_no_configuration_of_its_own() -> None:
    with pytest.raises(UserError, match=f"uid {UID} has no name on this machine"):
        bagua_agent_cli.main(["example-config", "--single-machine"], standalone_mode=False)
