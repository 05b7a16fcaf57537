"""What the three examples of streams share: records of noisy waves, and a training that loses a worker on its way."""

import argparse
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import bagua_core as bagua

RECORDS, SHARDS = 1200, 6
EPOCHS = 6
WIDTH, KINDS = 32, 4


def records(shard):
    """The records of a shard: WIDTH values of a wave with noise, and which of KINDS frequencies it has."""
    random = np.random.default_rng(shard)
    for _ in range(RECORDS // SHARDS):
        kind = int(random.integers(KINDS))
        phases = np.linspace(0, 2 * np.pi * (kind + 1), WIDTH) + random.uniform(0, 2 * np.pi)
        yield (np.sin(phases) + random.normal(0, 0.5, WIDTH)).astype(np.float32), kind


def prepared(write):
    """The directory named by --data, which `write` has filled: by one worker, before the others read it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("waves"), help="a directory that all nodes see")
    directory = parser.parse_args().data
    torch.set_num_threads(1)
    bagua.init_process_group()
    if bagua.get_rank() == 0 and not directory.exists():
        directory.mkdir(parents=True)
        write(directory)
    bagua.barrier()
    return directory


def train(stream, collate):
    """collate: of a list of records to a batch of waves and kinds."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 128), torch.nn.ReLU(), torch.nn.Linear(128, KINDS))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer], algorithm="gradient_allreduce")
    loader = bagua.ElasticDataLoader(stream, 48, collate_fn=collate, seed=0)
    for epoch in loader.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            bagua.report(loss=loss.item())
            is_alone = bagua.is_launched() and bagua.get_world_size() == 1
            time.sleep(0.3 if is_alone else 0.04)  # so that there is time for a third to join
            if loader.step == 30 and bagua.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if bagua.get_rank() == 0:
            print(f"epoch {epoch}: {bagua.get_world_size()} workers, loss {loss.item():.2f}", flush=True)
