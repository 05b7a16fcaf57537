"""The sampler's process suggests points that were not tried; what goes wrong there ends no agent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bagua_agent.autotune import sampling
from bagua_agent.autotune.space import Facts, space_of
from bagua_agent.autotune.study_records import Phase, Study, Trial
from bagua_agent.base.errors import UserError
from bagua_contract.step_settings import AS_SCRIPTED, StepSettings

SPACE = space_of(Facts(gradient_bytes=1 << 20, crosses=True))
TRIED = Study(1, "w", Phase.TRYING, AS_SCRIPTED, (Trial(AS_SCRIPTED, 10, 1.0),))


def test_a_suggestion_is_a_setting_that_was_not_tried() -> None:
    pytest.importorskip("optuna")
    found = sampling.suggest(TRIED, SPACE)
    assert found is not None and found not in TRIED.tried and SPACE.point_of(found) is not None


def test_nothing_is_suggested_once_all_were_tried() -> None:
    pytest.importorskip("optuna")
    space = space_of(Facts(pinned=StepSettings(bucket_bytes=4096), crosses=True))
    trials = tuple(Trial(space.settings_at(p), 10, 1.0) for p in space.points())
    assert sampling.suggest(Study(1, "w", Phase.RESTING, AS_SCRIPTED, trials), space) is None


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit('no optuna here')", "ended with 1: no optuna here"),
        ("print('{')", "answered '{'"),
        ("print('{\"point\": [99, 0]}')", "bucket_bytes has no choice 99"),
        ("import time; time.sleep(60)", "did not end within"),
    ],
    ids=["fails", "no answer", "another space", "hangs"],
)
def test_a_process_that_fails_is_one_error(
    program: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sampler.py").write_text(program)
    monkeypatch.setattr(sampling, "__file__", str(tmp_path / "sampling.py"))
    with pytest.raises(sampling.SamplerFailed, match=words):
        sampling.suggest(TRIED, SPACE, within_s=1.0 if "sleep" in program else 30.0)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr(sampling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"bagua-elastic\[autotune\]"):
        sampling.check_installed()


def test_the_agent_itself_imports_no_optuna() -> None:
    assert "optuna" not in Path(sampling.__file__).with_name("tuner.py").read_text()
