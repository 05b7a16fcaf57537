"""A checkpoint's parts are safetensors files, and one command makes a plain file of a whole checkpoint."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from safetensors.torch import load_file

from bagua_contract.records import StateName
from bagua_core import checkpoint
from bagua_core.elastic.checkpoint import layout, part_file, restore
from bagua_core.elastic.checkpoint.catalogue import RunState
from bagua_core.elastic.checkpoint.dcp_reader import DcpReader
from bagua_core.elastic.checkpoint.layout import NAMES
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from bagua_core.elastic.checkpoint.part_file import STATE, Header
from bagua_core.elastic.checkpoint.storage import StoreError
from tests.core.elastic.checkpoint.checkpoint_worlds import FailingStorage
from tests.core.elastic.checkpoint.test_checkpoint_parts import PLACE, whole
from tests.core.elastic.state.trainings import Training
from tests.docs.printed import printed

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command; its exit code, and all that it prints."""

    def act(*arguments: object) -> tuple[int, str]:
        code = checkpoint.main(list(map(str, arguments)))
        return code, "".join(capsys.readouterr())

    return act


def write_state(root: Path, state: dict[str, Any], parts: int) -> list[Path]:
    directory = root / PLACE.directory_name
    for part in range(parts):
        stripe = layout.stripe(state, part, parts)
        data = torch.empty(stripe.size_bytes, dtype=torch.uint8)
        stripe.read_into(data)
        header = Header(
            PLACE.run, "job", PLACE.name, part, parts, stripe.layout_digest, stripe.manifest_crc,
            part_file.digest(data), {"epoch": 0}, {}, stripe.entries,
        )  # fmt: skip
        part_file.write(LocalStorage(root), PLACE.directory_name, header, data, lambda edge: None)
    return sorted(directory.iterdir())


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_the_safetensors_library_reads_every_part(tmp_path: Path, parts: int) -> None:
    training = Training("adam", 1)
    training.train(3, seed=5)
    read: dict[str, torch.Tensor] = {}
    for path in whole(tmp_path, training, parts=parts):
        assert path.suffix == ".safetensors"
        read |= load_file(path)
    state = json.loads(bytes(read.pop(STATE).tolist()))
    whole_state = training.registry.capture()
    captured = {f"modules.0.{name}": t for name, t in whole_state["modules"][0].items()}
    captured |= {f"gradients.0.{name}": t for name, t in whole_state["gradients"][0].items()}
    for index, values in training.optimizer.state_dict()["state"].items():
        captured |= {f"optimizers.0.state.{index}.{name}": tensor for name, tensor in values.items()}
    assert {d["name"] for d in state["tensors"]} == captured.keys()
    for name, tensor in captured.items():
        pieces = sorted(
            (int(key[len(name) + 1 :].split(":")[0]), read.pop(key))
            for key in list(read)
            if key.startswith(f"{name}[")
        )
        got = torch.cat([piece for _, piece in pieces]).view(tensor.shape) if pieces else read.pop(name)
        assert got.dtype == tensor.dtype and torch.equal(got, tensor)
    assert not read


ODD: dict[str, Any] = {
    "modules": [
        {
            "parameter.pictures": torch.randn(6, 4, 5, 3).to(memory_format=torch.channels_last),
            "parameter.turned": torch.randn(40, 50).t(),
            "parameter.a.b": torch.randn(3),
            "parameter.complex": torch.randn(9, dtype=torch.complex128),
            "parameter.float8": torch.randn(33).to(torch.float8_e4m3fn),
            "parameter.one": torch.tensor(1.5),
            "parameter.none": torch.empty(0, 3),
            "buffer.mask": torch.tensor([True, False, True]),
            "algorithm.moment": torch.ones(5),
        }
    ],
    "optimizers": [{"state": {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), 0: torch.ones(2)}}],
    "registered": {"x": {"half \ud800": torch.arange(3), "size": torch.Size([2]), "type": torch.bfloat16}},
}


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_tensors_of_any_kind(tmp_path: Path, parts: int) -> None:
    paths = write_state(tmp_path, ODD, parts)
    names = [name for path in paths for name in load_file(path)]
    assert len(names) == len(set(names)) and {"optimizers.0.state.a.b", "optimizers.0.state.a.b'"} < set(
        names
    )
    state = restore.read(LocalStorage(tmp_path), PLACE, {}).state
    for name, tensor in ODD["modules"][0].items():
        got = state["modules"][0][name]
        assert got.dtype == tensor.dtype and got.stride() == tensor.stride()
        assert torch.equal(got.to(torch.complex128), tensor.to(torch.complex128))
    assert state["optimizers"][0]["state"]["a"]["b"] == 1 and state["optimizers"][0]["state"]["a.b"] == 0
    assert load_file(paths[0]).keys() >= {"modules.0.buffer.mask"}


