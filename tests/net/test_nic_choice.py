"""Which addresses Bagua-Net uses: NCCL's variables, IPv6, link-local addresses, several NICs; and the traffic class."""

from __future__ import annotations

import ctypes
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path

import pytest

from bagua_core.net import build
from benchmarks.net_driver.pair import connect
from benchmarks.net_driver.process import CallFailedError, Driver
from tests.lab import namespaces
from tests.lab.fixtures import MakeLab
from tests.lab.network import Host, Lab
from tests.lab.wait import HANG_S
from tests.net.conftest import MakeDriver
from tests.net.exchange import WAIT_S, begin, close, established, move
from tests.net.fuzzing import HANDLE

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

MAKE_V_DEVICE = 19  # its place in the tables, see nccl_net.h
LISTS = {
    "eth": {"eth0", "eth1"},
    "=eth0": {"eth0"},
    "=eth": set(),
    "^docker": {"eth0", "eth1", "lo"},
    "^=lo": {"eth0", "eth1", "docker0"},
    "eth1,docker": {"eth1", "docker0"},
    "^eth0,lo": {"eth1", "docker0"},
    "^=eth,lo": {"eth0", "eth1", "docker0"},
    "eth0:1234": {"eth0"},
    "": {"eth0", "eth1"},
}


def a_driver(make_driver: MakeDriver, host: Host | None = None, **env: str) -> Driver:
    driver = make_driver("plugin", host=host, words=[build.library(), "12"], **env)
    begin(driver)
    return driver


def names(driver: Driver) -> set[str]:
    count = int(driver.ask("devices")[0])
    return {driver.ask(f"properties {device}")[0].removeprefix("name=") for device in range(count)}


