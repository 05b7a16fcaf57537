"""A kernel of its own boots with control groups of each kind; limits and kills for lack of memory are found in each.

The kernel is Debian's user-mode Linux: one process of this machine, with this machine's files as its root, read-only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNEL = shutil.which("linux.uml")
BOOT_S = 120  # takes 4 s where a processor is free
LIMIT_BYTES = 64 << 20

pytestmark = [
    pytest.mark.skipif(KERNEL is None, reason="no user-mode Linux here; install user-mode-linux"),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts of the booted kernel need root"),
]

BOOT = """#!/bin/sh
mount -t proc proc /proc && mount -t sysfs sys /sys && cd /sys/fs/cgroup && {mounts} &&
PYTHONPATH={root}/protos:{root} {python} {program} {top}
exec halt -f
"""
# Loads the module alone: its package imports torch.
PROGRAM = f"""
import importlib.util, json, os, sys
from pathlib import Path
from bagua_agent.workers.exits.memory_kills import MemoryKills

spec = importlib.util.spec_from_file_location("heal_memory", "{ROOT}/bagua_core/elastic/state/heal_memory.py")
heal_memory = sys.modules["heal_memory"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(heal_memory)
before = heal_memory.available_bytes()
group = Path(sys.argv[1], "job")
group.mkdir()
for name in ("memory.limit_in_bytes", "memory.max"):
    if (group / name).exists():
        (group / name).write_text("{LIMIT_BYTES}")
(group / "cgroup.procs").write_text(str(os.getpid()))
kills, counter = MemoryKills(), MemoryKills(Path("/no log"))
pid = os.fork()
if pid == 0:
    taken = b"1" * {2 * LIMIT_BYTES}
    os._exit(0)
_, status = os.waitpid(pid, 0)
found = dict(before=before, within=heal_memory.available_bytes(), status=status, pid=pid)
found.update(record=kills.record_of(pid), count=counter.record_of(pid))
print("\\nfound", json.dumps(found), flush=True)
"""
TMPFS = 'mount -t tmpfs groups . && cd "$PWD"'
VERSION_1 = f"{TMPFS} && mkdir memory && mount -t cgroup -o memory groups memory"
UNIFIED = "mkdir unified && mount -t cgroup2 groups unified"
KINDS = {
    "version 1": (VERSION_1, "memory"),
    "hybrid": (f"{VERSION_1} && {UNIFIED}", "memory"),
    "hybrid, memory in version 2": (
        f"{TMPFS} && mkdir pids && mount -t cgroup -o pids groups pids && {UNIFIED} && "
        "echo +memory > unified/cgroup.subtree_control",
        "unified",
    ),
    "version 2": ('mount -t cgroup2 groups . && cd "$PWD" && echo +memory > cgroup.subtree_control', "."),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_booted_kernel_limits_and_kills(kind: str, tmp_path: Path) -> None:
    mounts, top = KINDS[kind]
    program, boot = tmp_path / "program.py", tmp_path / "boot"
    program.write_text(PROGRAM)
    boot.write_text(
        BOOT.format(
            mounts=mounts, root=ROOT, python=sys.executable, program=program, top=f"/sys/fs/cgroup/{top}"
        )
    )
    boot.chmod(0o755)
    assert KERNEL is not None
    done = subprocess.run(
        # The kernel runs its programs in processes of its own; a group is killed whole.
        ["timeout", "--signal=KILL", str(BOOT_S), KERNEL, "mem=256M", "root=/dev/root", "rootfstype=hostfs",
         "rootflags=/", "ro", f"init={boot}", "con=null", "con0=null,fd:1", "quiet"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=2 * BOOT_S, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    if not lines and "ptrace" in done.stdout:
        pytest.skip(f"user-mode Linux may not trace its programs here: {done.stdout.strip()[-200:]}")
    assert len(lines) == 1, done.stdout
    found = json.loads(lines[0].removeprefix("found "))
    assert found["within"] <= LIMIT_BYTES < found["before"]
    assert found["status"] == 9
    assert f"Killed process {found['pid']} (" in found["record"]
    assert found["count"] == "the kernel killed 1 process(es) of this cgroup for lack of memory"
