"""LitData, streamed from its chunks. Watch for: a worker is killed, the other goes on, a third joins.

bagua-launch --nproc-per-node 2 examples/streams/from_litdata.py

`pip install litdata`; less than a minute. The position is exact, also with `shuffle=True`: the third worker continues
from a count of items. LitData gives each rank of WORLD_SIZE a part of the data, so that variable is removed: every
worker reads the whole stream, and the loader divides its batches. LitData's `state_dict` must be told how many items
were read, so the class below counts them.
"""

import os

import litdata
import torch
from litdata.streaming import Cache
from waves import SHARDS, prepared, records, train

os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # else it asks the package index
os.environ.pop("WORLD_SIZE", None)


def write(directory):
    cache = Cache(str(directory), chunk_size=100)
    items = (record for shard in range(SHARDS) for record in records(shard))
    for index, (wave, kind) in enumerate(items):
        cache[index] = {"wave": wave, "kind": kind}
    cache.done()
    cache.merge()


class Whole(torch.utils.data.IterableDataset):
    """All items of a StreamingDataset on every worker, with a position."""

    def __init__(self, directory):
        self.items = litdata.StreamingDataset(str(directory), shuffle=True, seed=0)
        self.epoch = self.count = 0

    def set_epoch(self, epoch):
        self.epoch, self.count = epoch, 0

    def __iter__(self):
        self.items.reset_state_dict()
        self.items.set_epoch(self.epoch)
        if self.count:
            self.items.load_state_dict(self.items.state_dict(self.count, num_workers=1, batch_size=1))
        for item in self.items:
            self.count += 1
            yield item

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def collate(items):
    return torch.stack([torch.as_tensor(i["wave"]) for i in items]), torch.tensor([i["kind"] for i in items])


if __name__ == "__main__":
    train(Whole(prepared(write)), collate)
