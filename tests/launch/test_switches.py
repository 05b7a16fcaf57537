"""Switches that a variable or the file sets: 1, 0, yes, no, on and off mean the same in every place that reads them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bagua_agent.cluster_client import cluster_requests
from bagua_launch import bagua_net, cluster_commands
from bagua_launch.bagua_net import net_variables
from bagua_launch.options import RUN_OPTIONS
from bagua_launch.precedence import merge
from bagua_launch.ssh_hosts import SshHost, node_arguments, only_typed_on_hosts
from bagua_launch.written_values import WrittenValue
from tests.launch.launcher import Launcher

ON, OFF = ("1", "true", "yes", "on", "YES"), ("0", "false", "no", "off", "Off")


def words_of_a_host(values: dict[str, WrittenValue]) -> list[str]:
    return node_arguments(
        SshHost("h1"), values, ["train"], nodes="1", endpoint="e:1", job_id="j", credentials={}
    )


@pytest.mark.parametrize("written", ON)
def test_on_is_one_word_of_a_hosts_line(written: str) -> None:
    values = merge(
        RUN_OPTIONS, {}, {"PET_MODULE": written}, {"no_python": WrittenValue("off", "launch.toml: no-python")}
    )
    assert words_of_a_host(values)[6:] == ["--label-output", "--module", "train"]


@pytest.mark.parametrize("written", OFF)
def test_off_is_no_word_of_a_hosts_line(written: str) -> None:
    values = merge(RUN_OPTIONS, {}, {"BAGUA_LABEL_OUTPUT": written, "BAGUA_DETERMINISTIC": written}, {})
    assert words_of_a_host(values)[6:] == ["train"]  # and the labels that --hosts turns on are off


def test_a_host_does_not_turn_on_what_the_terminal_turned_off() -> None:
    options = [option for option in RUN_OPTIONS if option.key in ("deterministic", "module", "role")]
    file = {
        "deterministic": WrittenValue("true", "file"),
        "module": WrittenValue("true", "file"),
        "role": WrittenValue("r", "file"),
    }
    at_the_terminal = merge(options, {}, {"BAGUA_DETERMINISTIC": "0", "PET_MODULE": "1"}, file)
    on_a_host = merge(options, {"module": True}, {}, file, only_typed_on_hosts(at_the_terminal))
    assert {key: said.text for key, said in on_a_host.items()} == {"module": "true", "role": "r"}


@pytest.mark.parametrize("word", ["true", "false"])
def test_an_options_value_may_look_like_a_switchs(word: str) -> None:
    assert words_of_a_host({"role": WrittenValue(word, "--role")})[-3:] == ["--role", word, "train"]


def test_bagua_net_is_on_only_where_the_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bagua_net, "PATH_COMMAND", (sys.executable, "-c", "print('/plugin.so')"))
    for written in OFF:
        assert net_variables(merge(RUN_OPTIONS, {}, {"BAGUA_ENABLE_BAGUA_NET": written}, {})) == {}
    on = merge(RUN_OPTIONS, {}, {"BAGUA_ENABLE_BAGUA_NET": "on"}, {})
    assert net_variables(on) == {"NCCL_NET_PLUGIN": "/plugin.so", "NCCL_NET_PLUGIN_REF_COUNT": "1"}


@pytest.mark.parametrize(("line", "code"), [("false", 0), ('"0"', 0), ("true", 9), ('"on"', 9)])
def test_submit_follows_where_the_file_says_so(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch, line: str, code: int
) -> None:
    @contextmanager
    def store(values: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(cluster_commands, "_store", store)
    monkeypatch.setattr(cluster_requests, "submit", lambda store, submission: None)
    monkeypatch.setattr(cluster_commands, "_follow", lambda store, job_id, as_json: 9)
    path = launch.directory / "launch.toml"
    path.write_text(f"follow = {line}\n")
    assert launch("submit", "train.py", env={"BAGUA_CONFIG": str(path)}).exit_code == code


def test_off_in_a_variable_is_stronger_than_on_in_the_file(launch: Launcher) -> None:
    path = launch.directory / "launch.toml"
    path.write_text("virtual-local-rank = true\nmodule = true\n")
    env = {"BAGUA_CONFIG": str(path), "PET_VIRTUAL_LOCAL_RANK": "off", "PET_MODULE": "0"}
    config = launch.config(env=env)
    assert not config.virtual_local_rank
    assert launch.config("--virtual-local-rank", env=env).virtual_local_rank


@pytest.mark.parametrize("variable", ["BAGUA_ENABLE_BAGUA_NET", "PET_STANDALONE"])
def test_what_is_neither_on_nor_off_is_refused(launch: Launcher, variable: str) -> None:
    for words in ((), ("--hosts", "h1")):
        line = launch.refusal(*words, "train.py", env={variable: "maybe"})
        assert line == f"{variable} 'maybe': neither yes nor no; use 1 or 0"
