"""Compares transports of NCCL between two lab hosts: NCCL's own sockets at several settings, and a network plugin.

    python -m benchmarks.bagua_net --keep                      # NCCL's own sockets and Bagua-Net: about 11 minutes
    python -m benchmarks.bagua_net --plugin LIBRARY            # another plugin
    python -m benchmarks.bagua_net --quick

All transports of a condition are connected before it is measured, and alternate for each size and repeat.
"""

from __future__ import annotations

import argparse
import statistics
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bagua_core.net.build import library
from benchmarks import link_faults
from benchmarks.net_driver import build, libnccl
from benchmarks.net_driver.pair import Pair, Plan, Stream
from benchmarks.net_driver.process import Driver
from benchmarks.relay import delayed
from benchmarks.result_file import circumstances, in_words, keep, table
from tests.lab.network import Lab

SETTINGS = ((0, 1), (1, 4), (2, 8))  # NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD
PLUGIN = "plugin"
PLUGIN_VERSION = 12
SIZES = tuple(1024 * 4**power for power in range(9))  # 1 KB to 64 MB
LARGEST = 256 * 1024 * 1024  # takes seconds on slow links
LINE_RATE = {"1gbit": 0.125, "10gbit": 1.25}  # gigabytes per second
SLOW_RATE = "200mbit"
# The default of most hosts; the kernel of the machine may have another one. A connection with BBR ignores loss.
CONGESTION = "cubic"
LARGEST_WITH_LOSS = 1024 * 1024  # one connection of NCCL's takes seconds for more
RATE_WITH_LOSS = 0.05  # of the line, about what loss leaves
FIELDS_IN_A_ROW = 5  # of the plot
REST_S = 2.0  # of connected pairs without messages
STREAM_S = 0.15  # of one measurement at the line's rate
MOST_MESSAGES = 500
CPU_BYTES = 64 * 1024 * 1024
NAP_US = 50  # processor time is measured with a poll that rests, so that polling itself does not count


@dataclass(frozen=True, slots=True)
class Condition:
    rate: str
    delay_ms: float = 0.0
    lanes: int = 1
    loss: float = 0.0  # share of the packets
    slow_flow: bool = False  # the rate is of each TCP connection, and one of a system has SLOW_RATE

    def __str__(self) -> str:
        delay = f", {self.delay_ms:g} ms each way" if self.delay_ms else ""
        delay += f", {self.loss:.1%} loss" if self.loss else ""
        delay += f" for each connection, one {SLOW_RATE}" if self.slow_flow else ""
        return f"{self.rate}{delay}, {self.lanes} communicator{'s' if self.lanes > 1 else ''}"


