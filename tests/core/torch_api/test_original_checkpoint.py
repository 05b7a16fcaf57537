"""save_checkpoint and load_checkpoint, in the original's files. Two workers use them in test_original_examples.py."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from bagua_core.torch_api.checkpoint import STATES, TRACKER, load_checkpoint, save_checkpoint

DEADLINE_S = 20.0


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def test_all_states_come_back(tmp_path: Path) -> None:
    model, optimizer, scheduler = parts()
    save_checkpoint(7, str(tmp_path), model, optimizer, scheduler)
    save_checkpoint(20, str(tmp_path), model, optimizer, scheduler)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        f"iter_0000007/{STATES}",
        f"iter_0000020/{STATES}",
        TRACKER,
    ]
    other, its_optimizer, its_scheduler = parts()
    assert load_checkpoint(str(tmp_path), other, its_optimizer, its_scheduler) == 20
    assert torch.equal(other.weight, model.weight)  # type: ignore[arg-type]
    assert its_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert its_scheduler.last_epoch == scheduler.last_epoch == 2


def test_without_any_the_script_begins_at_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_checkpoint(str(tmp_path), nn.Linear(1, 1)) == 0
    assert "no checkpoint is loaded" in capsys.readouterr().err


def test_what_can_not_be_loaded_says_why(tmp_path: Path) -> None:
    save_checkpoint(1, str(tmp_path), nn.Linear(3, 2))
    model, optimizer, _ = parts()
    with pytest.raises(ValueError, match="has no optimizer; save it, or don't ask for it"):
        load_checkpoint(str(tmp_path), model, optimizer)
    (tmp_path / "iter_0000001" / "expert_0_mp_rank_00_model_states.pt").touch()
    with pytest.raises(ValueError, match="experts in files of their own"):
        load_checkpoint(str(tmp_path), model)
    (tmp_path / TRACKER).write_text("release")
    with pytest.raises(ValueError, match="holds 'release'; write the number"):
        load_checkpoint(str(tmp_path), model)


@pytest.mark.parametrize("others_iteration", [5, 10])
def test_a_rank_0_that_the_job_went_on_without_disturbs_no_save_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_iteration: int
) -> None:
    """Its disk is slow or its network was cut: meanwhile the next rank 0 saves the same iteration, or a later one."""
    model, optimizer, _ = parts()
    save = torch.save

    def save_slowly(states: object, path: Path) -> None:
        monkeypatch.setattr(torch, "save", save)
        path.write_bytes(b"a half of it")
        save_checkpoint(others_iteration, str(tmp_path), model, optimizer)
        if path.exists():
            save(states, path)

    monkeypatch.setattr(torch, "save", save_slowly)
    save_checkpoint(5, str(tmp_path), model, optimizer)
    other, its_optimizer, _ = parts()
    assert load_checkpoint(str(tmp_path), other, its_optimizer) == others_iteration
    assert torch.equal(other.weight, model.weight)  # type: ignore[arg-type]
    assert not list(tmp_path.rglob("*.part"))


def test_the_next_rank_0_records_its_save_beside_the_end_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank 0 that the job went on without ends while the next one saves a later iteration."""
    model, optimizer, _ = parts()
    save, later_begun, earlier_ended = torch.save, threading.Event(), threading.Event()

    def in_turn(states: dict[str, object], path: Path) -> None:
        if states["iteration"] == 5:
            later.start()
            assert later_begun.wait(DEADLINE_S)
        else:
            later_begun.set()
            assert earlier_ended.wait(DEADLINE_S)
        save(states, path)

    later = threading.Thread(target=save_checkpoint, args=(10, str(tmp_path), model, optimizer))
    monkeypatch.setattr(torch, "save", in_turn)
    save_checkpoint(5, str(tmp_path), model, optimizer)
    assert (tmp_path / TRACKER).read_text() == "5"
    earlier_ended.set()
    later.join(DEADLINE_S)
    assert load_checkpoint(str(tmp_path), nn.Linear(3, 2)) == 10


def test_a_save_that_fails_leaves_the_one_before_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, _ = parts()
    save_checkpoint(5, str(tmp_path), model)

    def no_space(states: object, path: Path) -> None:
        path.write_bytes(b"a half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", no_space)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(6, str(tmp_path), model)
    assert load_checkpoint(str(tmp_path), model) == 5
    assert not list(tmp_path.rglob("*.part"))
