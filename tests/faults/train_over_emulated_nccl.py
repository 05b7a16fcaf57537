"""train.py in a worker that has NCCL, as nccl_over_gloo.py emulates it: what gradients travel by is not Gloo for it.

A worker that joins while there is <out>/dies-<its slot> takes that file away and dies.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from bagua_core.elastic.step import script_inputs
from tests.core.communication.nccl_over_gloo import DEVICE, Emulation

OUT = Path(sys.argv[sys.argv.index("--out") + 1])
SLOT = os.environ["BAGUA_SLOT"]


def say(text):
    print(f"emulated NCCL: {text}", file=sys.stderr, flush=True)


def joining(rank):
    try:
        (OUT / f"dies-{SLOT}").rename(OUT / f"died-{SLOT}")
    except FileNotFoundError:
        return
    say("dies while it joins")
    os.kill(os.getpid(), signal.SIGKILL)


emulation = Emulation(os.environ["BAGUA_BIND_HOST"], joining)
emulation.install(setattr)
script_inputs.gpus_of = lambda parameters: (DEVICE,)
sys.argv[0] = str(Path(__file__).with_name("train.py"))
runpy.run_path(sys.argv[0], run_name="__main__")
say(f"did {emulation.calls.count('allReduce')} allreduces")
