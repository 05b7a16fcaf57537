"""A small character transformer on Python's own sources. Watch for: the loss falls on when you kill a worker.

    python examples/char_lm.py                                  # one process
    bagua-launch --nproc-per-node 2 examples/char_lm.py         # two, elastic

Kill a worker, start another node, press Ctrl-C on one: the job goes on, and no sample is lost or repeated.
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import bagua_core as bagua

CONTEXT = 64


def read_text(size: int) -> torch.Tensor:
    """The first `size` characters of the standard library's sources, as byte values."""
    library = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(library.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            break
    return torch.frombuffer(text[:size], dtype=torch.uint8).long().clamp(max=127)


class Windows(torch.utils.data.Dataset):
    """Windows of CONTEXT characters and what follows each character."""

    def __init__(self, text):
        self.text = text

    def __len__(self):
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index):
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class CharacterModel(nn.Module):
    def __init__(self, width=96, layers=2, heads=4):
        super().__init__()
        self.characters = nn.Embedding(128, width)
        self.places = nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x):
        h = self.characters(x) + self.places.weight[: x.shape[1]]
        return self.head(self.blocks(h, mask=self.mask, is_causal=True))


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluate(model, windows):
    """Mean loss over `windows`; every worker takes its part and the sums are reduced."""
    model.eval()
    sums = torch.zeros(2)
    for index in range(bagua.get_rank(), len(windows), bagua.get_world_size()):
        x, y = windows[index]
        sums += torch.tensor([loss_of(model, x[None], y[None]).item(), 1.0])
    total, count = bagua.allreduce(sums)
    model.train()
    return total.item() / count.item()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--characters", type=int, default=300_000, help="length of the training text")
    parser.add_argument("--batch", type=int, default=64, help="global batch size")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--loader-workers", type=int, default=0)
    args = parser.parse_args()

    bagua.init_process_group()
    torch.manual_seed(0)
    text = read_text(args.characters + 16_384)
    train, held_out = Windows(text[: args.characters]), Windows(text[args.characters :])

    net = CharacterModel()
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer], algorithm="gradient_allreduce")
    loader = bagua.ElasticDataLoader(
        train, global_batch_size=args.batch, seed=0, num_workers=args.loader_workers
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    bagua.register_state("scheduler", scheduler)

    shown = time.monotonic()
    for epoch in loader.epochs(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
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
