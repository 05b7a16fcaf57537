"""Bagua-Net against peers at the socket that are strangers, lie, are silent or end; and each version of its table."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

from bagua_core.net import build
from benchmarks.net_driver.pair import connect
from benchmarks.net_driver.process import CallFailedError, Driver
from tests.net.conftest import MakeDriver
from tests.net.exchange import move

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

HANDLE = struct.Struct("<8s4H16s")  # magic, protocol, streams, unused, family, token; see handshake.h
HELLO = struct.Struct("<8s4H16sQ")  # magic, protocol, streams, index, unused, token, group
CHUNK = struct.Struct("<IiQQQII")  # magic, tag, number, total, offset, bytes, unused; see wire.h
CHUNK_MAGIC, REMOTE_ERROR, INVALID_USAGE = 0x4B4E4843, 6, 5
SIZE = 1000


@pytest.fixture(scope="module")
def plugin() -> Path:
    return build.library()


def a_driver(make_driver: MakeDriver, plugin: Path, version: int = 12, **env: str) -> Driver:
    driver = make_driver("plugin", words=[plugin, str(version)], **env)
    assert driver.network == "Bagua"
    driver.ask("init")
    return driver


class Listening:
    """A driver that listens, and what a peer reads in its handle."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        handle = bytes.fromhex(driver.ask("listen l 0")[0])
        self.magic, self.protocol, _, _, _, self.token = HANDLE.unpack_from(handle)
        self.port = int.from_bytes(handle[HANDLE.size : HANDLE.size + 2], "big")

    def open(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 5)

    def hello(self, token: bytes | None = None, streams: int = 1, index: int = 0) -> bytes:
        return HELLO.pack(self.magic, self.protocol, streams, index, 0, token or self.token, 7)

    def accept(self, within_s: float = 5.0) -> bool:
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            if self.driver.ask("accept c l") == ["ready"]:
                return True
        return False

    def is_dropped(self, peer: socket.socket) -> bool:
        """Whether the driver ends the connection; it looks at it in accept."""
        peer.settimeout(0.01)
        deadline_s = time.monotonic() + 5
        while time.monotonic() < deadline_s:
            self.driver.ask("accept c l")
            try:
                return peer.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionResetError:
                return True
        return False


def chunk(
    number: int = 0, total: int = SIZE, offset: int = 0, size: int = SIZE, magic: int = CHUNK_MAGIC
) -> bytes:
    return CHUNK.pack(magic, 0, number, total, offset, size, 0)


@pytest.mark.parametrize("version", range(6, 13))
def test_every_version_of_the_table_moves_messages(
    make_driver: MakeDriver, plugin: Path, version: int
) -> None:
    sender, receiver = (a_driver(make_driver, plugin, version) for _ in range(2))
    connect(receiver, sender, "c")
    for seed, size in enumerate((0, 1, 65_537, 3_000_001)):
        move(sender, receiver, "c", size, seed)


def test_strangers_are_dropped_and_do_not_keep_the_peer_out(make_driver: MakeDriver, plugin: Path) -> None:
    listening = Listening(a_driver(make_driver, plugin))
    draw = random.Random(19)
    silent = [listening.open() for _ in range(20)]
    for words in [draw.randbytes(draw.randrange(1, 200)) + bytes(40) for _ in range(20)]:
        with listening.open() as stranger:
            stranger.sendall(words)
            assert listening.is_dropped(stranger)
    for wrong in (bytes(16), listening.token[:15] + bytes([listening.token[15] ^ 1])):
        with listening.open() as stranger:
            stranger.sendall(listening.hello(token=wrong))
            assert listening.is_dropped(stranger)
    with listening.open() as peer:
        peer.sendall(listening.hello())
        assert listening.accept()
    for one in silent:
        one.close()


def test_a_silent_stranger_is_dropped_in_time(make_driver: MakeDriver, plugin: Path) -> None:
    listening = Listening(a_driver(make_driver, plugin, BAGUA_NET_HANDSHAKE_TIMEOUT_S="0.3"))
    with listening.open() as stranger:
        stranger.sendall(listening.hello()[:20])
        assert listening.is_dropped(stranger)


