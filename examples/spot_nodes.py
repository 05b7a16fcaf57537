"""Spot nodes: watch the second run begin at the step at which the first one was preempted, with no sample used twice.

    bagua-launch --nproc-per-node 2 --rdzv-id spot --checkpoint-dir /tmp/spot --ledger /tmp/spot/ledger \\
        examples/spot_nodes.py --preempt-at 40
    bagua-launch --nproc-per-node 2 --rdzv-id spot --checkpoint-dir /tmp/spot --ledger /tmp/spot/ledger \\
        examples/spot_nodes.py

The first run sends SIGTERM to its own agent at step 40, as happens when a provider takes a spot node away. The workers
leave at the next step boundary and write a last checkpoint; bagua-launch exits with 143. The second run may have any
number of workers. With a second node of the same job, that one would go on by itself.
"""

import argparse
import os
import signal
import time

import torch
import torch.nn.functional as F

import bagua_core as bagua


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--preempt-at", type=int, default=-1, help="step at which this node gets SIGTERM")
    args = parser.parse_args()

    bagua.init_process_group()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
    inputs = torch.randn(2048, 8)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.prod(1, keepdim=True))
    loader = bagua.ElasticDataLoader(dataset, global_batch_size=64, seed=0)

    first = True
    for _ in loader.epochs(args.epochs):
        for x, y in loader:
            if first and bagua.get_rank() == 0:
                print(f"the run begins at step {loader.step}", flush=True)
            first = False
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            bagua.report(loss=loss.item())
            time.sleep(0.005)  # as if there were more to compute
            if loader.step == args.preempt_at and bagua.get_rank() == 0:
                os.kill(os.getppid(), signal.SIGTERM)  # the agent is the parent of its workers
    if bagua.get_rank() == 0:
        print(f"trained for {loader.step} steps", flush=True)


if __name__ == "__main__":
    main()
