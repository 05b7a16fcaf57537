"""Streams of other packages, and those of the examples: a worker that joins anywhere reads what the job reads."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

from bagua_core.data.stream_division import is_stream
from bagua_core.data.stream_reader import StreamReader
from bagua_core.elastic.state import state_codec

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "streams"
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
    check_joiners(make, relies_on_state=make is not hugging_face_shuffled)


def json_lines(directory: Path) -> Callable[[], Any]:
    example = importlib.import_module("from_datasets")
    for shard in range(3):
        lines = (json.dumps({"x": x}) for x in range(shard, LENGTH, 3))
        (directory / f"{shard}.jsonl").write_text("\n".join(lines))
    return lambda: example.streamed(directory)


def tar_files(directory: Path) -> Callable[[], Any]:
    example = importlib.import_module("from_webdataset")
    for shard in range(3):
        with example.wds.TarWriter(str(directory / f"{shard}.tar")) as tar:
            for x in range(shard, LENGTH, 3):
                tar.write({"__key__": str(x), "x": str(x).encode()})
    return lambda: example.shuffled(directory)


def lit_chunks(directory: Path) -> Callable[[], Any]:
    example = importlib.import_module("from_litdata")
    cache = example.Cache(str(directory), chunk_size=10)
    for x in range(LENGTH):
        cache[x] = {"x": x}
    cache.done()
    cache.merge()
    return lambda: example.Whole(directory)


@pytest.mark.parametrize(
    ("package", "write", "relies_on_state"),
    [("datasets", json_lines, True), ("webdataset", tar_files, False), ("litdata", lit_chunks, True)],
    ids=["datasets", "webdataset", "litdata"],
)
def test_a_joiner_reads_what_the_job_reads_in_an_example(
    package: str, write: Any, relies_on_state: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("WORLD_SIZE", "2")  # as in a job
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    check_joiners(write(tmp_path), relies_on_state)


def check_joiners(make: Callable[[], Any], relies_on_state: bool) -> None:
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
        assert continues or not relies_on_state, "its state is relied on"
