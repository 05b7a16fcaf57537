"""The script of jobs whose unit of commit is the round: local steps as long as the test asks.

Each worker that reaches the end writes <out>/ends/<worker id>.json: a digest of its parameters, how many samples it
drew, and how far its model was from the anchor at the first batch of a round, at most. <out>/drawn/<worker id> grows by
a byte for each local batch.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import bagua_core as bagua
from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.elastic.heal import heal
from bagua_core.elastic.step import runtime

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--sync-every", type=int, default=10)
parser.add_argument(
    "--sample-s",
    type=float,
    default=0.002,
    help="time of a sample until there is <out>/hurry; eight times as long in the last epoch, which waits for its test",
)
parser.add_argument("--slow-slot", type=int, help="its workers take three times as long, also in a hurry")
parser.add_argument("--compress", default="none")
parser.add_argument("--async", action="store_true", dest="is_async", help="average in the background")
parser.add_argument("--loader-workers", type=int, default=0)
parser.add_argument(
    "--misses-vote-in", type=int, help="the worker in slot 1 loses the result of this round's vote"
)
parser.add_argument(
    "--chunk-s", type=float, default=0.0, help="of each chunk of a copy of the state, which are small"
)
parser.add_argument("--break-in", type=int, help="leave the loop in this round, and end the training")
parser.add_argument(
    "--confirms", action="store_true", help="end each round after a batch, and have it confirmed"
)
args = parser.parse_args()

WORKER, SLOT = os.environ["BAGUA_WORKER_ID"], int(os.environ["BAGUA_SLOT"])
torch.set_num_threads(1)
x = torch.randn(args.samples, 16, generator=torch.Generator().manual_seed(1))
y = (x.sum(1) > 0).long()
torch.manual_seed(SLOT)
net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
loader = bagua.ElasticDataLoader(
    torch.utils.data.TensorDataset(x, y), args.batch, num_workers=args.loader_workers
)
algorithm = bagua.algorithms.LocalSGD(
    sync_every=args.sync_every, outer_optimizer="nesterov", compress=args.compress, unit="round"
)
if args.is_async:
    algorithm = bagua.algorithms.AsyncModelAverage(
        sync_interval_ms=0, unit="round", sync_every=args.sync_every
    )
model = bagua.DistributedDataParallel(net, [optimizer], algorithm=algorithm)

engine = runtime.engine()


def lose_vote(reduced=engine._reduced):
    def lost(pair, is_joint=False):
        if engine.state.name.step != args.misses_vote_in:
            return reduced(pair, is_joint)
        args.misses_vote_in = None
        print(f"missed the vote of round {engine.state.name.step}", flush=True)
        return engine.reduction_failed(CollectiveFailed("its result was lost"))

    engine._reduced = lost


if args.misses_vote_in is not None and SLOT == 1:
    lose_vote()


if args.chunk_s:
    heal.CHUNK_BYTES, read = 1000, heal.pinned_chunks.read
    heal.pinned_chunks.read = lambda *chunk: time.sleep(args.chunk_s) or read(*chunk)


def distance_from_anchor() -> float:
    """Of the model; 0 before the job's first round."""
    tensors = model.travelling()
    if args.is_async or not int(tensors["clock"]):
        return 0.0
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return float((weights - tensors["anchor.0"]).abs().max())


for name in ("drawn", "ends"):
    (args.out / name).mkdir(exist_ok=True)
slow = 3.0 if args.slow_slot == SLOT else 1.0
drawn, distance, breaks = 0, 0.0, False
of_round: int | None = None  # the newest one of which a batch was drawn
with open(args.out / "drawn" / WORKER.replace("/", "_"), "ab", buffering=0) as batches:
    for epoch in loader.epochs(args.epochs):
        for inputs, targets in loader:
            if of_round != loader.step:
                of_round, distance = loader.step, max(distance, distance_from_anchor())
            drawn += len(targets)
            batches.write(b".")
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            hurries = (args.out / "hurry").exists()
            waits = 8 if epoch == args.epochs - 1 and not hurries else 1
            if slow > 1 or not hurries:
                time.sleep(args.sample_s * len(targets) * slow * waits)
            if args.confirms:
                loader.end_step(confirmed=True)
            breaks = args.break_in is not None and loader.step >= args.break_in
            if breaks:
                break
        if breaks:
            bagua.shutdown()
            break

digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
end = {"worker": WORKER, "parameters": digest, "drawn": drawn, "distance": distance}
if args.is_async:
    end["averages"] = model._exchange.rounds
(args.out / "ends" / f"{WORKER.replace('/', '_')}.json").write_text(json.dumps(end))
