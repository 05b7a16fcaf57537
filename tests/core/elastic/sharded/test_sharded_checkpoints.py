"""Checkpoints of sharded models: whole tensors come back bit for bit, whatever the numbers of shards and replicas."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bagua_core import checkpoint
from bagua_core.elastic.checkpoint import catalogue, part_file, restore
from bagua_core.elastic.checkpoint.assembly import Assembly
from bagua_core.elastic.checkpoint.boxes import Box
from bagua_core.elastic.checkpoint.catalogue import RunState
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from bagua_core.elastic.checkpoint.part_file import CorruptPart, Header
from tests.core.elastic.sharded import checkpoints, gloo_ranks
from tests.core.elastic.sharded.checkpoints import NAME
from tests.core.elastic.sharded.models import OPTIMIZERS, Training, same

WRITE = "tests.core.elastic.sharded.write_scenarios"
READ = "tests.core.elastic.sharded.read_scenarios"
PLACE = RunState(1, NAME)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the worlds write, in the order two shards, four shards; before them a replicated worker."""
    root = tmp_path_factory.mktemp("worlds")
    for name in ("shared", "two", "four"):
        (root / name).mkdir()
    for name in OPTIMIZERS:
        training = Training(name, seed=1, sharded=False)
        training.train(3)
        checkpoints.write(root / "shared" / f"plain-{name}", training)
    yield root / "shared"


@pytest.fixture(scope="module")
def two(shared: Path) -> dict[str, str]:
    return gloo_ranks.run(WRITE, 2, shared.parent / "two")


@pytest.fixture(scope="module")
def four(shared: Path, two: dict[str, str]) -> dict[str, str]:
    assert not two["check_two_shards_write"], two["check_two_shards_write"]
    return gloo_ranks.run(READ, 4, shared.parent / "four")


@pytest.mark.parametrize("name", gloo_ranks.names_in(WRITE))
def test_two_shards(two: dict[str, str], name: str) -> None:
    assert not two[name], two[name]


@pytest.mark.parametrize("name", gloo_ranks.names_in(READ))
def test_four_shards(four: dict[str, str], name: str) -> None:
    assert not four[name], four[name]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_export_has_whole_tensors(shared: Path, four: dict[str, str], name: str, tmp_path: Path) -> None:
    expected = torch.load(shared / f"two-{name}.pt", weights_only=True)
    for source in ("two", "four"):
        out = tmp_path / f"{source}.pt"
        assert checkpoint.main(["export", str(shared / f"{source}-{name}"), str(out)]) == 0
        exported = torch.load(out, weights_only=True)
        found = dict(exported["models"][0])
        for key, values in exported["optimizers"][0]["state"].items():
            found |= {f"{key}.{n}": v for n, v in values.items() if isinstance(v, torch.Tensor)}
        assert expected.keys() <= found.keys()
        assert all(torch.equal(found[n], expected[n]) for n in expected), source


def test_the_export_of_a_mesh_of_two_dimensions(shared: Path, four: dict[str, str], tmp_path: Path) -> None:
    expected = torch.load(shared / "parallel.pt", weights_only=True)
    out = tmp_path / "out.pt"
    assert checkpoint.main(["export", str(shared / "parallel"), str(out)]) == 0
    found = torch.load(out, weights_only=True)["models"][0]
    weights = [n for n in expected if n in found and "norm" not in n]
    assert len(weights) == 4 and all(torch.equal(found[n], expected[n]) for n in weights)


