"""The newest output of a slot is kept, with positions by which a reader goes on."""

from __future__ import annotations

from bagua_agent.workers.output.output_options import Streams
from bagua_agent.workers.output.recent_output import OutputPart, RecentOutput


def test_a_reader_goes_on_where_it_stopped() -> None:
    output = RecentOutput()
    output.add(0, Streams.OUT, b"one\n")
    output.add(0, Streams.ERR, b"other stream\n")
    assert output.read(0, Streams.OUT, 0) == OutputPart(0, b"one\n")
    output.add(0, Streams.OUT, b"two\n")
    assert output.read(0, Streams.OUT, 4) == OutputPart(4, b"two\n")
    assert output.read(0, Streams.OUT, 8) == OutputPart(8, b"")
    assert output.read(0, Streams.OUT, 1000) == OutputPart(8, b""), "a position of another agent"
    assert output.read(1, Streams.OUT, 0) is None


def test_the_oldest_bytes_are_dropped_and_the_position_says_so() -> None:
    output = RecentOutput(kept_bytes=10)
    for number in range(100):
        output.add(0, Streams.OUT, b"%03d\n" % number)
    part = output.read(0, Streams.OUT, 0)
    assert part == OutputPart(390, b"97\n098\n099\n"[-10:])
    output.add(0, Streams.OUT, b"x" * 1000)
    assert output.read(0, Streams.OUT, 400) == OutputPart(1390, b"x" * 10)
