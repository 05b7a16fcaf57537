"""Each kept result names a commit of this repository, so that its code can be read and run again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.result_file import RESULTS, ROOT

GIT_S = 60
# Their commits were replaced before they reached this repository. The list only shrinks: a new measurement of one of
# these benchmarks takes its result out.
WITHOUT_COMMIT = {
    "bagua_net-2026-11-27",
    "fidelity_qadam_1bit_qadam_8bit_qadam_uncompressed-2026-11-23",
    "group_rebuild-2026-11-27",
    "load_balancing_imbalance-2026-11-22",
    "scale_effect-2026-11-22",
}


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=GIT_S, check=False
    )


def is_in_history(commit: str) -> bool:
    return git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0


def commit_of(result: Path) -> str:
    """The commit that a result names, without the number of files that were changed then."""
    commit: str = json.loads(result.read_text())["about"]["commit"].partition(" ")[0]
    return commit


@pytest.fixture
def history() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this copy has no history: it is no clone")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        pytest.skip("this clone has a part of the history: git fetch --unshallow gets the rest")


@pytest.mark.usefixtures("history")
def test_each_kept_result_names_a_commit_of_the_history() -> None:
    results = sorted(RESULTS.glob("*.json"))
    assert len(results) > 30
    missing = {result.stem for result in results if not is_in_history(commit_of(result))}
    assert missing == WITHOUT_COMMIT


@pytest.mark.usefixtures("history")
def test_an_unknown_commit_is_found() -> None:
    assert is_in_history(git("rev-parse", "--short=12", "HEAD").stdout.strip())
    assert not is_in_history("0" * 12) and not is_in_history("unknown")
