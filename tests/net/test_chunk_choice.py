"""Which connection takes a chunk: tables of windows, round trips and measured bandwidths, without sockets."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from bagua_core.kernels import compilation
from bagua_core.net import build
from tests.lab.wait import HANG_S

KB, MB = 1024, 1024 * 1024
FIRST_WINDOW = 14480  # bytes of ten segments
SOURCE = Path(__file__).with_name("assign_chunks.cc")


@dataclass(frozen=True, slots=True)
class Past:
    """A measurement: `moved` bytes in `busy_s`, with this smoothed round trip at its end."""

    round_trip_s: float
    moved: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class Flow:
    least_round_trip_s: float
    window: int
    past: tuple[Past, ...] = ()
    paced_rate: int = 0
    queued: int = 0

    def line(self) -> str:
        past = " ".join(f"{one.round_trip_s} {one.moved} {one.busy_s}" for one in self.past)
        return f"{self.least_round_trip_s} {self.window} {self.paced_rate} {self.queued} {past}\n"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("chunks") / "assign_chunks"
    sources = [
        SOURCE,
        *(build.SOURCES / name for name in ("chunk_choice.cc", "flow.cc", "sockets.cc", "settings.cc")),
    ]
    command = [*build.find_compiler(), "-std=c++17", "-O1", f"-I{build.SOURCES}", "-o", str(target)]
    compilation.run_compiler([*command, *map(str, sources)], "the test of the chunks' choice", 300.0)
    return target


def taken(program: Path, message: int, flows: list[Flow]) -> list[int]:
    """The bytes of the message that each connection takes."""
    text = f"{message}\n" + "".join(flow.line() for flow in flows)
    done = subprocess.run([program], input=text, capture_output=True, text=True, timeout=HANG_S, check=True)
    found = [int(word) for word in done.stdout.split()]
    assert sum(found) == message
    return found


def far(window: int, moved: int = 0, **more: int) -> Flow:
    """A connection with a round trip of 100 ms and no queue that moved `moved` bytes in two round trips."""
    return Flow(0.1, window, (Past(0.101, moved, 0.2),) if moved else (), **more)


def near(bytes_per_s: float, round_trip_s: float = 0.004) -> Flow:
    """A connection of a short path whose queue says that `bytes_per_s` is its bandwidth."""
    return Flow(0.00005, 4 * MB, (Past(round_trip_s, int(bytes_per_s * 0.05), 0.05),))


@pytest.mark.parametrize("cold", [far(FIRST_WINDOW), far(FIRST_WINDOW, 32 * KB)], ids=["unused", "used"])
def test_message_within_the_window_of_a_far_path_is_not_divided(program: Path, cold: Flow) -> None:
    """Another connection, in slow start, would need more round trips for a part of it."""
    assert taken(program, 64 * KB, [far(100 * KB, 64 * KB), *[cold] * 7]) == [64 * KB, *[0] * 7]


@pytest.mark.parametrize(
    "flow",
    [
        far(180 * KB, 128 * KB),
        far(360 * KB, 128 * KB, paced_rate=2 * MB),  # BBR: what the window lets out takes two round trips
    ],
    ids=["window", "paced"],
)
def test_message_beyond_a_window_is_divided_evenly_on_a_far_path(program: Path, flow: Flow) -> None:
    assert taken(program, MB, [flow] * 8) == [MB // 8] * 8


def test_connections_take_by_their_windows_on_a_path_with_loss(program: Path) -> None:
    """A lost packet halves a window at once; a bandwidth measured before does not count any more."""
    before = (Past(0.04, 2 * MB, 0.2),)
    flows = [Flow(0.02, FIRST_WINDOW, before), *[Flow(0.02, 512 * KB, before)] * 7]
    found = taken(program, 4 * MB, flows)
    assert found[0] <= 128 * KB
    assert min(found[1:]) > 512 * KB


def test_slow_connection_takes_what_it_moves_by_the_end_of_the_others(program: Path) -> None:
    flows = [near(25e6), *[near(125e6)] * 7]
    found = taken(program, 16 * MB, flows)
    ends_s = [taken / rate for taken, rate in zip(found, [25e6, *[125e6] * 7], strict=True)]
    ideal_s = 16 * MB / (25e6 + 7 * 125e6)
    assert max(ends_s) < ideal_s + 0.002  # a chunk's time
    assert found[0] > 0


@pytest.mark.parametrize("size", [64 * KB, MB])
def test_slow_connection_with_a_queue_takes_nothing_of_a_message_that_others_end_sooner(
    program: Path, size: int
) -> None:
    slow = Flow(0.00005, 4 * MB, (Past(0.02, int(25e6 * 0.05), 0.05),), queued=512 * KB)
    assert taken(program, size, [slow, *[near(125e6)] * 7])[0] == 0


def test_fast_connection_keeps_a_message_that_it_moves_in_half_a_millisecond(program: Path) -> None:
    assert taken(program, 512 * KB, [near(1.25e9)] * 8) == [512 * KB, *[0] * 7]


def test_small_messages_say_nothing_of_the_bandwidth(program: Path) -> None:
    """One message of 1 KB in each round trip of 50 us moves 20 MB/s; the path has no queue and moves more."""
    idle = (Past(0.00005, int(20e6 * 0.05), 0.05),) * 5
    fast = near(1.25e9)
    flow = Flow(fast.least_round_trip_s, fast.window, fast.past + idle)
    assert taken(program, 512 * KB, [flow, *[fast] * 7]) == [512 * KB, *[0] * 7]
