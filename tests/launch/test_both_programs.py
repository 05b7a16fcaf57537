"""bagua-launch and bagua-agent name each other's commands, and spell the etcd's options alike."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from bagua_agent.security.certificate_command import certs
from bagua_agent.service.main import OF_LAUNCH
from bagua_agent.service.main import cli as agent_cli
from bagua_launch.input_files import OF_AGENT
from bagua_launch.main import cli as launch_cli
from tests.launch.launcher import Launcher


def names_of(group: click.Command) -> set[str]:
    assert isinstance(group, click.Group)
    return set(group.commands)


def test_each_program_knows_the_others_commands() -> None:
    assert set(OF_LAUNCH) == names_of(launch_cli) - names_of(agent_cli)
    assert set(OF_AGENT) == names_of(agent_cli) - names_of(launch_cli)


@pytest.mark.parametrize("word", OF_AGENT)
def test_a_command_of_the_agent_is_no_missing_script(launch: Launcher, word: str) -> None:
    assert f"use bagua-agent {word}" in launch.refusal(word)


@pytest.mark.parametrize("word", sorted(OF_LAUNCH))
def test_a_command_of_the_launcher_is_named(word: str) -> None:
    done = CliRunner().invoke(agent_cli, [word])
    assert done.exit_code == 2 and f"use bagua-launch {word}" in done.output


@pytest.mark.parametrize(
    ("command", "alike"),
    [
        (
            agent_cli.commands["install"],
            {"etcd": ("--etcd", "--rdzv-endpoint"), "ca_file": ("--ca-file", "--etcd-ca")},
        ),
        (
            agent_cli.commands["install"],
            {"cert_file": ("--cert-file", "--etcd-cert"), "key_file": ("--key-file", "--etcd-key")},
        ),
        (certs.commands["etcd-users"], {"endpoints": ("--etcd", "--rdzv-endpoint", "--endpoints")}),
    ],
)
def test_the_agents_commands_take_the_launchers_spellings(
    command: click.Command, alike: dict[str, tuple[str, ...]]
) -> None:
    found = {parameter.name: parameter.opts for parameter in command.params}
    for name, spellings in alike.items():
        assert set(spellings) <= set(found[name])


ENDPOINT_NAMES = {"--etcd", "--rdzv-endpoint"}


@pytest.mark.parametrize("name", [*sorted(names_of(launch_cli)), "agent install"])
def test_help_shows_how_the_endpoints_of_etcd_are_given(name: str) -> None:
    group, command = (agent_cli, "install") if name == "agent install" else (launch_cli, name)
    assert isinstance(group, click.Group)
    params = group.commands[command].params
    found = [p for p in params if isinstance(p, click.Option) and ENDPOINT_NAMES & set(p.opts)]
    for option in found:
        shown = option.help or ""
        assert "HOST:PORT or https://HOST:PORT[,...]" in shown
        assert group is agent_cli or "BAGUA_ETCD" in shown
    assert found
