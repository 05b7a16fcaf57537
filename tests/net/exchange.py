"""Exchanges between two drivers of NCCL's network interface: whole messages, groups, connections in any order."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Sequence

from benchmarks.net_driver.process import CallFailedError, Driver
from tests.lab.network import Host
from tests.lab.wait import HANG_S

WAIT_S = 30
NO_INTERFACE = 2  # ncclSystemError


def begin(driver: Driver) -> None:
    """`init`, as soon as an interface runs: the kernel says so some time after a lab has put one up."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            driver.ask("init")
            return
        except CallFailedError as failure:
            if failure.result != NO_INTERFACE or time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


def finish(requests: dict[str, Driver], within_s: float = WAIT_S) -> dict[str, list[str]]:
    """The sizes that each request reports when it is done. Both sides are polled: data moves only in `test`."""
    pending, sizes = dict(requests), {}
    deadline_s = time.monotonic() + within_s
    while pending:
        assert time.monotonic() < deadline_s, f"pending: {sorted(pending)}"
        for name, driver in list(pending.items()):
            if (said := driver.ask(f"wait 0.01 {name}")) != ["pending"]:
                sizes[name] = said[1:]
                del pending[name]
    return sizes


def move(sender: Driver, receiver: Driver, comm: str, size: int, seed: int, room: int | None = None) -> None:
    """One message of a seeded content arrives whole, with its size, and nothing is written behind it."""
    room = size if room is None else room
    sender.ask(f"buffer from {max(size, 1)} {seed}")
    receiver.ask(f"buffer to {max(room, 1)} -1")
    sender.ask(f"register from {comm}")
    receiver.ask(f"register to {comm}")
    assert receiver.ask(f"irecv r {comm} to {room} 0") == ["posted"]
    assert sender.ask(f"isend s {comm} from {size} 0") == ["posted"]
    assert finish({"s": sender, "r": receiver}) == {"s": [str(size)], "r": [str(size)]}
    assert receiver.ask(f"check to {size} {seed}") == ["same"]
    for driver, name in ((sender, "from"), (receiver, "to")):
        driver.ask(f"deregister {name} {comm}")


def move_group(
    sender: Driver, receiver: Driver, comm: str, sizes: Sequence[int], draw: random.Random
) -> None:
    """Messages of different tags fill the buffers of one grouped receive, in whatever order they are sent."""
    tags = range(len(sizes))
    for tag, size in enumerate(sizes):
        sender.ask(f"buffer from{tag} {max(size, 1)} {tag}")
        receiver.ask(f"buffer to{tag} {max(size, 1)} -1")
    sends = draw.sample(tags, len(tags))
    early = draw.randrange(len(tags))
    for tag in sends[:early]:
        sender.ask(f"isend s{tag} {comm} from{tag} {sizes[tag]} {tag}")
    group = " ".join(f"to{tag} {sizes[tag]} {tag}" for tag in tags)
    assert receiver.ask(f"irecv r {comm} {group}") == ["posted"]
    for tag in sends[early:]:
        sender.ask(f"isend s{tag} {comm} from{tag} {sizes[tag]} {tag}")
    done = finish({"r": receiver, **{f"s{tag}": sender for tag in tags}})
    assert done["r"] == [str(size) for size in sizes]
    for tag, size in enumerate(sizes):
        assert receiver.ask(f"check to{tag} {size} {tag}") == ["same"]


def connect_in_any_order(sender: Driver, receiver: Driver, names: Sequence[str], draw: random.Random) -> None:
    """Communicators called `names`; their connects and accepts are called in the order that `draw` gives."""
    handles = {name: receiver.ask(f"listen {name}-listen 0")[0] for name in names}
    left = {(side, name) for side in ("connect", "accept") for name in names}
    deadline_s = time.monotonic() + WAIT_S
    while left:
        assert time.monotonic() < deadline_s, sorted(left)
        side, name = draw.choice(sorted(left))
        said = (
            sender.ask(f"connect {name} 0 {handles[name]}")
            if side == "connect"
            else receiver.ask(f"accept {name} {name}-listen")
        )
        if said == ["ready"]:
            left.remove((side, name))


def close(sender: Driver, receiver: Driver, name: str) -> None:
    sender.ask(f"close-send {name}")
    receiver.ask(f"close-receive {name}")
    receiver.ask(f"close-listen {name}-listen")


def established(host: Host, *options: str) -> str:
    """The TCP connections of a host, one a line."""
    command = ["ss", "-Htn", *options, "state", "established"]
    return host.inside(lambda: subprocess.check_output(command, text=True, timeout=HANG_S))
