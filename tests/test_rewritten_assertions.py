"""Lanes rewrite the assertions of different test modules, and pytest takes what they wrote."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.assertion import rewrite

from tests.rewritten_assertions import modules_of, pytest_sessionstart


def test_each_lane_rewrites_its_share_and_imports_find_it(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in "abc":
        (folder / f"test_{name}.py").write_text("def test_it():\n    value = 1\n    assert value == 2\n")

    def start(lane: int, *arguments: str) -> list[str]:
        """The modules that are in the cache after it."""
        config: Any = SimpleNamespace(
            workerinput={"workerid": f"gw{lane}", "workercount": 2},
            invocation_params=SimpleNamespace(dir=tmp_path),
            args=arguments,
            stash=request.config.stash,
            getini=request.config.getini,
        )
        pytest_sessionstart(SimpleNamespace(config=config))  # type: ignore[arg-type]
        return sorted(path.name.partition(".")[0] for path in folder.glob(f"__pycache__/*{rewrite.PYC_TAIL}"))

    assert start(0, "tests") == ["test_a", "test_c"]
    assert start(1, "tests") == ["test_a", "test_b", "test_c"]

    def fails(*_: object) -> None:
        raise AssertionError("rewritten again")

    monkeypatch.setattr(rewrite, "_rewrite_test", fails)
    hook = request.config.stash[rewrite.assertstate_key].hook
    spec = importlib.util.spec_from_file_location("test_b", folder / "test_b.py", loader=hook)
    assert spec is not None and hook is not None
    module = importlib.util.module_from_spec(spec)
    hook.exec_module(module)
    with pytest.raises(AssertionError, match="assert 1 == 2"):
        module.test_it()


def test_arguments_name_folders_modules_and_tests(tmp_path: Path) -> None:
    for name in ("test_a.py", "below/test_b.py", "below/helper.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert modules_of(tmp_path, ["test_a.py::test_one[x/y::z]", "below"]) == [
        tmp_path / "below/test_b.py",
        tmp_path / "test_a.py",
    ]
