"""Handwritten digits. Watch for: the worker that the failpoint kills, the other one goes on, and a third joins.

    python examples/digits.py                                      # one process
    bagua-launch --nproc-per-node 2 --failpoints 'commit.after=kill@30#1' examples/digits.py

No sample is lost or repeated. `pip install scikit-learn`, which brings the 1,797 images; less than a minute.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import bagua_core as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=15)
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
bagua.init_process_group()
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
train, held_out = torch.utils.data.TensorDataset(x[:1440], y[:1440]), (x[1440:], y[1440:])

net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
loader = bagua.ElasticDataLoader(train, global_batch_size=64, seed=0)

for epoch in loader.epochs(args.epochs):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        bagua.report(loss=loss.item())
        time.sleep(0.04)  # there is time to see what happens
    if bagua.get_rank() == 0:
        right = (net(held_out[0]).argmax(1) == held_out[1]).float().mean()
        print(f"epoch {epoch}: {bagua.get_world_size()} workers, {right:.1%} right", flush=True)
