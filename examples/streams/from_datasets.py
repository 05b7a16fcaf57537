"""Hugging Face datasets, streamed from JSON lines. Watch for: a worker is killed, the other goes on, a third joins.

bagua-launch --nproc-per-node 2 examples/streams/from_datasets.py

`pip install datasets`; less than a minute. The position is exact: the stream has a state, from which the third worker
continues. A shuffle buffer (`stream.shuffle(buffer_size=...)`) is not in that state: the loader notices, warns, and
reads the epoch from its beginning. So the records were shuffled when they were written.
"""

import json

import datasets
import torch
from waves import SHARDS, prepared, records, train


def write(directory):
    for shard in range(SHARDS):
        lines = (json.dumps({"wave": wave.tolist(), "kind": kind}) for wave, kind in records(shard))
        (directory / f"{shard}.jsonl").write_text("\n".join(lines))


def collate(items):
    return torch.tensor([i["wave"] for i in items]), torch.tensor([i["kind"] for i in items])


def streamed(directory):
    files = sorted(map(str, directory.glob("*.jsonl")))
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True)


if __name__ == "__main__":
    train(streamed(prepared(write)), collate)