def test_each_tensor_begins_at_a_multiple_of_its_elements(tmp_path: Path) -> None:
    for path in write_state(tmp_path, ODD, 2):
        at = 0
        for entry in part_file.read_header(LocalStorage(tmp_path), str(path.relative_to(tmp_path))).entries:
            width = {"F32": 4, "C64": 8, "I64": 8, "BOOL": 1, "U8": 1, "F8_E4M3": 1}[entry.dtype]
            assert at % width == 0, entry
            at += entry.size_bytes


def test_the_exported_file_is_loaded_by_torch_alone(tmp_path: Path, run: Run) -> None:
    training, output = Training("adam", 1), tmp_path / "out.pt"
    training.train(3, seed=5)
    (tmp_path / "saved").mkdir()
    whole(tmp_path / "saved", training)
    code, text = run("export", tmp_path / "saved", output)
    assert code == 0 and f"step 4 of {tmp_path / 'saved'} is in {output}" in text
    plain = torch.load(output, weights_only=True)
    assert (plain["step"], plain["position"]) == (4, {"epoch": 0, "batch": 4})
    other = Training("adam", 2)
    other.model.load_state_dict(plain["models"][0], strict=False)
    other.optimizer.load_state_dict(plain["optimizers"][0])
    other.scheduler.load_state_dict(plain["registered"]["scheduler"])
    other.scaler.load_state_dict(plain["registered"]["scaler"])
    for one in (training, other):
        one.train(2, seed=9)
    assert all(
        torch.equal(a, b) for a, b in zip(other.model.parameters(), training.model.parameters(), strict=True)
    )
    assert plain["gradients"][0].keys() == dict(training.model.named_parameters()).keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.pt", "saved"]


def test_values_of_numpy_are_exported_as_tensors_and_numbers(tmp_path: Path, run: Run) -> None:
    registered = {
        "array": numpy.arange(3, dtype=">i4"),
        "words": numpy.array(["a", "b"]),
        "number": numpy.float32(1.5),
        "date": numpy.datetime64("2024-01-02"),
        "tuple": (torch.device("cpu"), torch.bfloat16, float("inf")),
    }
    write_state(tmp_path, {"modules": [], "optimizers": [], "registered": {"x": registered}}, 1)
    assert run("export", tmp_path, tmp_path / "out.pt")[0] == 0
    got = torch.load(tmp_path / "out.pt", weights_only=True)["registered"]["x"]
    assert got["array"].tolist() == [0, 1, 2] and got["words"] == ["a", "b"] and got["number"] == 1.5
    assert got["date"] == "2024-01-02" and got["tuple"] == (torch.device("cpu"), torch.bfloat16, float("inf"))


class Best(NamedTuple):
    """A class of a script, which no program that reads its checkpoints has."""

    step: int
    loss: torch.Tensor


