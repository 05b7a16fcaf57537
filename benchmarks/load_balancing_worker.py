"""One worker of benchmarks.load_balancing's jobs: predicts the next word; a step's time grows with its words.

The same model and texts for every system; only the assignment of texts differs. Writes <out>/<rank>.json: the seconds
of each step that counts, and the words that it trained on.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.load_balancing_texts import VOCABULARY

WARMUP_STEPS = 40


class Texts(Dataset):
    def __init__(self, path):
        saved = torch.load(path)
        self.words, self.starts = saved["words"], saved["starts"].tolist()

    def __len__(self):
        return len(self.starts) - 1

    def __getitem__(self, index):
        return self.words[self.starts[index] : self.starts[index + 1]]

    def lengths(self):
        return [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)]


def next_words(batch):
    """No padding: all words of the batch in a row, and what follows each."""
    words = torch.cat(batch)
    return words, torch.roll(words, -1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--device-us", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = Texts(args.texts)
    lengths = data.lengths()
    net = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, VOCABULARY))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if args.system.startswith("ddp"):
        rank, model, batches = with_ddp(args, net, data, lengths)
    else:
        rank, model, batches = with_loader(args, net, optimizer, data, lengths)
    seconds, words = [], []
    began_s = time.perf_counter()
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        # a device's work: it leaves the processor to the other workers
        time.sleep(args.device_us * 1e-6 * len(inputs))
        optimizer.step()
        now_s = time.perf_counter()
        seconds.append(now_s - began_s)
        words.append(len(inputs))
        began_s = now_s
        if len(seconds) == WARMUP_STEPS + args.steps:
            break
    result = {"seconds": seconds[WARMUP_STEPS:], "words": words[WARMUP_STEPS:]}
    (args.out / f"{rank()}.json").write_text(json.dumps(result))


def with_ddp(args, net, data, lengths):
    from bagua_core.torch_api.contrib.load_balancing_data_loader import LoadBalancingDistributedSampler

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    if args.system == "ddp":
        sampler = DistributedSampler(data, seed=0)
    else:
        sampler = LoadBalancingDistributedSampler(data, complexities=lengths)
    loader = DataLoader(data, args.batch // workers, sampler=sampler, collate_fn=next_words)

    def batches():
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    return lambda: rank, nn.parallel.DistributedDataParallel(net), batches()


def with_loader(args, net, optimizer, data, lengths):
    import bagua_core as bagua

    balance = {
        "elastic": None,
        "elastic, balanced": bagua.Balance(complexities=lengths),
        "elastic, similar": bagua.Balance(complexities=lengths, similar_batches=16),
    }[args.system]
    bagua.init_process_group()
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
    loader = bagua.ElasticDataLoader(data, args.batch, balance=balance, collate_fn=next_words)

    def batches():
        for _ in loader.epochs(1000):
            yield from loader

    slot = int(os.environ["BAGUA_SLOT"])
    return lambda: slot, model, batches()


if __name__ == "__main__":
    main()
