"""Two drivers and the communicators between them, as NCCL makes them: handles travel, both sides poll."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.net_driver.process import Driver, DriverError

CONNECT_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Stream:
    """What a stream moved. took_s: until the last answer; round_s: median between two; cpu_s: sender, receiver."""

    moved_bytes: int
    took_s: float
    round_s: float
    cpu_s: tuple[float, float]

    @property
    def gigabytes_per_s(self) -> float:
        return self.moved_bytes / self.took_s / 1e9

    @property
    def cpu_s_per_gigabyte(self) -> float:
        return sum(self.cpu_s) / self.moved_bytes * 1e9


def connect(
    receiver: Driver, sender: Driver, name: str, timeout_s: float = CONNECT_TIMEOUT_S, device: int = 0
) -> None:
    """A communicator from sender to receiver, called `name` on both, with its listener `name`-listen."""
    handle = receiver.ask(f"listen {name}-listen {device}")[0]
    connect_by(handle, receiver, f"{name}-listen", sender, name, timeout_s, device)


def connect_by(
    handle: str,
    receiver: Driver,
    listener: str,
    sender: Driver,
    name: str,
    timeout_s: float = CONNECT_TIMEOUT_S,
    device: int = 0,
) -> None:
    """A communicator called `name` on both sides, by the handle of `listener`."""
    deadline_s = time.monotonic() + timeout_s
    sent = received = False
    while not (sent and received):
        sent = sent or sender.ask(f"connect {name} {device} {handle}") == ["ready"]
        received = received or receiver.ask(f"accept {name} {listener}") == ["ready"]
        if time.monotonic() > deadline_s:
            raise DriverError(
                f"{name}: not connected in {timeout_s:g} s (sender {sent}, receiver {received})"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """One stream. acknowledge_every: messages; nap_us: pause between polls, 0 polls as NCCL's proxy does."""

    message_bytes: int
    messages: int
    slice_bytes: int = 512 * 1024  # NCCL's buffer of 4 MiB in its 8 steps
    window: int = 8
    acknowledge_every: int = 1
    nap_us: int = 0
    limit_s: float = 60.0


class Pair:
    """`sender` and `receiver` with `lanes` communicators of data, and as many of answers."""

    def __init__(self, sender: Driver, receiver: Driver, lanes: int = 1) -> None:
        self.sender, self.receiver = sender, receiver
        for driver in (sender, receiver):
            driver.ask("init")
        for lane in range(lanes):
            connect(receiver, sender, f"data{lane}")
            connect(sender, receiver, f"answer{lane}")

    def stream(self, plan: Plan, lanes: int = 1) -> Stream:
        pairs = ",".join(f"data{lane}:answer{lane}" for lane in range(lanes))
        words = (
            f"{pairs} {plan.message_bytes} {plan.messages} {plan.slice_bytes} {plan.window}"
            f" {plan.acknowledge_every} {plan.nap_us} {plan.limit_s}"
        )
        self.receiver.begin(f"receive-stream {words}")
        self.sender.begin(f"send-stream {words}")
        sent = [float(word) for word in self.sender.finish(plan.limit_s + 10)]
        received = [float(word) for word in self.receiver.finish(plan.limit_s + 10)]
        moved = plan.message_bytes * plan.messages * lanes
        return Stream(moved, sent[0], sent[2], (sent[1], received[1]))