def test_named_tuples_of_a_script_are_exported_as_tuples(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = {"best": [Best(3, torch.ones(2)), ("a", Best(4, torch.zeros(1)))]}
    optimizer = {"state": {0: {"seen": Best(5, torch.ones(1))}}, "param_groups": [{"params": [0]}]}
    state = {"modules": [], "optimizers": [optimizer], "registered": best, NAMES: [["weight"]]}
    write_state(tmp_path, state, 1)
    monkeypatch.delattr(sys.modules[__name__], "Best")
    code, text = run("export", tmp_path, tmp_path / "out.pt")
    assert code == 0, text
    got = torch.load(tmp_path / "out.pt", weights_only=True)["registered"]["best"]
    assert got == [(3, got[0][1]), ("a", (4, got[1][1][1]))]
    assert [type(value) for value in (got[0], got[1][1])] == [tuple, tuple]
    assert got[0][1].tolist() == [1, 1] and got[1][1][1].tolist() == [0]
    DcpReader(LocalStorage(tmp_path)).read_metadata()


def several(root: Path) -> list[Path]:
    training = Training("sgd", 1)
    root.mkdir(exist_ok=True)
    whole(root, training, RunState(1, StateName(1, 2, 0)))
    paths = whole(root, training)
    whole(root, training, RunState(1, StateName(1, 6, 0)))[1].unlink()
    return paths


def test_the_commands_of_the_manual_list_and_export(tmp_path: Path, run: Run) -> None:
    several(tmp_path / "demo")
    given = {"/shared/demo": str(tmp_path / "demo")}
    listing = printed("docs/training-script.md", "bagua_core.checkpoint list", given)
    code, text = run(*listing[2:])
    assert code == 0 and text.startswith("step 6  ")
    given["out.pt"] = str(tmp_path / "out.pt")
    assert run(*printed("docs/training-script.md", "bagua_core.checkpoint export", given)[2:])[0] == 0
    plain = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {"step", "position", "models", "optimizers", "registered"} <= plain.keys()


def test_of_several_the_newest_complete_one_is_exported_unless_a_step_is_given(
    tmp_path: Path, run: Run
) -> None:
    several(tmp_path)
    listed = run("list", tmp_path)[1].splitlines()
    assert [line.split("  ")[0] for line in listed] == ["step 6", "step 4", "step 2"]
    assert "part 1 of 3 is missing" in listed[0] and "bytes in 3 parts" in listed[1]
    output = tmp_path / "out.pt"
    code, text = run("export", tmp_path, output)
    assert code == 0 and listed[0] in text
    assert torch.load(output, weights_only=True)["step"] == 4
    assert run("export", tmp_path, output, "--step", 2)[0] == 0
    assert torch.load(output, weights_only=True)["step"] == 2


def test_what_cannot_be_exported_is_told_with_what_is_there(tmp_path: Path, run: Run) -> None:
    output = tmp_path / "out.pt"
    paths = several(tmp_path / "saved")
    for step in (3, 6):
        code, text = run("export", tmp_path / "saved", output, "--step", step)
        assert code == 1 and f"no complete checkpoint of step {step}:\nstep 6 " in text
    paths[1].write_bytes(paths[1].read_bytes()[:-1] + b"\xff")
    code, text = run("export", tmp_path / "saved", output)
    assert code == 1 and "another digest. Choose another one by --step:\nstep 6 " in text
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint; name the job's" in run("export", tmp_path / "empty", output)[1]
    assert "No such file" in run("export", tmp_path / "none", output)[1]
    code, text = run("export", tmp_path / "saved", tmp_path / "none" / "out.pt", "--step", 2)
    assert code == 1 and "out.pt can't be written" in text
    assert not output.exists()


def test_a_device_or_fifo_is_not_replaced_by_the_file(tmp_path: Path, run: Run) -> None:
    several(tmp_path / "saved")
    os.mkfifo(tmp_path / "fifo")  # or /dev/null, for root
    code, text = run("export", tmp_path / "saved", tmp_path / "fifo")
    assert code == 1 and "fifo can't be written: it is no ordinary file" in text
    assert (tmp_path / "fifo").is_fifo() and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("where", ["list", "open"])
def test_only_what_cannot_be_read_is_not_exported(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    several(tmp_path / "saved")
    output = tmp_path / "out.pt"
    storage = FailingStorage(tmp_path / "saved", where, errno.EIO)
    monkeypatch.setattr(checkpoint, "storage_of", lambda text: storage)

    storage.unreadable = "run-0001-step-000000002"
    code, text = run("list", tmp_path / "saved")
    assert code == 0 and "bytes in 3 parts" in text.splitlines()[1]
    assert "can't be read" in text.splitlines()[2] and "Input/output error" in text.splitlines()[2]
    for step in ((), ("--step", 4)):
        assert run("export", tmp_path / "saved", output, *step)[0] == 0
        assert torch.load(output, weights_only=True)["step"] == 4
        output.unlink()
    DcpReader(storage).read_metadata()
    code, text = run("export", tmp_path / "saved", output, "--step", 2)
    assert code == 1 and "Input/output error" in text and not output.exists()
    with pytest.raises(StoreError, match="run-0001-step-000000002"):
        DcpReader(storage, 2).read_metadata()

    storage.unreadable = "run-0001-step-000000004"
    code, text = run("export", tmp_path / "saved", output)
    assert code == 1 and "Input/output error" in text and "--step" in text and not output.exists()
    with pytest.raises(StoreError, match="run-0001-step-000000004"):
        DcpReader(storage).read_metadata()
    assert run("export", tmp_path / "saved", output, "--step", 2)[0] == 0
    assert torch.load(output, weights_only=True)["step"] == 2
    DcpReader(storage, 2).read_metadata()


@pytest.mark.parametrize(
    ("error", "advises"),
    [
        (MemoryError(), False),
        (OSError(errno.EMFILE, "Too many open files"), False),
        (StoreError("the store did not answer"), False),
        (OSError(errno.EIO, "Input/output error"), True),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), True),
    ],
)
def test_another_checkpoint_is_advised_only_where_the_error_is_of_this_one(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, advises: bool
) -> None:
    several(tmp_path)

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(part_file, "read_data", fail)
    code, text = run("export", tmp_path, tmp_path / "out.pt")
    assert code == 1 and f"{tmp_path / PLACE.directory_name} can't be " in text
    assert (str(error) or "no memory for its state") in text
    assert ("Choose another one by --step" in text) == advises


def test_checkpoints_of_an_earlier_format_are_refused_in_one_line(tmp_path: Path, run: Run) -> None:
    paths = whole(tmp_path, Training("sgd", 1))
    old = paths[0].with_suffix("")
    old.write_bytes(b"bagua checkpoint part\n")
    code, text = run("export", tmp_path, tmp_path / "out.pt")
    (line,) = text.splitlines()
    assert code == 1 and f"{old} was written by an earlier version" in line
    with pytest.raises(restore.CheckpointsUnreadable, match="earlier version of bagua") as error:
        restore.choose(LocalStorage(tmp_path), "job", frozenset(), print)
    assert "\n" not in str(error.value)