CONDITIONS = (
    Condition("1gbit"),
    Condition("1gbit", lanes=4),
    Condition("10gbit"),
    Condition("10gbit", lanes=4),
    Condition("1gbit", delay_ms=1),
    Condition("1gbit", delay_ms=10),
    Condition("1gbit", delay_ms=50),
    Condition("1gbit", delay_ms=10, loss=0.001),
    Condition("1gbit", delay_ms=10, loss=0.01),
    Condition("1gbit", slow_flow=True),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """mode: `answered` waits for the receiver after each message, `stream` does not; `cpu` polls with rests.

    `rest` moves nothing: its processor time is in a second, not for a gigabyte.
    """

    condition: str
    system: str
    size_bytes: int
    mode: str
    gigabytes_per_s: float
    cpu_s_per_gigabyte: float


def sizes_of(condition: Condition) -> list[int]:
    if condition.loss:
        return [size for size in SIZES if size <= LARGEST_WITH_LOSS]
    return [*SIZES, LARGEST] if condition.rate == "10gbit" and condition.lanes == 1 else list(SIZES)


def plan(condition: Condition, size: int, mode: str) -> Plan:
    """As many messages as take about STREAM_S at the line's rate; answered ones also wait for the round trip."""
    rate = LINE_RATE[condition.rate] * (RATE_WITH_LOSS if condition.loss else 1)
    each_s = size / (rate * 1e9)
    if mode == "answered":
        each_s += 2 * condition.delay_ms / 1000
    messages = max(1, min(MOST_MESSAGES, int(STREAM_S / each_s)))
    every = 1 if mode == "answered" else messages
    return Plan(size, messages, acknowledge_every=every, nap_us=NAP_US if mode == "cpu" else 0, limit_s=120)


def better_baseline(measured: list[Measurement]) -> dict[tuple[str, int, str], float]:
    """The best median of NCCL's own settings by condition, size and mode; gigabytes per second."""
    best: dict[tuple[str, int, str], float] = {}
    for (condition, system, size, mode), value in medians(measured).items():
        if system != PLUGIN and mode != "rest":
            best[condition, size, mode] = max(value, best.get((condition, size, mode), 0.0))
    return best


def medians(measured: list[Measurement]) -> dict[tuple[str, str, int, str], float]:
    values = defaultdict(list)
    for one in measured:
        values[one.condition, one.system, one.size_bytes, one.mode].append(one.gigabytes_per_s)
    return {key: statistics.median(found) for key, found in values.items()}


def systems(plugin: Path | None) -> dict[str, tuple[list[str | Path], dict[str, str]]]:
    """Words and environment of the driver by name."""
    found: dict[str, tuple[list[str | Path], dict[str, str]]] = {}
    for threads, sockets in SETTINGS:
        env = {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(sockets)}
        found[f"{threads}x{sockets}"] = (["sockets", libnccl.path()], env)
    if plugin is not None:
        found[PLUGIN] = (["plugin", plugin, str(PLUGIN_VERSION)], {})
    return found


@contextmanager
def connected(lab: Lab, condition: Condition, plugin: Path | None) -> Iterator[dict[str, Pair]]:
    with ExitStack() as drivers:
        pairs = {}
        for name, (words, env) in systems(plugin).items():
            env = {"NCCL_SOCKET_IFNAME": "eth0", **env}
            ends = [drivers.enter_context(Driver(build.driver(), words, env, host)) for host in lab.hosts]
            pairs[name] = Pair(*ends, lanes=condition.lanes)
        yield pairs


def measure(condition: Condition, sizes: list[int], repeat: int, plugin: Path | None) -> list[Measurement]:
    found = []

    def take(system: str, pair: Pair, size: int, mode: str) -> None:
        stream: Stream = pair.stream(plan(condition, size, mode), condition.lanes)
        speed, cpu = stream.gigabytes_per_s, stream.cpu_s_per_gigabyte
        found.append(Measurement(str(condition), system, size, mode, speed, cpu))

    with Lab(2) as lab:
        link_faults.use_congestion_control(lab, CONGESTION)
        if not condition.slow_flow:
            lab.shape(condition.rate)
        if condition.loss:
            link_faults.drop_packets(lab, condition.loss)
        with (
            delayed(lab, condition.delay_ms / 1000) if condition.delay_ms else nullcontext(),
            connected(lab, condition, plugin) as pairs,
        ):
            if condition.slow_flow:
                slow_flows(lab, condition, pairs)
            for _ in range(repeat):
                for size in sizes:
                    for mode in ("answered", "stream"):
                        for system, pair in pairs.items():
                            take(system, pair, size, mode)
                for system, pair in pairs.items():
                    take(system, pair, min(CPU_BYTES, sizes[-1]), "cpu")
            for system, rested_s in rest(pairs).items():
                found.append(Measurement(str(condition), system, 0, "rest", 0.0, rested_s))
    return found


def slow_flows(lab: Lab, condition: Condition, pairs: dict[str, Pair]) -> None:
    """Limit the connections that carry data, which a stream shows."""
    limits = link_faults.SlowFlows(lab.hosts[0], condition.rate, SLOW_RATE)
    for pair in pairs.values():
        pair.stream(Plan(16 * 1024 * 1024, 8, acknowledge_every=8), condition.lanes)
        limits.limit(pair.sender)


def rest(pairs: dict[str, Pair]) -> dict[str, float]:
    """Processor seconds in a second of connected pairs without messages, both hosts."""

    def used_s(pair: Pair) -> float:
        return sum(driver.usage()["cpu_s"] for driver in (pair.sender, pair.receiver))

    before = {name: used_s(pair) for name, pair in pairs.items()}
    time.sleep(REST_S)  # what is measured
    return {name: (used_s(pair) - before[name]) / REST_S for name, pair in pairs.items()}


def report(measured: list[Measurement]) -> str:
    """One table for each condition: gigabits per second; the plugin's column is relative to the better baseline."""
    values, best = medians(measured), better_baseline(measured)
    parts = []
    for condition in dict.fromkeys(one.condition for one in measured):
        here = [one for one in measured if one.condition == condition]
        names = list(dict.fromkeys(one.system for one in here))
        rows = []
        for size, mode in dict.fromkeys(
            (one.size_bytes, one.mode) for one in here if one.mode in ("answered", "stream")
        ):
            speeds = [f"{values[condition, name, size, mode] * 8:.3g}" for name in names]
            if PLUGIN in names:
                speeds.append(f"{values[condition, PLUGIN, size, mode] / best[condition, size, mode]:.2f}")
            rows.append([f"{size // 1024} KB", mode, *speeds])
        head = ["message", "mode", *names, *(["plugin / best"] if PLUGIN in names else [])]
        parts.append(f"## {condition}, Gbit/s\n\n{table(head, rows)}")
        for mode, what in (
            ("cpu", "Processor seconds per GB"),
            ("rest", "At rest, processor seconds per second"),
        ):
            found = [one for one in here if one.mode == mode]
            words = ", ".join(f"{name} {cpu_median(found, name):.3f}" for name in names)
            parts.append(f"{what}, both hosts: {words}.")
    return "\n\n".join(parts)


def cpu_median(measured: list[Measurement], system: str) -> float:
    return statistics.median(one.cpu_s_per_gigabyte for one in measured if one.system == system)


def draw(pyplot: Any, measured: list[Measurement]) -> Any:
    """Speed by size, a field for each condition: answered messages."""
    conditions = list(dict.fromkeys(one.condition for one in measured))
    rows = -(-len(conditions) // FIELDS_IN_A_ROW)
    columns = min(len(conditions), FIELDS_IN_A_ROW)
    figure, fields = pyplot.subplots(rows, columns, figsize=(3.6 * columns, 3.2 * rows), squeeze=False)
    for axes in fields.flat[len(conditions) :]:
        axes.remove()
    for condition, axes in zip(conditions, fields.flat, strict=False):
        lines = defaultdict(list)
        for (where, system, size, mode), value in medians(measured).items():
            if where == condition and mode == "answered":
                lines[system].append((size, value * 8))
        for system, points in lines.items():
            colour = "#d55e00" if system == PLUGIN else None
            axes.plot(*zip(*sorted(points), strict=True), marker=".", label=system, color=colour)
        axes.set(xscale="log", yscale="log", xlabel="bytes of a message", ylabel="Gbit/s")
        axes.set_title(textwrap.fill(condition, 34), fontsize=9)
    fields[0][0].legend(fontsize=7)
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plugin", type=Path, help="library of the plugin to compare; by default Bagua-Net")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one condition, two sizes, one repeat")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    options = parser.parse_args()
    plugin = options.plugin or library()
    conditions = CONDITIONS[:1] if options.quick else CONDITIONS
    about = circumstances()
    measured = []
    for condition in conditions:
        sizes = [1024, 1024 * 1024] if options.quick else sizes_of(condition)
        taken = measure(condition, sizes, 1 if options.quick else options.repeat, plugin)
        print(report(taken), flush=True)
        measured += taken
    if options.keep:
        figures = {"speed": lambda pyplot: draw(pyplot, measured)}
        keep("bagua_net", about, report(measured), [asdict(one) for one in measured], figures=figures)
    print(in_words(about))


if __name__ == "__main__":
    main()
