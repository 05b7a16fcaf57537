"""Texts of very different length. Watch the last figure: rank 0 gets about as many words as the mean, 1.0.

bagua-launch --nproc-per-node 2 examples/load_balancing.py
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

import bagua_core as bagua

EPOCHS = 2
WORDS = 100
torch.set_num_threads(1)


class Texts(torch.utils.data.Dataset):
    """Each word follows from the one before, so that there is something to learn."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> torch.Tensor:
        numbers = random.Random(index)
        length = min(500, int(4 * numbers.paretovariate(1.2)))
        return (numbers.randrange(WORDS) + 7 * torch.arange(length + 1)) % WORDS


def next_words(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """No padding: all words of the batch in a row, and what follows each."""
    return torch.cat([text[:-1] for text in texts]), torch.cat([text[1:] for text in texts])


bagua.init_process_group()
net = nn.Sequential(nn.Embedding(WORDS, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, WORDS))
optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
loader = bagua.ElasticDataLoader(
    Texts(),
    global_batch_size=32,
    seed=0,
    collate_fn=next_words,
    balance=bagua.Balance(
        complexity_fn=len,
        similar_batches=8,
        mean_over="complexity",  # the loss below is a mean over words
    ),
)

for epoch in loader.epochs(EPOCHS):
    words = steps = 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        words += len(inputs)
        steps += 1
    every = bagua.allreduce(torch.tensor([float(words), 1.0]))
    if bagua.get_rank() == 0:
        share = words / (every[0] / every[1])
        print(
            f"epoch {epoch}: {steps} steps, loss {loss:.3f}; {share:.3f} of a worker's mean words", flush=True
        )
