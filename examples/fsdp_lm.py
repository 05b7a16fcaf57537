"""A GPT-style model, sharded by torch's fully_shard. Watch for: a killed worker takes only its replica with it.

    python examples/fsdp_lm.py                                                      # one process
    bagua-launch --replica-size 2 --nproc-per-node 4 examples/fsdp_lm.py            # two replicas of two workers
    bagua-launch --replica-size 2 --nproc-per-node 2 --nnodes 1:4 examples/fsdp_lm.py    # prints the line for others
    bagua-launch --replica-size 4 --nproc-per-node 4 examples/fsdp_lm.py --width 512 --blocks 8    # 25 M parameters

Each replica holds one copy of the model, divided over its workers. Kill a worker: its replica goes, the others go on,
and a new replica joins them. No sample is lost or repeated.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from char_lm import CONTEXT, Windows, read_text
from torch import nn
from torch.distributed.fsdp import fully_shard

import bagua_core as bagua

CHARACTERS = 128
HEADS = 4


class Block(nn.Module):
    """Causal attention and two linear layers, each behind a normalization."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h):
        batch, length, width = h.shape
        found = self.queries_keys_values(self.attention_norm(h))
        q, k, v = found.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.joined(seen.transpose(1, 2).reshape(batch, length, width))
        return h + self.layers(self.norm(h))


class LanguageModel(nn.Module):
    def __init__(self, width=96, blocks=3):
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, HEADS) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, x, y):
        """Mean loss of telling the characters y that follow those of x; both are [batch, length]."""
        h = self.characters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluate(model, windows, batch=32):
    """Mean loss over `windows`. Each replica takes its part; its workers run each forward together."""
    model.eval()
    sums = torch.zeros(2)
    for begin in range(bagua.replica_rank() * batch, len(windows), bagua.replica_count() * batch):
        pairs = [windows[index] for index in range(begin, min(begin + batch, len(windows)))]
        x, y = (torch.stack(tensors) for tensors in zip(*pairs, strict=True))
        sums += torch.tensor([model(x, y).item() * len(pairs), len(pairs)])
    total, count = bagua.allreduce(sums)
    model.train()
    return total.item() / count.item()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--characters", type=int, default=150_000, help="length of the training text")
    parser.add_argument("--batch", type=int, default=32, help="global batch size")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=96, help=f"values of a character, a multiple of {HEADS}")
    parser.add_argument("--blocks", type=int, default=3, help="number of blocks")
    args = parser.parse_args()

    bagua.init_process_group()  # waits for the other workers of this replica
    torch.manual_seed(0)
    text = read_text(args.characters + 16_384)
    train, held_out = Windows(text[: args.characters]), Windows(text[args.characters :])

    net = LanguageModel(args.width, args.blocks)
    mesh = bagua.shard_mesh()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if bagua.get_rank() == 0:
        whole, own = (
            sum(p.numel() for p in net.parameters()),
            sum(p.to_local().numel() for p in net.parameters()),
        )
        print(f"{own} of {whole} parameters are on this worker", flush=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer], algorithm="gradient_allreduce")
    loader = bagua.ElasticDataLoader(train, global_batch_size=args.batch, seed=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    bagua.register_state("scheduler", scheduler)

    shown = time.monotonic()
    for epoch in loader.epochs(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            bagua.report(loss=loss.item())
            if not bagua.is_launched() and time.monotonic() - shown > 1:
                shown = time.monotonic()
                print(f"epoch {epoch}  loss {loss.item():.3f}", flush=True)
        held_out_loss = evaluate(model, held_out)
        if bagua.get_rank() == 0:
            print(f"epoch {epoch}: evaluation loss {held_out_loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
