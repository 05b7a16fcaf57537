"""A thread of the agent that waits for a message of a stream is woken by it, and ten times a second by nothing else."""

from __future__ import annotations

import subprocess
import sys

from tests.lab.wait import HANG_S

# A stream that is silent for some time and then has one message. Its reader's own wakeups are counted by the kernel.
READ_STREAM = """
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import bagua_agent.job.run as run

run._load_loop()
SILENCE_S = 2.0
said = threading.Event()

def speak(request, context):
    said.wait(SILENCE_S)
    yield b"late"

handler = grpc.method_handlers_generic_handler("t", {"S": grpc.unary_stream_rpc_method_handler(speak)})
server = grpc.server(ThreadPoolExecutor(1))
server.add_generic_rpc_handlers((handler,))
port = server.add_insecure_port("127.0.0.1:0")
server.start()

def waits():
    status = Path("/proc/thread-self/status").read_text()
    return int(status.split("\\nvoluntary_ctxt_switches:")[1].split()[0])

def read():
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    stream = channel.unary_stream("/t/S")(b"")
    before = waits()
    assert next(stream) == b"late"
    print(waits() - before)
    channel.close()

reader = threading.Thread(target=read)
reader.start()
reader.join()
server.stop(0).wait()
"""


def test_a_reader_of_a_silent_stream_sleeps() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ_STREAM], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    # in two seconds; with gRPC's own pace twenty and more
    assert int(done.stdout) < 15
