"""Faults of lab links for benchmarks: random loss of packets, and one TCP connection slower than the others."""

from __future__ import annotations

import re
import subprocess

from benchmarks.net_driver.process import Driver
from tests.lab import namespaces
from tests.lab.namespaces import tc
from tests.lab.network import Host, Lab

_RANDOM = 4294963256  # SKF_AD_OFF + SKF_AD_RANDOM: classic BPF loads a random number of 32 bits from there
_DROP, _KEEP = 2, 4294967295  # TC_ACT_SHOT, TC_ACT_UNSPEC
# Less than the smallest message of interest: a token bucket lets its burst pass at once.
_BURST = "burst 16kb cburst 16kb"
MEASURABLE_BYTES = 100_000  # a connection that moved less carries answers


def drop_packets(lab: Lab, share: float) -> None:
    """Each host loses this share of the packets that it receives, from now on.

    Hosts send single packets, where a segment of 64 KB would be lost as a whole.
    """
    limit = int(share * 2**32)
    program = f"4,32 0 0 {_RANDOM},37 1 0 {limit},6 0 0 {_DROP},6 0 0 {_KEEP}"
    for host in lab.hosts:
        namespaces.ip("-n", host.namespace, "link", "set", "eth0", "gso_max_segs", "1")
        tc(host.namespace, "qdisc", "add", "dev", "eth0", "ingress")
        words = ("filter", "add", "dev", "eth0", "parent", "ffff:", "bpf", "da", "bytecode", program)
        tc(host.namespace, *words)


def use_congestion_control(lab: Lab, name: str) -> None:
    """Connections between hosts use it from now on. By the route: a namespace's default may be restricted."""
    for host in lab.hosts:
        command = ["ip", "-n", host.namespace, "route", "show", "dev", "eth0", "scope", "link"]
        route = subprocess.check_output(command, text=True, timeout=10).splitlines()[0].split()
        namespaces.ip("-n", host.namespace, "route", "replace", *route, "dev", "eth0", "congctl", name)


class SlowFlows:
    """Limits each TCP connection of a host to `rate`, and one of each driver to `slow_rate`."""

    def __init__(self, host: Host, rate: str, slow_rate: str) -> None:
        self._namespace, self._host, self._rate, self._slow = host.namespace, host, rate, slow_rate
        self._classes = 16
        self._tc("qdisc replace dev eth0 root handle 1: htb default 9")
        self._tc("class add dev eth0 parent 1: classid 1:9 htb rate 10gbit")

    def limit(self, driver: Driver) -> int:
        """Limits the connections of `driver` that moved data; the median one of several is slow. Returns their number.

        Raises RuntimeError where none moved data: then nothing is limited.
        """
        flows = self._flows(driver)
        if not flows:
            raise RuntimeError(f"no TCP connection of process {driver.pid} moved {MEASURABLE_BYTES} bytes")
        for k, (_, source, target) in enumerate(flows):
            slow = len(flows) > 1 and k == len(flows) // 2
            self._classes += 1
            number = f"1:{self._classes:x}"
            rate = self._slow if slow else self._rate
            self._tc(f"class add dev eth0 parent 1: classid {number} htb rate {rate} {_BURST}")
            match = f"match ip sport {source} 0xffff match ip dport {target} 0xffff"
            self._tc(f"filter add dev eth0 parent 1: protocol ip prio 1 u32 {match} flowid {number}")
        return len(flows)

    def _flows(self, driver: Driver) -> list[tuple[int, str, str]]:
        """(sent bytes, source port, target port), the most bytes first."""
        command = ["ss", "-HtinpO"]
        text = self._host.inside(lambda: subprocess.check_output(command, text=True, timeout=10))
        found = []
        for line in text.splitlines():
            sent = re.search(r"bytes_sent:(\d+)", line)
            if f"pid={driver.pid}," in line and sent and int(sent[1]) >= MEASURABLE_BYTES:
                words = line.split()
                found.append((int(sent[1]), words[3].rsplit(":", 1)[1], words[4].rsplit(":", 1)[1]))
        return sorted(found, reverse=True)

    def _tc(self, words: str) -> None:
        tc(self._namespace, *words.split())
