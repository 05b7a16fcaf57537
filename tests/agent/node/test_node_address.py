"""A node's own address, of what the job's configuration says of the store."""

from __future__ import annotations

import socket

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import CommandKind, JobConfig, WorkerCommand
from bagua_agent.node import local_address as local_address_module
from bagua_agent.node.local_address import UnknownStoreName, local_address
from bagua_agent.node.node_address import address_towards, node_address

UNKNOWN = "no-such-host.invalid:2379"


def config(*endpoints: str, max_nodes: int = 2) -> JobConfig:
    command = WorkerCommand(CommandKind.SCRIPT, "train.py")
    return JobConfig("job", command, max_nodes=max_nodes, endpoints=endpoints or None)


def test_the_first_endpoint_whose_name_is_known_counts() -> None:
    assert node_address(config(UNKNOWN, "127.0.0.1:2379")) == "127.0.0.1"


def test_a_loopback_address_is_the_last_choice_where_others_must_reach_this_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_address_module, "_source_towards", lambda to: to[0])
    endpoints = ("127.0.0.1:2379", UNKNOWN, "192.0.2.7:2379", "192.0.2.8:2379")
    assert address_towards(None, endpoints, single_node=False) == "192.0.2.7"
    assert address_towards(None, endpoints, single_node=True) == "127.0.0.1"
    assert address_towards(None, endpoints[:2], single_node=False) == "127.0.0.1"
    assert address_towards("127.0.0.5", endpoints, single_node=False) == "127.0.0.5"


@pytest.mark.parametrize("found", [{"eth0": ["10.1.0.5"], "ib0": ["10.2.0.5"]}, {"docker0": ["172.17.0.1"]}])
def test_routes_to_the_other_endpoints_come_before_what_the_interfaces_have(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, list[str]]
) -> None:
    """A cluster without a default route, in which /etc/hosts gives a host's own name a loopback address."""
    hosts = {"node-1": "127.0.1.1", "node-2": "10.1.0.6"}
    routes = {"127.0.1.1": "127.0.0.1", "10.1.0.6": "10.1.0.5", "2001:db8::1": "fd12::5"}

    def resolved(host: str, *args: object, **named: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (hosts[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(local_address_module, "_source_towards", lambda to: routes.get(to[0]))
    monkeypatch.setattr(local_address_module, "interface_addresses", lambda: found)
    assert address_towards(None, ["node-1:2379", "node-2:2379"], single_node=False) == "10.1.0.5"
    del routes["2001:db8::1"]
    assert address_towards(None, ["node-1:2379", "node-2:2379"], single_node=False) == "10.1.0.5"
    assert address_towards(None, ["node-1:2379"], single_node=True) == "127.0.0.1"
    if len(found) > 1:
        with pytest.raises(UserError, match="several addresses"):
            address_towards(None, ["node-1:2379"], single_node=False)


def test_a_job_of_one_node_on_a_shared_etcd_may_be_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_address_module, "_source_towards", lambda to: to[0])
    one = config("127.0.0.1:2379", "192.0.2.7:2379", max_nodes=1)
    assert node_address(one) == "192.0.2.7"
    assert node_address(one, hosts_store=True) == "127.0.0.1"
    assert node_address(config(max_nodes=1)) == "127.0.0.1"


def test_no_known_name_is_an_error_but_on_the_node_that_hosts_the_store() -> None:
    with pytest.raises(UnknownStoreName, match="no-such-host"):
        node_address(config(UNKNOWN))
    assert node_address(config(UNKNOWN), hosts_store=True) == local_address(None, None, False)


def test_without_endpoints_it_is_the_address_of_the_default_route() -> None:
    assert node_address(config()) == local_address(None, None, False)
