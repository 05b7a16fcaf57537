"""In the style of the original's SQuAD example: rank 0 loads first, gradients accumulate and are clipped, a warm-up
schedule steps with the optimizer.

Writes <out>/<rank>: optimizer steps, a digest of the parameters.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import bagua_core.torch_api as bagua
from bagua_core.torch_api.algorithms import gradient_allreduce

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()
ACCUMULATION = 2

bagua.init_process_group()
vocabulary = args.out / "vocabulary"
if bagua.get_rank() != 0:
    torch.distributed.barrier()
    assert vocabulary.exists(), "rank 0 loads first"
else:
    vocabulary.touch()
    torch.distributed.barrier()
torch.manual_seed(42)
model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.LayerNorm(48), nn.Linear(48, 6))
words = torch.randint(50, (96, 6))
data_set = TensorDataset(words, words.argmax(1))
sampler = DistributedSampler(data_set, num_replicas=bagua.get_world_size(), rank=bagua.get_rank())
loader = DataLoader(data_set, sampler=sampler, batch_size=8)
decayed = [p for n, p in model.named_parameters() if not n.endswith("bias")]
others = [p for n, p in model.named_parameters() if n.endswith("bias")]
groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, eps=1e-8)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
model = model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())

global_step = 0
model.zero_grad()
for _epoch in range(2):
    for step, (inputs, answers) in enumerate(loader):
        model.train()
        loss = nn.functional.cross_entropy(model(inputs), answers) / ACCUMULATION
        loss.backward()
        if (step + 1) % ACCUMULATION == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
            global_step += 1
torch.distributed.barrier()
assert scheduler.last_epoch == global_step
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
digest = hashlib.sha256(parameters).hexdigest()
(args.out / str(bagua.get_rank())).write_text(f"{global_step} {digest}")