def test_the_export_leaves_out_what_each_shard_has_its_own_of(
    shared: Path, two: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out.pt"
    assert checkpoint.main(["export", str(shared / "own-True"), str(out)]) == 0
    exported = torch.load(out, weights_only=True)
    names = dict(Training(sharded=False).model.named_parameters())
    assert {n: t.shape for n, t in exported["models"][0].items() if n in names} == {
        n: p.shape for n, p in names.items()
    }
    assert "algorithms" not in exported


@pytest.mark.parametrize("source", ["two", "four", "plain"])
def test_a_replicated_worker_goes_on_from_shards(shared: Path, four: dict[str, str], source: str) -> None:
    for name in OPTIMIZERS:
        expected = torch.load(shared / f"two-{name}.pt", weights_only=True)
        training = Training(name, seed=2, sharded=False)
        checkpoints.read(shared / f"{source}-{name}", training)
        found = checkpoints.gathered(training)
        if source == "plain":
            again = Training(name, seed=1, sharded=False)
            again.train(3)
            assert same(training.tensors(), again.tensors())
        else:
            assert all(torch.equal(found[n], expected[n]) for n in expected)
        training.train(1)


# -- parts that do not make a checkpoint


@pytest.fixture
def folder(shared: Path, two: dict[str, str], tmp_path: Path) -> Path:
    """A copy of a checkpoint of two shards, six parts."""
    shutil.copytree(shared / "two-adamw", tmp_path / "copy")
    return tmp_path / "copy"


def reason(root: Path) -> str:
    found = catalogue.look_into(LocalStorage(root), PLACE)
    assert not found.is_complete
    return found.reason


def parts(root: Path) -> list[Path]:
    return sorted((root / PLACE.directory_name).iterdir())


def change(path: Path, changed: Callable[[Header], Header]) -> None:
    """Write the part again with another header, as a damaged or foreign writer would."""
    storage = LocalStorage(path.parent.parent)
    header = part_file.read_header(storage, f"{path.parent.name}/{path.name}")
    with path.open("rb") as file:
        data = file.read()[-header.data_bytes :] if header.data_bytes else b""
    path.write_bytes(changed(header).encode() + data)


def test_a_missing_part(folder: Path) -> None:
    parts(folder)[3].unlink()
    assert reason(folder) == "part 3 of 6 is missing"
    with pytest.raises(CorruptPart, match="part 3 of 6"):
        restore.read(LocalStorage(folder), PLACE, {})


def test_parts_of_two_writes(folder: Path, shared: Path) -> None:
    (other,) = (shared / "two-sgd").glob("run-*-step-*")
    shutil.copy(sorted(other.iterdir())[3], parts(folder)[3])
    assert "part-00003-of-00006.safetensors: it belongs to another checkpoint" in reason(folder)


def test_a_part_of_another_shard(folder: Path) -> None:
    change(parts(folder)[3], lambda h: replace(h, shard=0))
    assert reason(folder) == "part 3 says that it is of shard 0 of 2"


def moved(header: Header) -> Header:
    name, placed = next((n, p) for n, p in header.placed.items() if p.box.offset[0])
    box = Box((placed.box.offset[0] - 1, *placed.box.offset[1:]), placed.box.size)
    return replace(header, placed={**header.placed, name: replace(placed, box=box)})


def test_boxes_that_overlap(folder: Path) -> None:
    for path in parts(folder)[1::2]:
        header = part_file.read_header(LocalStorage(folder), f"{path.parent.name}/{path.name}")
        if header.placed:
            change(path, moved)
    assert "overlap" in reason(folder) or "two places" in reason(folder)


def without_an_entry(header: Header) -> Header:
    """Its bytes stay, under a name of no tensor that is placed."""
    name = next(iter(header.placed))
    return replace(header, placed={n: p for n, p in header.placed.items() if n != name})


def test_a_box_that_is_left_out(folder: Path) -> None:
    for path in parts(folder)[1::2]:
        header = part_file.read_header(LocalStorage(folder), f"{path.parent.name}/{path.name}")
        if header.placed:
            change(path, without_an_entry)
            break
    assert "in no part" in reason(folder) or "not whole" in reason(folder)


def test_an_index_of_another_shape_than_the_manifest_says(folder: Path) -> None:
    found = catalogue.look_into(LocalStorage(folder), PLACE)
    manifest = part_file.read_manifest(
        LocalStorage(folder), f"{PLACE.directory_name}/{parts(folder)[0].name}"
    )

    def wider(header: Header) -> Header:
        placed = {
            n: replace(p, shape=(*p.shape, 1), box=Box((*p.box.offset, 0), (*p.box.size, 1)))
            for n, p in header.placed.items()
        }
        return replace(header, placed=placed)

    with pytest.raises(CorruptPart, match="another shape in its index"):
        Assembly(manifest, [wider(h) for h in found.headers])
    with pytest.raises(CorruptPart, match="sharded in its index or in its manifest"):
        Assembly(manifest, [replace(h, placed={}) for h in found.headers])


@pytest.mark.parametrize(
    "odd",
    ["[[4],[3],[2],4]", "[[4],[0],[-2],4]", '"x"', "[[4,4],[0],[2],4]", "[[99999999999999999999],[0],[2],4]"],
)
def test_a_hostile_index_is_refused_before_memory_is_taken(folder: Path, odd: str) -> None:
    path = parts(folder)[1]
    header = part_file.read_header(LocalStorage(folder), f"{path.parent.name}/{path.name}")
    placed = next(iter(header.placed.values()))
    text = header.encode()[8:].decode().rstrip()
    own = str(placed.to_json()).replace(" ", "")
    assert own in text
    text = text.replace(own, odd.replace('"', '\\\\"'), 1)
    with path.open("rb") as file:
        data = file.read()[-header.data_bytes :]
    begin = len('{"__metadata__":{"checksum":"')
    path.write_bytes(part_file.with_checksum((text[:begin] + text[begin + 8 :]).encode()) + data)
    assert "header is unreadable" in reason(folder)


def test_every_flipped_byte_is_seen(folder: Path) -> None:
    storage, training = LocalStorage(folder), Training("adamw", 2, sharded=False)
    path = parts(folder)[3]
    good = path.read_bytes()
    for at in range(0, len(good), max(1, len(good) // 60)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CorruptPart):
            restore.read(storage, PLACE, training.registry.fingerprint())
    path.write_bytes(good)
    checkpoints.read(folder, training)


def test_another_algorithm_or_model_is_told(folder: Path) -> None:
    training = Training("sgd", 2, sharded=False)
    with pytest.raises(
        restore.CheckpointMismatch, match="optimizers: the checkpoint has AdamW, the script SGD"
    ):
        checkpoints.read(folder, training)