def more_interfaces(lab: Lab) -> None:
    """eth1 on each host, joined by the switch; and docker0, which leads nowhere. Returns when all run."""
    for host in lab.hosts:
        port = f"q{host.number}"
        lines = [
            f"link add {port} type veth peer name eth1 netns {host.namespace}",
            f"link set {port} master br0 up",
        ]
        namespaces.ip_batch(lab.switch, lines)
        added = [
            "link set eth1 addrgenmode none",
            f"addr add 10.78.0.{host.number}/24 dev eth1",
            "link set eth1 up",
        ]
        added += ["link add docker0 type veth peer name unused", "link set docker0 addrgenmode none"]
        added += ["addr add 172.17.0.1/16 dev docker0", "link set docker0 up", "link set unused up"]
        added += [
            f"addr add fd77::{host.number}/64 dev eth0 nodad",
            f"addr add fe80::{host.number}/64 dev eth0 nodad",
        ]
        namespaces.ip_batch(host.namespace, added)
    deadline_s = time.monotonic() + WAIT_S
    while any("state UP" not in line for host in lab.hosts for line in links(host)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def links(host: Host) -> list[str]:
    """What `ip` says of each interface of a host but lo, one a line."""
    command = ["ip", "-o", "-n", host.namespace, "link", "show", "type", "veth"]
    return subprocess.check_output(command, text=True, timeout=HANG_S).splitlines()


def address(driver: Driver, device: int = 0) -> tuple[bytearray, str]:
    """A listener's handle, and the host in it."""
    handle = bytearray.fromhex(driver.ask(f"listen l{device} {device}")[0])
    family = HANDLE.unpack_from(handle)[4]
    size = 4 if family == socket.AF_INET else 16
    return handle, socket.inet_ntop(family, handle[HANDLE.size + 2 :][:size])


def test_socket_ifname_is_read_as_nccl_reads_it(make_driver: MakeDriver, make_lab: MakeLab) -> None:
    lab = make_lab(1)
    more_interfaces(lab)
    for given, wanted in LISTS.items():
        env = {"NCCL_SOCKET_IFNAME": given, "NCCL_SOCKET_FAMILY": "AF_INET"}
        if wanted:
            assert names(a_driver(make_driver, lab.hosts[0], **env)) == wanted, given
        else:
            driver = make_driver("plugin", host=lab.hosts[0], words=[build.library(), "12"], **env)
            with pytest.raises(CallFailedError, match="failed 2"):
                driver.ask("init")


@pytest.mark.long
def test_socket_ifname_chooses_what_nccls_own_sockets_choose(
    make_driver: MakeDriver, make_lab: MakeLab
) -> None:
    lab = make_lab(1)
    more_interfaces(lab)
    for given, wanted in LISTS.items():
        if wanted:
            env = {"NCCL_SOCKET_IFNAME": given, "NCCL_SOCKET_FAMILY": "AF_INET"}
            driver = make_driver(host=lab.hosts[0], **env)
            begin(driver)
            assert names(driver) == wanted, given


def test_families_and_link_local_addresses_carry_messages(make_driver: MakeDriver, make_lab: MakeLab) -> None:
    lab = make_lab(2)
    more_interfaces(lab)
    one, two = lab.hosts
    for family, wanted in (("AF_INET", two.address), ("AF_INET6", "fd77::2")):
        pair = [a_driver(make_driver, host, NCCL_SOCKET_FAMILY=family) for host in (one, two)]
        assert address(pair[1])[1] == wanted
        connect(pair[1], pair[0], "c")
        move(pair[0], pair[1], "c", 300_000, 1)
        close(pair[0], pair[1], "c")
    for host in lab.hosts:
        namespaces.ip_batch(host.namespace, [f"addr del fd77::{host.number}/64 dev eth0"])
    pair = [a_driver(make_driver, host, NCCL_SOCKET_FAMILY="AF_INET6") for host in (one, two)]
    assert address(pair[1])[1] == "fe80::2"
    connect(pair[1], pair[0], "c")
    move(pair[0], pair[1], "c", 300_000, 1)


def test_each_nic_stays_a_device_by_itself(make_driver: MakeDriver, make_lab: MakeLab) -> None:
    """If a plugin can merge NICs, NCCL merges any two that are no PCI devices, such as a bond and a bridge. It drops
    both from its topology, and replaces them only if `devices` counts the merged one too."""
    library = ctypes.CDLL(str(build.library()))
    for version in (9, 10, 11, 12):
        functions = (ctypes.c_void_p * 20).in_dll(library, f"ncclNetPlugin_v{version}")
        assert functions[MAKE_V_DEVICE] is None, version
    lab = make_lab(1)
    more_interfaces(lab)
    driver = a_driver(make_driver, lab.hosts[0], NCCL_SOCKET_IFNAME="eth", NCCL_SOCKET_FAMILY="AF_INET")
    assert [address(driver, device)[1] for device in (0, 1)] == [lab.hosts[0].address, "10.78.0.1"]
    with pytest.raises(CallFailedError, match="failed 4"):
        driver.ask("listen l 2")


def test_link_local_addresses_are_reached_each_through_its_own_nic(
    make_driver: MakeDriver, make_lab: MakeLab
) -> None:
    lab = make_lab(2)
    more_interfaces(lab)
    for host in lab.hosts:
        lines = [
            f"addr del fd77::{host.number}/64 dev eth0",
            f"addr add fe80::1{host.number}/64 dev eth1 nodad",
        ]
        namespaces.ip_batch(host.namespace, lines)
    env = {"NCCL_SOCKET_IFNAME": "eth", "NCCL_SOCKET_FAMILY": "AF_INET6", "BAGUA_NET_STREAMS": "2"}
    sender, receiver = (a_driver(make_driver, host, **env) for host in lab.hosts)
    for device in (0, 1):
        connect(receiver, sender, f"c{device}", device=device)
        move(sender, receiver, f"c{device}", 300_000, device)
    lines = [line.split() for line in established(lab.hosts[0]).splitlines()]
    links = {(words[2].split("%")[1].split(":")[0], words[3].rpartition(":")[0]) for words in lines}
    assert links == {("eth0", "[fe80::2]"), ("eth1", "[fe80::12]")}


def test_traffic_class_of_a_communicator_is_that_of_its_packets(
    make_driver: MakeDriver, make_lab: MakeLab
) -> None:
    lab = make_lab(2)
    more_interfaces(lab)
    for family in ("AF_INET", "AF_INET6"):
        env = {"NCCL_SOCKET_FAMILY": family, "NET_DRIVER_TRAFFIC_CLASS": "104", "BAGUA_NET_STREAMS": "2"}
        sender, receiver = (a_driver(make_driver, host, **env) for host in lab.hosts)
        connect(receiver, sender, "c")
        said = established(lab.hosts[0], "--tos")
        word = "tos:0x68" if family == "AF_INET" else "tclass:0x68"
        assert said.count(word) == 2, said
        close(sender, receiver, "c")


def test_finalizing_one_of_two_contexts_leaves_the_connects_of_the_other(make_driver: MakeDriver) -> None:
    driver = a_driver(make_driver)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_connection(full.getsockname()),
    ):
        handle, _ = address(driver)
        struct.pack_into(">H", handle, HANDLE.size, full.getsockname()[1])
        before = driver.usage()["descriptors"]
        assert driver.ask(f"connect c 0 {handle.hex()}") == ["pending"]
        under_way = driver.usage()["descriptors"]
        assert under_way > before
        driver.ask("init")
        driver.ask("finalize")
        assert driver.usage()["descriptors"] == under_way
        driver.ask("finalize")
        assert driver.usage()["descriptors"] == before


def test_log_of_nccl_has_one_line_of_the_plugin(make_driver: MakeDriver, tmp_path: Path) -> None:
    log = tmp_path / "nccl.log"
    env = {"NCCL_NET_PLUGIN": str(build.library()), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
    driver = make_driver("assigned", BAGUA_NET_STREAMS="5", **env)
    assert driver.network == "Bagua"
    lines = [line for line in log.read_text().splitlines() if "NET/Bagua" in line]
    assert len(lines) == 1 and "[0]lo:127.0.0.1" in lines[0] and "5 connections per communicator" in lines[0]
