"""A model whose gradients are large for a slow link, and whose script asks for flat sums: what autotuning should mend.

Steps are as fast as they can be until there is <out>/hurry; then the training ends after the epoch. Each worker writes
<out>/ends/<worker id>.json.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import bagua_core as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int, default=40)
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument(
    "--step-s", type=float, default=0.0, help="sleep as long in each step, so that it dominates"
)
parser.add_argument("--backwards", action="store_true", help="use the layers in the reverse of their order")
args = parser.parse_args()


class Backwards(nn.ModuleList):
    """Its gradients are ready in the order in which it registers its layers, and not in the reverse."""

    def forward(self, x):
        for layer in reversed(self):
            x = layer(x)
        return x


torch.set_num_threads(1)
bagua.init_process_group()
torch.manual_seed(1)
layers = [nn.Linear(args.width, args.width, bias=False) for _ in range(args.layers)]
net = Backwards(layers) if args.backwards else nn.Sequential(*layers)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
data = torch.utils.data.TensorDataset(torch.randn(args.samples, args.width))
loader = bagua.ElasticDataLoader(data, global_batch_size=4, seed=1)
for _ in loader.epochs(args.epochs):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        time.sleep(args.step_s)
    over = bagua.allreduce(torch.tensor([float((args.out / "hurry").exists())]), bagua.ReduceOp.MAX)
    if over.item():
        break

(args.out / "ends").mkdir(exist_ok=True)
bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
names = {id(p): name for name, p in net.named_parameters()}
end = {
    "worker": os.environ["BAGUA_WORKER_ID"],
    "parameters": hashlib.sha256(bits).hexdigest(),
    "buckets": len(model._exchange.buckets_of_parameters()),
    "order": [names[id(p)] for _, members in model._exchange.buckets_of_parameters() for p in members],
    "operation": type(model._exchange._operation).__name__,
}
part = args.out / "ends" / f"{end['worker']}.part"
part.write_text(json.dumps(end))
part.rename(part.with_suffix(".json"))
loader.close()
