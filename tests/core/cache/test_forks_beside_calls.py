"""A process that is forked while other threads use the node's store does not wait for what they held."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.lab.wait import HANG_S

FORKS = 60
SCRIPT = f"""
import os, sys, threading, time
from pathlib import Path
from bagua_core.cache.fault_notices import FaultNotices
from bagua_core.cache.lmdb_store import LmdbStore
from bagua_core.cache.stores import Item

store = LmdbStore(Path(sys.argv[1]), 64 << 20, FaultNotices(None, "test"), kept_free_bytes=0)
calls, over = [0, 0], threading.Event()

def write():
    while not over.is_set():
        store.write([Item(b"%d" % (calls[0] % 100), bytearray(3000), True)])
        calls[0] += 1

def ask():
    while not over.is_set():
        store.usage()
        calls[1] += 1

threads = [threading.Thread(target=each) for each in (write, ask)]
for thread in threads:
    thread.start()
stuck = 0
for _ in range({FORKS}):
    child = os.fork()
    if child == 0:
        os._exit(0)
    end_s = time.monotonic() + 10
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > end_s:
            stuck += 1
            os.kill(child, 9)
            os.waitpid(child, 0)
            break
        time.sleep(0.0005)
    if stuck:
        break
over.set()
for thread in threads:
    thread.join()
print(f"stuck {{stuck}}, calls {{min(calls) > 0}}")
"""


def test_a_fork_waits_for_calls_of_other_threads(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "stuck 0, calls True", done.stdout
