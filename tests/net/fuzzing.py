"""A valid exchange at the socket, mutated by a seed, and what a receiver of Bagua-Net makes of it.

python -m tests.net.fuzzing 17           repeats seed 17 and says what it did
python -m tests.net.fuzzing 0 5000 address   runs the seeds 0 to 4999 under a sanitizer
"""

from __future__ import annotations

import random
import socket
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from bagua_core.net.build import library
from benchmarks.net_driver import build
from benchmarks.net_driver.process import CallFailedError, Driver

HANDLE = struct.Struct("<8s4H16s")  # magic, protocol, streams, unused, family, token; see handshake.h
HELLO = struct.Struct("<8s4H16sQ")  # magic, protocol, streams, index, unused, token, group
CHUNK = struct.Struct("<IiQQQII")  # magic, tag, number, total, offset, bytes, unused; see wire.h
CHUNK_MAGIC = 0x4B4E4843
ERRORS = (6, 5, 3)  # ncclRemoteError; ncclInvalidUsage, too large; ncclInternalError, too much memory
LENGTHS = [0, 1, 0x7FFF, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 40) + 1, 1 << 63, (1 << 64) - 1]
LIMIT_S = 20.0
GUARD = 16  # bytes behind each buffer
WARM_UP = 10  # seeds, after which the driver's memory is compared
MOST_PAGES = 2000
QUICK = {"NCCL_SOCKET_IFNAME": "lo", "BAGUA_NET_TIMEOUT_S": "0.2", "BAGUA_NET_HANDSHAKE_TIMEOUT_S": "0.1"}


@dataclass
class Exchange:
    """What each connection of a communicator says: its hello, then headers and data. sizes: of the messages."""

    sizes: list[int]
    connections: list[list[bytearray]] = field(default_factory=list)
    mutations: list[str] = field(default_factory=list)


def valid(draw: random.Random, first_of_hello: tuple[bytes, int], token: bytes) -> Exchange:
    """A few messages of tag 0, divided among one to three connections."""
    sizes = [draw.choice([0, 1, 39, 40, 41, 4096, 9000, 20_000]) for _ in range(draw.randint(1, 4))]
    streams, group = draw.randint(1, 3), draw.getrandbits(64)
    hellos = [HELLO.pack(*first_of_hello, streams, index, 0, token, group) for index in range(streams)]
    exchange = Exchange(sizes, [[bytearray(hello)] for hello in hellos])
    for number, total in enumerate(sizes):
        for at, size in pieces(draw, total):
            parts = draw.choice(exchange.connections)
            parts.append(bytearray(CHUNK.pack(CHUNK_MAGIC, 0, number, total, at, size, 0)))
            parts.append(bytearray(draw.randbytes(size)))
    return exchange


def pieces(draw: random.Random, total: int) -> list[tuple[int, int]]:
    """Offset and size of each chunk of a message; an empty message has one."""
    found, at = [], 0
    while at < total or not found:
        found.append((at, min(total - at, draw.choice([100, 1500, 5000, 20_000]))))
        at += found[-1][1]
    return found


def mutate(exchange: Exchange, draw: random.Random) -> None:
    """One to three mutations, each noted. Some leave the exchange valid."""
    for _ in range(draw.randint(1, 3)):
        parts = draw.choice(exchange.connections)
        at = draw.randrange(len(parts))
        part = parts[at]
        kind = draw.choice(["flip", "flip", "cut", "repeat", "swap", "drop", "length", "noise"])
        exchange.mutations.append(f"{kind} {at} of {len(parts)}")
        if kind == "flip" and part:
            part[draw.randrange(min(len(part), 64))] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del parts[at + 1 :], part[draw.randrange(len(part) + 1) :]
        elif kind == "repeat":
            again = parts[at : at + draw.randint(1, 2)]
            parts[at:at] = [bytearray(one) for one in again]
        elif kind == "swap":
            other = draw.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        elif kind == "drop":
            del parts[at : at + draw.randint(1, 2)]
            parts.append(bytearray())
        elif kind == "length" and is_header(part):
            fields, which = list(CHUNK.unpack(part)), draw.randint(2, 5)
            fields[which] = draw.choice(LENGTHS) & (0xFFFFFFFF if which == 5 else (1 << 64) - 1)
            part[:] = CHUNK.pack(*fields)
        elif kind == "noise":
            parts.insert(at, bytearray(draw.randbytes(draw.randrange(1, 300))))


def is_header(part: bytearray) -> bool:
    return len(part) == CHUNK.size and part[:4] == CHUNK_MAGIC.to_bytes(4, "little")


def said(exchange: Exchange) -> dict[int, list[set[int]]]:
    """By message: which values the connections say for each byte. The reference that a receiver is compared with."""
    found: dict[int, list[set[int]]] = {}
    for parts in exchange.connections:
        words = b"".join(parts)
        at = HELLO.size
        while at + CHUNK.size <= len(words):
            magic, tag, number, _, offset, size, _ = CHUNK.unpack_from(words, at)
            at += CHUNK.size
            if magic != CHUNK_MAGIC:
                break
            if tag == 0 and number < len(exchange.sizes):
                values = found.setdefault(number, [set() for _ in range(exchange.sizes[number])])
                for position, value in enumerate(words[at : at + size], offset):
                    if position < len(values):
                        values[position].add(value)
            at += size
    return found


