"""The address of a terminal that starts hosts over ssh: names of ssh's own configuration are no names to DNS."""

from __future__ import annotations

import pytest

from bagua_agent.node.local_address import local_address
from bagua_launch.ssh_hosts import SshHost
from bagua_launch.ssh_run import terminal_address


def test_the_first_name_that_is_known_counts(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = [SshHost("me@gpu-1.invalid"), SshHost("me@127.0.0.1")]
    assert terminal_address(None, hosts) == "127.0.0.1"
    assert terminal_address("127.0.0.5", hosts) == "127.0.0.5"
    assert capsys.readouterr().err == ""


def test_without_any_it_is_the_address_of_the_default_route_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    address = terminal_address(None, [SshHost("gpu-1.invalid"), SshHost("gpu-2.invalid")])
    assert address == local_address(None, None, single_node=False)
    said = capsys.readouterr().err
    assert f"connect to this one at {address}" in said and "--local-addr" in said
