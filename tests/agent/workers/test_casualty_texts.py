"""torch's real messages about a lost peer are recognised: two real processes, one of them killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from bagua_agent.membership.failures.root_cause import Kind, classify
from bagua_agent.workers.exits.exit_cause import exit_cause

DEADLINE_S = 60.0

PEERS = """
import datetime, json, sys, time, traceback
import torch
import torch.distributed as dist

rank, port = int(sys.argv[1]), int(sys.argv[2])
patience = datetime.timedelta(seconds=20)
if rank == 1:
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=patience)
    print(store.port, flush=True)
else:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=patience)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=patience)
other = dist.new_group([0, 1], timeout=patience)
if rank == 1:
    store.set("up", "1")
    time.sleep(600)  # a bound: the test kills this process
store.wait(["up"])

def text_of(call):
    try:
        call()
    except Exception as error:
        print(json.dumps([f"{type(error).__name__}: {error}", traceback.format_exc()]), flush=True)

text_of(lambda: dist.monitored_barrier(other, timeout=datetime.timedelta(seconds=0.2)))
print("kill", flush=True)
sys.stdin.readline()
text_of(lambda: [dist.all_reduce(torch.ones(1 << 16)) for _ in range(50)])
text_of(lambda: [dist.all_reduce(torch.ones(1 << 16), group=other) for _ in range(50)])
text_of(lambda: dist.recv(torch.ones(4), 1))
text_of(lambda: store.get("never"))
dist.all_reduce(torch.ones(4))  # uncaught: torch's own excepthook prints it
"""


def test_texts_of_a_lost_peer(tmp_path: Path) -> None:
    script = tmp_path / "peers.py"
    script.write_text(PEERS)

    def start(rank: int, port: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, str(script), str(rank), port]
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    peer = start(1, "0")
    try:
        assert peer.stdout is not None
        survivor = start(0, peer.stdout.readline().strip())
        try:
            assert survivor.stdout is not None and survivor.stdin is not None
            said = [survivor.stdout.readline()]
            assert survivor.stdout.readline() == "kill\n"
            peer.kill()
            assert peer.wait(timeout=DEADLINE_S) == -signal.SIGKILL
            out, err = survivor.communicate("\n", timeout=DEADLINE_S)
        finally:
            survivor.kill()
            survivor.wait(timeout=DEADLINE_S)
    finally:
        peer.kill()
        peer.communicate(timeout=DEADLINE_S)
    said += out.splitlines()
    assert len(said) == 5, "each of the five must fail"
    for line in said:
        message, trace = json.loads(line)
        recorded = json.dumps({"message": {"message": message, "extraInfo": {"py_callstack": trace}}})
        cause = exit_cause(1, recorded)
        assert classify(cause.summary, cause.traceback_tail).kind is Kind.CASUALTY, cause.summary
    uncaught = exit_cause(survivor.returncode, None, err)
    assert classify(uncaught.summary, uncaught.traceback_tail).kind is Kind.CASUALTY, uncaught.summary
    killed = exit_cause(peer.returncode)
    assert classify(killed.summary).kind < Kind.CASUALTY