class Peer:
    """One connection: what it has yet to say goes out in pieces, with pauses between them."""

    def __init__(self, port: int, words: bytes, draw: random.Random) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 5)
        self._socket.setblocking(False)
        self._words, self._draw, self._gone = words, draw, False

    def go_on(self) -> bool:
        """Says some more; whether all is said or can't be."""
        size = self._draw.choice([0, 1, 39, 1000, 100_000])
        try:
            self._words = self._words[self._socket.send(self._words[:size]) :] if self._words else b""
        except BlockingIOError:
            return False
        except ConnectionError:
            self._words = b""
        return not self._words

    def is_dropped(self) -> bool:
        try:
            self._gone = self._gone or self._socket.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            self._gone = True
        return self._gone

    def end(self, by_reset: bool) -> None:
        if by_reset and self._socket.fileno() >= 0:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()
        self._words, self._gone = b"", True


class Target:
    """A driver with the plugin, in which each seed has a listener and a communicator of its own."""

    def __init__(self, sanitizer: str = "", **env: str) -> None:
        plugin = build.plugin(sanitizer) if sanitizer else library()
        self.driver = Driver(build.driver(sanitizer), ["plugin", plugin, "12"], {**QUICK, **env})
        self.driver.ask("init")

    def run(self, seed: int, mutated: bool = True) -> tuple[str, Exchange]:
        """The outcome: whole, refused, or failed RESULT. Raises AssertionError and DriverError."""
        draw = random.Random(seed)
        handle = bytes.fromhex(self.driver.ask("listen l 0")[0])
        magic, protocol, _, _, _, token = HANDLE.unpack_from(handle)
        port = int.from_bytes(handle[HANDLE.size : HANDLE.size + 2], "big")
        exchange = valid(draw, (magic, protocol), token)
        if mutated:
            mutate(exchange, draw)
        peers = [Peer(port, b"".join(parts), draw) for parts in exchange.connections]
        try:
            return self._outcome(exchange, peers, draw), exchange
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {exchange.mutations}: {error}") from error
        finally:
            for peer in peers:
                peer.end(by_reset=False)
            self.driver.ask("close-listen l")

    def _outcome(self, exchange: Exchange, peers: list[Peer], draw: random.Random) -> str:
        deadline_s = time.monotonic() + LIMIT_S
        while self.driver.ask("accept c l") != ["ready"]:
            assert time.monotonic() < deadline_s, "it is neither accepted nor refused"
            spoken = [peer.go_on() for peer in peers]
            if all([peer.is_dropped() for peer in peers]):
                return "refused"
            if all(spoken):
                time.sleep(0.002)  # the time limits of the plugin pass
        try:
            return self._received(exchange, peers, draw, deadline_s)
        except CallFailedError as failure:
            assert failure.result in ERRORS, failure
            return f"failed {failure.result}"
        finally:
            self.driver.ask("close-receive c")

    def _received(self, exchange: Exchange, peers: list[Peer], draw: random.Random, deadline_s: float) -> str:
        reference = said(exchange)
        for number, size in enumerate(exchange.sizes):
            self.driver.ask(f"buffer to {size + GUARD} -1")
            self.driver.ask(f"irecv r c to {size} 0")
            while (answer := self.driver.ask("wait 0.002 r")) == ["pending"]:
                assert time.monotonic() < deadline_s, "the request neither ends nor fails"
                if all([peer.go_on() for peer in peers]):
                    for peer in peers:
                        peer.end(by_reset=bool(exchange.mutations) and draw.random() < 0.3)
            assert answer == ["done", str(size)], answer
            data = bytes.fromhex(self.driver.ask("bytes to")[0])
            values = reference.get(number, [])
            assert len(values) == size, f"message {number} was never said"
            wrong = [at for at in range(size) if data[at] not in values[at]]
            assert not wrong and data[size:] == bytes(GUARD), f"message {number} is wrong at {wrong[:5]}"
        return "whole"


def run(seeds: range, sanitizer: str = "", **env: str) -> Counter[str]:
    """The outcomes of `seeds`. Asserts that descriptors and threads are as before, and memory without a sanitizer."""
    target = Target(sanitizer, **env)
    with target.driver as driver:
        for seed in seeds[:WARM_UP]:
            target.run(seed)
        before, pages = driver.usage(), resident_pages(driver.pid)
        outcomes = Counter(target.run(seed)[0] for seed in seeds)
        after = driver.usage()
        for name in ("descriptors", "threads"):
            assert after[name] == before[name], f"{name}: {before[name]} before, {after[name]} after"
        grown = resident_pages(driver.pid) - pages
        assert sanitizer or grown < MOST_PAGES, f"the driver grew by {grown} pages"
        driver.ask("finalize")
        code = driver.close()
        assert code == 0, driver.errors()
    return outcomes


def resident_pages(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1])


def main(words: list[str]) -> int:
    if len(words) == 1:
        target = Target(NET_DRIVER_LOG="1")
        with target.driver as driver:
            outcome, exchange = target.run(int(words[0]))
            print(f"{outcome}; sizes {exchange.sizes}, mutations {exchange.mutations}\n{driver.errors()}")
    else:
        print(dict(run(range(int(words[0]), int(words[1])), *words[2:])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
