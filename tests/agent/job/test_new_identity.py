"""A program of its own makes a job's key pair; what it prints is checked, and its failures are one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bagua_agent.base.errors import BaguaError, InfrastructureLost, UserError
from bagua_agent.job import new_identity as module
from bagua_agent.job.new_identity import make_identity
from bagua_agent.workers.process.bounded_run import BoundedRun


def test_each_job_has_a_key_pair_of_its_own() -> None:
    one, other = make_identity("job"), make_identity("job")
    assert one.certificate.startswith(b"-----BEGIN CERTIFICATE-----")
    assert b"PRIVATE KEY-----" in one.key
    assert one.key != other.key


def test_what_the_interpreter_prints_before_is_not_part_of_the_key_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make_identity("job")
    answer = BoundedRun(0, "a warning\n" + made.encode().decode())
    monkeypatch.setattr(module, "run_bounded", lambda *_, **__: answer)
    assert make_identity("job") == made


def test_the_program_imports_from_where_this_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program runs in another folder, in which a relative place would be another one."""
    (tmp_path / "deps").mkdir()
    (tmp_path / "deps" / "cryptography.py").write_text("raise ImportError('of deps')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["deps", *sys.path])
    with pytest.raises(InfrastructureLost, match="of deps"):
        make_identity("job")


def raising(error: OSError) -> Callable[..., BoundedRun]:
    def run(*_: object, **__: object) -> BoundedRun:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "error", "said"),
    [
        (
            lambda *_, **__: BoundedRun(1, "Traceback\nno module"),
            InfrastructureLost,
            "ended with 1: no module",
        ),
        (lambda *_, **__: BoundedRun(0, "nothing"), InfrastructureLost, "printed something else"),
        (raising(TimeoutError("python did not end")), InfrastructureLost, "python did not end"),
        (raising(PermissionError(13, "Permission denied")), UserError, "does not start: Permission denied"),
        (raising(OSError(11, "Try again")), InfrastructureLost, "run out of something"),
    ],
)
def test_a_failure_is_one_line(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., BoundedRun], error: type[BaguaError], said: str
) -> None:
    monkeypatch.setattr(module, "run_bounded", run)
    with pytest.raises(error, match=said) as raised:
        make_identity("job")
    assert "\n" not in str(raised.value)
