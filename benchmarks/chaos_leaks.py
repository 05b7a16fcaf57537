"""Finds what a finished job has left behind: processes, sockets, files, and keys and leases in etcd.

A job leaves in etcd what operators may query afterwards (spec, the control keys but the leader's, failures, ends,
refusals, events), none of it leased; and on a host the logs of workers that ended badly. All else is a leak.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from bagua_agent.etcd.keys import JobKeys
from tests.lab.etcd import EtcdCluster
from tests.lab.network import Host

_OPEN = {"01": "established", "08": "close-wait", "0A": "listening"}
_EVERYTHING = {"key": "AA==", "range_end": "AA=="}
_TORCHS_OWN = "torchinductor_"  # a cache that torch makes when it is imported
_LAB_MARK = "/lab/"  # keys of the lab's own


def of_processes(hosts: Iterable[Host]) -> list[str]:
    return [f"process left on {host.name}: {_command(pid)}" for host in hosts for pid in host.pids()]


def of_sockets(hosts: Iterable[Host]) -> list[str]:
    """TCP sockets that a process still holds, without those that the kernel is closing."""
    found = []
    for host in hosts:
        table = host.inside(lambda: Path("/proc/thread-self/net/tcp").read_text())
        for line in table.splitlines()[1:]:
            if state := _OPEN.get(line.split()[3]):
                found.append(f"socket left on {host.name}: {state}, {line.split()[1]} to {line.split()[2]}")
    return found


def of_files(directory: Path) -> list[str]:
    """directory: what /tmp was to a host. Logs of workers may stay; sockets, etcd's data, empty directories may not."""
    found = []
    for path in sorted(directory.iterdir()) if directory.exists() else []:
        if path.name.startswith(_TORCHS_OWN):
            continue
        contents = list(path.rglob("*")) if path.is_dir() else []
        files = [p for p in contents if stat.S_ISREG(p.lstat().st_mode)]
        is_log = bool(files) and not (path / "session.sock").exists() and not (path / "store").exists()
        if not is_log:
            inside = ", ".join(sorted(p.name for p in contents)) or "empty"
            found.append(f"left in {directory.name}: {path.name} ({inside})")
    return found


def of_store(etcd: EtcdCluster, job_id: str) -> list[str]:
    """Keys that no finished job leaves, and any lease at all: a lab has an etcd of its own."""
    member = etcd.leader
    keys = JobKeys(job_id)
    may_stay = (keys.failures, keys.finished_workers, keys.departures, keys.refusals, keys.events)
    single = {keys.spec, keys.desired, keys.generation, keys.meeting, keys.closing, keys.result}
    found = []
    for kv in member.call("kv/range", **_EVERYTHING).get("kvs", []):
        key = base64.b64decode(kv["key"]).decode()
        if int(kv.get("lease", 0)):
            found.append(f"key left in etcd, with a lease: {key}")
        elif key not in single and not key.startswith((*may_stay, _LAB_MARK)):
            found.append(f"key left in etcd: {key}")
    leases = member.call("lease/leases").get("leases", [])
    found += [f"lease left in etcd: {lease['ID']}" for lease in leases]
    return found


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return f"{pid}, just gone"
    return f"{pid} {os.fsdecode(b' '.join(words))[:120]}"