ENDS_WITHIN = chunk() + bytes(SIZE // 2)


@pytest.mark.parametrize(
    ("said", "result"),
    [
        (chunk(magic=1), REMOTE_ERROR),
        (chunk(offset=500) + bytes(SIZE), REMOTE_ERROR),
        (chunk(size=0), REMOTE_ERROR),
        (chunk(total=1 << 50), REMOTE_ERROR),
        (chunk(total=SIZE + 1), INVALID_USAGE),
        (chunk(number=1 << 40), REMOTE_ERROR),
        (chunk(size=600) + bytes(600) + chunk(offset=400, size=600), REMOTE_ERROR),
        (chunk(size=600) + bytes(600) + chunk(total=SIZE - 1, offset=600, size=300), REMOTE_ERROR),
        (ENDS_WITHIN, REMOTE_ERROR),
    ],
    ids=[
        "magic",
        "outside",
        "empty",
        "huge",
        "too-large",
        "far-ahead",
        "overlap",
        "other-size",
        "ends-within",
    ],
)
def test_a_lying_peer_fails_the_request(
    make_driver: MakeDriver, plugin: Path, said: bytes, result: int
) -> None:
    listening = Listening(a_driver(make_driver, plugin))
    with listening.open() as peer:
        peer.sendall(listening.hello())
        assert listening.accept()
        listening.driver.ask(f"buffer to {SIZE} -1")
        listening.driver.ask(f"irecv r c to {SIZE} 0")
        peer.sendall(said)
        if said == ENDS_WITHIN:
            peer.shutdown(socket.SHUT_WR)
        with pytest.raises(CallFailedError) as failure:
            listening.driver.ask("wait 10 r")
    assert failure.value.result == result
    assert listening.driver.ask("devices"), "the process goes on"


def test_a_peer_that_ends_before_a_message_fails_it_though_a_later_one_came(
    make_driver: MakeDriver, plugin: Path
) -> None:
    listening = Listening(a_driver(make_driver, plugin))
    with listening.open() as one, listening.open() as other:
        one.sendall(listening.hello(streams=2, index=0))
        other.sendall(listening.hello(streams=2, index=1) + chunk(number=1) + bytes(SIZE))
        assert listening.accept()
        listening.driver.ask(f"buffer to {SIZE} -1")
        listening.driver.ask(f"irecv r c to {SIZE} 0")
        one.shutdown(socket.SHUT_WR)
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(CallFailedError) as failure:
            listening.driver.ask("wait 10 r")
    assert failure.value.result == REMOTE_ERROR


def test_a_peer_may_be_silent_between_messages_and_not_within_one(
    make_driver: MakeDriver, plugin: Path
) -> None:
    listening = Listening(a_driver(make_driver, plugin, BAGUA_NET_TIMEOUT_S="0.5"))
    with listening.open() as peer:
        peer.sendall(listening.hello())
        assert listening.accept()
        listening.driver.ask(f"buffer to {SIZE} -1")
        listening.driver.ask(f"irecv r c to {SIZE} 0")
        assert listening.driver.ask("wait 1.5 r") == ["pending"]
        peer.sendall(chunk() + bytes(10))
        began_s = time.monotonic()
        with pytest.raises(CallFailedError) as failure:
            listening.driver.ask("wait 10 r")
        assert failure.value.result == REMOTE_ERROR and 0.4 < time.monotonic() - began_s < 5


def test_a_killed_receiver_fails_the_sender(make_driver: MakeDriver, plugin: Path) -> None:
    sender, receiver = (a_driver(make_driver, plugin) for _ in range(2))
    connect(receiver, sender, "c")
    size = 64 << 20  # more than the kernel takes: the receiver has posted nothing
    sender.ask(f"buffer from {size} 1")
    sender.ask(f"isend s c from {size} 0")
    receiver.send_signal(signal.SIGKILL)
    with pytest.raises(CallFailedError) as failure:
        sender.ask("wait 10 s")
    assert failure.value.result == REMOTE_ERROR


def test_closing_in_flight_leaves_nothing(make_driver: MakeDriver, plugin: Path) -> None:
    sender, receiver = (a_driver(make_driver, plugin) for _ in range(2))
    before = [driver.usage() for driver in (sender, receiver)]
    size = 16 << 20
    sender.ask(f"buffer from {size} 1")
    receiver.ask(f"buffer to {size} -1")
    for number in range(5):
        name = f"c{number}"
        connect(receiver, sender, name)
        receiver.ask(f"irecv r {name} to {size} 0")
        sender.ask(f"isend s {name} from {size} 0")
        receiver.ask("wait 0.001 r")
        sender.ask(f"close-send {name}")
        receiver.ask(f"close-receive {name}")
        receiver.ask(f"close-listen {name}-listen")
    for driver, usage in zip((sender, receiver), before, strict=True):
        now = driver.usage()
        assert (now["descriptors"], now["threads"]) == (usage["descriptors"], usage["threads"])


def test_congestion_control_is_the_chosen_one_or_the_kernels(make_driver: MakeDriver, plugin: Path) -> None:
    for given in ("reno", "no-such"):
        env = {"BAGUA_NET_CONGESTION": given, "BAGUA_NET_STREAMS": "0", "NET_DRIVER_LOG": "1"}
        sender, receiver = (a_driver(make_driver, plugin, **env) for _ in range(2))
        connect(receiver, sender, "c")
        move(sender, receiver, "c", 100_000, 1)
        said = sender.errors()
        assert ("congestion control reno" in said) is (given == "reno")
        assert ("BAGUA_NET_CONGESTION='no-such' is none" in said) is (given == "no-such")
        assert "BAGUA_NET_STREAMS='0' is not a number from 1 to 64, its default is used" in said
