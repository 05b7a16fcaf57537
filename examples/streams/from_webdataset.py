"""WebDataset, streamed from tar files. Watch for: a worker is killed, the other goes on, a third joins.

bagua-launch --nproc-per-node 2 examples/streams/from_webdataset.py

`pip install webdataset`; less than a minute. A pipeline of webdataset has no state, so the third worker reads the epoch
from its beginning: the position is exact, and the others wait meanwhile. Two things make the pipeline the same on all
workers: no stage that splits by node, and `rng=random` where it shuffles. The loader seeds that generator for each
item, while webdataset's own is seeded by the clock.
"""

import io
import random

import numpy as np
import torch
import webdataset as wds
from waves import SHARDS, prepared, records, train


def write(directory):
    for shard in range(SHARDS):
        with wds.TarWriter(str(directory / f"{shard}.tar")) as tar:
            for number, (wave, kind) in enumerate(records(shard)):
                tar.write({"__key__": f"{shard}-{number}", "npy": wave, "cls": kind})


def collate(items):
    """Only the worker that uses a record decodes it."""
    waves = [np.load(io.BytesIO(i["npy"])) for i in items]
    return torch.tensor(np.stack(waves)), torch.tensor([int(i["cls"]) for i in items])


def shuffled(directory):
    """The shards in an order of their own in each epoch, and their records through a buffer that shuffles."""
    return wds.DataPipeline(
        wds.SimpleShardList(sorted(map(str, directory.glob("*.tar")))),
        wds.shuffle(SHARDS, rng=random),
        wds.tarfile_to_samples(),
        wds.shuffle(100, rng=random),
    )


if __name__ == "__main__":
    train(shuffled(prepared(write)), collate)
