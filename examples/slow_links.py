"""Decentralized training for slow links: watch how far the workers' models drift apart, and that they end as one.

    bagua-launch --nproc-per-node 2 examples/slow_links.py
    bagua-launch --nproc-per-node 2 examples/slow_links.py --algorithm local_sgd
    bagua-launch --nproc-per-node 2 examples/slow_links.py --algorithm streaming_diloco
    bagua-launch --nproc-per-node 2 examples/slow_links.py --algorithm power_sgd               # equal replicas
    bagua-launch --nproc-per-node 2 examples/slow_links.py --algorithm gradient_allreduce      # equal replicas

Each worker steps with its own gradient and sends the change of its weights to its neighbours, in 8 bits instead of 32.
On one machine nothing is slow: the figures for links of 100 Mbit/s are in benchmarks/results/tradeoff-2026-11-21.md.
"""

import argparse

import torch
from char_lm import CharacterModel, Windows, loss_of, read_text
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import bagua_core as bagua

ALGORITHMS = {
    "low_precision_decentralized": bagua.algorithms.LowPrecisionDecentralized(hierarchical=False),
    "decentralized": bagua.algorithms.Decentralized(hierarchical=False),
    "local_sgd": bagua.algorithms.LocalSGD(sync_every=16),
    "streaming_diloco": bagua.algorithms.StreamingDiLoCo(sync_every=16, compress="int4"),
    # torch's own hook: gradients of low rank, behind ten steps with whole ones
    "power_sgd": bagua.algorithms.Hook(
        powerSGD_hook.powerSGD_hook,
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10),
    ),
    "gradient_allreduce": bagua.algorithms.GradientAllreduce(),
}


@torch.no_grad()
def drift(net):
    """Distance of a worker's weights from the workers' mean, relative to the mean's length, averaged over workers."""
    weights = torch.nn.utils.parameters_to_vector(net.parameters())
    mean = bagua.allreduce(weights, op=bagua.ReduceOp.AVG)
    return bagua.allreduce((weights - mean).norm() / mean.norm(), op=bagua.ReduceOp.AVG).item()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="low_precision_decentralized")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--characters", type=int, default=100_000, help="length of the training text")
    args = parser.parse_args()

    bagua.init_process_group()
    torch.manual_seed(0)
    net = CharacterModel()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer], algorithm=ALGORITHMS[args.algorithm])
    loader = bagua.ElasticDataLoader(Windows(read_text(args.characters)), global_batch_size=64, seed=0)

    for epoch in loader.epochs(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            bagua.report(loss=loss.item())
        apart = drift(net)
        if bagua.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, drift {apart:.2e}", flush=True)
    apart = drift(net)  # behind the loop: the replicas have been averaged
    if bagua.get_rank() == 0:
        print(f"at the end: drift {apart:.2e}", flush=True)


if __name__ == "__main__":
    main()
