"""Lists the hosts that do not acknowledge this process's packets, from the kernel's table of TCP connections.

A cut that drops packets shows nowhere else: both ends of it wait in the same collective as all ranks, and nothing
fails. Names only what TCP itself knows: it has sent again several times and heard nothing. A peer that does not read,
for it computes or is stopped, still acknowledges. Knows no generation: the caller says which sockets are too old.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# 0.2 s, then twice as long each time: about 1.4 s of silence. A busy network loses one, hardly three in a row.
RESENT_OFTEN = 3
# A connection that is only being made waits a second before each.
ASKED_OFTEN = 1

_TABLES = ("/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_ESTABLISHED, _SYN_SENT = 0x01, 0x02


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection of this host. resent: times in a row that the oldest unacknowledged segment was sent again."""

    inode: int
    remote_host: str
    is_connecting: bool
    resent: int

    @property
    def is_unanswered(self) -> bool:
        return self.resent >= (ASKED_OFTEN if self.is_connecting else RESENT_OFTEN)


def own_sockets() -> frozenset[int]:
    """Returns the inodes of the sockets that this process has now."""
    found = set()
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return frozenset()  # no descriptor left; nothing is known then
    for name in names:
        try:
            match = _SOCKET.fullmatch(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # closed meanwhile
        if match:
            found.add(int(match[1]))
    return frozenset(found)


def silent_hosts(hosts: Iterable[str], older: Collection[int]) -> tuple[str, ...]:
    """Returns those of `hosts` (addresses) that do not answer this process. older: sockets that don't count."""
    wanted = {_normal(h): h for h in hosts}
    own = own_sockets() - frozenset(older)
    silent = {
        wanted[c.remote_host]
        for table in _tables()
        for c in connections(table)
        if c.is_unanswered and c.inode in own and c.remote_host in wanted
    }
    return tuple(sorted(silent))


def connections(table: str) -> Iterator[Connection]:
    """Yields the connections that a text in the form of /proc/net/tcp lists; other states than those in which one waits
    for an answer are left out."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10:
            continue
        state = int(fields[3], 16)
        if state in (_ESTABLISHED, _SYN_SENT):
            yield Connection(
                inode=int(fields[9]),
                remote_host=_host(fields[2].partition(":")[0]),
                is_connecting=state == _SYN_SENT,
                resent=int(fields[6], 16),
            )


def _tables() -> Iterator[str]:
    for path in _TABLES:
        try:
            yield Path(path).read_text()
        except OSError:
            continue  # a kernel without it


def _host(digits: str) -> str:
    """Returns the address that the kernel prints as `digits`: words of 32 bits as they lie in memory."""
    raw = bytes.fromhex(digits)
    words = [raw[i : i + 4] for i in range(0, len(raw), 4)]
    if sys.byteorder == "little":
        words = [w[::-1] for w in words]
    packed = b"".join(words)
    return _normal(socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed))


def _normal(host: str) -> str:
    """Returns one text per address; a name stays what it is."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
