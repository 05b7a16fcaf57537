"""Rank 1 of a world of two, in a process of its own: does two reductions, then stays without a word."""

import sys
import time

import torch
from torch.distributed import FileStore

from bagua_core.communication.communicator import AbortFlag
from bagua_core.communication.transports.gloo import build_gloo

print("imported", flush=True)
store = FileStore(sys.argv[1], 2)
communicator = build_gloo(1, 1, 2, store, "127.0.0.1", 20.0, AbortFlag())
communicator.allreduce(torch.ones(4)).wait()
communicator.allreduce(torch.ones(4)).wait()
print("idle", flush=True)
time.sleep(60.0)  # a bound, not a signal: the test ends this process
