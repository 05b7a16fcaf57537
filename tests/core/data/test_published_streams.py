"""Streams of torchdata and Hugging Face's datasets: a worker that joins anywhere reads what the job reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

from bagua_core.data.stream_division import is_stream
from bagua_core.data.stream_reader import StreamReader
from bagua_core.elastic.state import state_codec

LENGTH, SIZE, EPOCHS = 43, 4, 3
LAST = -(-LENGTH // SIZE) - 1


def hugging_face(buffer: int = 0, shards: int = 3) -> Any:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": list(range(LENGTH))}).to_iterable_dataset(num_shards=shards)
    return stream.shuffle(seed=3, buffer_size=buffer) if buffer else stream


def hugging_face_shuffled() -> Any:
    return hugging_face(buffer=20)


def sampled_nodes() -> Any:
    nodes = pytest.importorskip("torchdata.nodes")
    sampled = nodes.SamplerWrapper(RandomSampler(range(LENGTH)))
    return nodes.Loader(nodes.Mapper(sampled, lambda index: {"x": index}))


def prefetching_nodes() -> Any:
    nodes = pytest.importorskip("torchdata.nodes")
    mapped = nodes.ParallelMapper(
        nodes.IterableWrapper(range(LENGTH)), lambda index: {"x": index}, num_workers=2, method="thread"
    )
    return nodes.Loader(nodes.Prefetcher(mapped, prefetch_factor=3))


class Records(torch.utils.data.Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"x": index}


def stateful_loader() -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    torch.manual_seed(5)  # its sampler draws from the script's generator when it is made
    return loaders.StatefulDataLoader(Records(), batch_size=None, shuffle=True)


def read(reader: StreamReader, epoch: int, batch: int) -> list[int]:
    reader.read(epoch, batch)
    places = range(batch * SIZE, min(LENGTH, (batch + 1) * SIZE))
    return [int(item["x"]) for item in reader.__getitems__(places)]


@pytest.mark.parametrize(
    "make", [hugging_face, hugging_face_shuffled, sampled_nodes, prefetching_nodes, stateful_loader]
)
def test_a_joiner_reads_what_the_job_reads(make: Any) -> None:
    assert is_stream(make())
    job = StreamReader(make(), SIZE, False, seed=7)
    job.prepare()
    batches, states = {}, {}
    for epoch in range(EPOCHS):
        for batch in range(LAST + 1):
            batches[epoch, batch] = read(job, epoch, batch)
            states[epoch, batch] = state_codec.encode(job.state_dict())
        assert job.ends[epoch] == LENGTH
        assert sorted(x for e, b in batches if e == epoch for x in batches[e, b]) == list(range(LENGTH))
    for epoch, batch in ((0, 0), (0, 5), (0, LAST), (1, 0), (1, 7), (1, LAST)):
        joiner = StreamReader(make(), SIZE, False, seed=7)
        joiner.prepare()
        joiner.load_state_dict(state_codec.decode(*states[epoch, batch]))
        following = (epoch, batch + 1) if batch < LAST else (epoch + 1, 0)
        assert read(joiner, *following) == batches[following], (epoch, batch)
        continues = joiner.state_dict()["mark"][2] is not None
        assert continues or make is hugging_face_shuffled, "its state is relied on"
