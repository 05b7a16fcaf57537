"""A switch with a delay: passes on every frame between its ports, so long after it came. Standard library only.

    python relay_forwarder.py DELAY_S PORT...

Runs in the network namespace of the ports, as root, until SIGTERM; then prints its account as a line of JSON. Learns
as a switch does which hardware address is behind which port. Frames travel as the kernel hands them over, large ones
in one piece and without checksums (the virtio header says what is left to do), so a link of 1 Gbit/s is 2000 frames a
second and not 80 000. Keeps no bandwidth limit: the ports' own queues do.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections import deque

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
ETH_P_ALL = 3
HEADER_BYTES = 10  # virtio_net_hdr, before each frame
FRAME_BYTES = HEADER_BYTES + 14 + 65536 + 64
# Several times what a port's queue holds at 10 Gbit/s: where a link is too slow its queue drops, and not the relay.
BUFFER_BYTES = 256 * 1024 * 1024
TAKEN_AT_ONCE = 16  # frames of one port, before those that are due are sent
LATE_S = 0.001


def open_port(name: str) -> socket.socket:
    # protocol 0 receives nothing until it is bound, so no frame of another port comes in
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    port.bind((name, ETH_P_ALL))
    return port


class Relay:
    def __init__(self, names: list[str], delay_s: float) -> None:
        self._delay_s = delay_s
        self._ports = [open_port(name) for name in names]
        self._by_descriptor = {port.fileno(): port for port in self._ports}
        self._poll = select.poll()  # select.select refuses descriptors above 1,023
        for port in self._ports:
            self._poll.register(port, select.POLLIN)
        self._behind: dict[bytes, socket.socket] = {}  # hardware address -> port
        # the delay is the same for all, so the first to come is the first to go
        self._waiting: deque[tuple[float, socket.socket, bytes]] = deque()
        self.forwarded = self.dropped = self.late = 0
        self.latest_s = 0.0
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else 1.0
            for descriptor, _ in self._poll.poll(wait_s * 1000):
                self._take(self._by_descriptor[descriptor])
            self._send_due()

    def _take(self, port: socket.socket) -> None:
        due_s = time.monotonic() + self._delay_s
        for _ in range(TAKEN_AT_ONCE):
            try:
                frame = port.recv(FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:  # the port went down: the cable was pulled
                self.dropped += 1
                return
            self._behind[frame[HEADER_BYTES + 6 : HEADER_BYTES + 12]] = port
            self._waiting.append((due_s, port, frame))

    def _send_due(self) -> None:
        waiting = self._waiting
        while waiting:
            now_s = time.monotonic()
            due_s, source, frame = waiting[0]
            if due_s > now_s:
                return
            waiting.popleft()
            late_s = now_s - due_s
            self.latest_s = max(self.latest_s, late_s)
            self.late += late_s > LATE_S
            target = self._behind.get(frame[HEADER_BYTES : HEADER_BYTES + 6])
            if target is not None:
                self._send(target, frame)
            else:  # to all, or to one that has not spoken yet
                for port in self._ports:
                    if port is not source:
                        self._send(port, frame)

    def _send(self, port: socket.socket, frame: bytes) -> None:
        try:
            port.send(frame)
            self.forwarded += 1
        except OSError:  # a full queue, or a port that is down: lost, as in any network
            self.dropped += 1


def be_prompt() -> str:
    """Before all that trains on this machine: a late relay is a slower network. How that was reached."""
    gc.disable()
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        return "fifo"
    except OSError:
        pass
    try:
        os.nice(-20)
        return "nice"
    except OSError:
        return "none"


def main() -> None:
    relay = Relay(sys.argv[2:], float(sys.argv[1]))

    def end(*_: object) -> None:
        relay.ended = True

    signal.signal(signal.SIGTERM, end)
    priority = be_prompt()
    print("ready", flush=True)
    relay.run()
    account = {
        "forwarded": relay.forwarded,
        "dropped": relay.dropped,
        "late": relay.late,
        "latest_s": relay.latest_s,
        "cpu_s": time.process_time(),
        "priority": priority,
    }
    print(json.dumps(account), flush=True)


if __name__ == "__main__":
    main()
