"""--dashboard: an option whose value may be left out, so that the word behind it is the script."""

from __future__ import annotations

import pytest

from bagua_launch.ssh_hosts import SshHost, node_arguments
from bagua_launch.written_values import WrittenValue
from tests.launch.launcher import Launcher


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ((), None),
        (("--dashboard",), ""),
        (("--dashboard=yes",), ""),
        (("--dashboard=no",), None),
        (("--dashboard=8080",), "8080"),
        (("--dashboard=10.0.0.1:80",), "10.0.0.1:80"),
    ],
)
def test_the_word_behind_it_is_the_script(
    launch: Launcher, words: tuple[str, ...], where: str | None
) -> None:
    config = launch.config(*words, "train.py", "--dashboard=of-the-script")
    assert config.dashboard == where
    assert config.command.args == ("--dashboard=of-the-script",)


def test_it_can_be_a_variable(launch: Launcher) -> None:
    assert launch.config(env={"BAGUA_DASHBOARD": "8080"}).dashboard == "8080"
    assert launch.config(env={"BAGUA_DASHBOARD": "1"}).dashboard == ""


def test_what_is_no_address_is_refused(launch: Launcher) -> None:
    result = launch("--dashboard=h1", "train.py")
    assert result.exit_code == 2
    assert "neither a port nor HOST:PORT" in result.output


def test_a_host_of_several_gets_its_value_behind_the_equals_sign() -> None:
    values = {"dashboard": WrittenValue("yes", "--dashboard"), "role": WrittenValue("r", "--role")}
    words = node_arguments(
        SshHost("h1"), values, ["train.py"], nodes="1", endpoint="e:1", job_id="j", credentials={}
    )
    assert words[-4:] == ["--dashboard=yes", "--role", "r", "train.py"]


def test_a_commands_page_beyond_loopback_needs_certificates(launch: Launcher) -> None:
    words = ("dashboard", "--etcd", "127.0.0.1:1", "--listen")
    assert launch.refusal(*words, "10.0.0.5:80").startswith("--listen: 10.0.0.5:80 is beyond this host")
    assert "neither a port nor HOST:PORT" in launch.refusal(*words, "h1")
