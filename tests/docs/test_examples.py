"""The scripts of examples/ say what to watch for and how they are started; those without a test elsewhere run here."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

from bagua_core import function_launch
from tests.deploy.parsed import parsed
from tests.lab import ledger
from tests.lab.launched import launch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
RUN_S = 300
EXIT_OF_SIGTERM = 143


IMPORTED = {"committed_steps.py", "majority_vote.py", "waves.py"}  # by others beside them


def scripts() -> list[Path]:
    """Those that are started, and not imported by others."""
    return [path for path in sorted(EXAMPLES.rglob("*.py")) if path.name not in IMPORTED]


def code_cells(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def started_by(path: Path) -> list[list[str]]:
    """The words of each line of its docstring that starts it with bagua-launch."""
    lines = [line.strip() for line in docstring(path).replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("bagua-launch ")]


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.name)
def test_a_script_says_what_to_watch_for_and_how_it_is_started(path: Path) -> None:
    text = docstring(path)
    assert re.fullmatch(r".*\b[Ww]atch\b.*\.", text.split("\n")[0]), path
    started = started_by(path)
    assert started, path
    for words in started:
        config = parsed(words[1:], {})
        assert ROOT / config.command.target == path, words


def test_each_example_is_listed() -> None:
    listed = (ROOT / "docs/guide/examples.md").read_text()
    files = [path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".ipynb")]
    missing = [str(f.relative_to(ROOT)) for f in files if f"(../../{f.relative_to(ROOT)})" not in listed]
    assert set(missing) <= {"examples/trackers/committed_steps.py", "examples/streams/waves.py"}


def run(*words: str, expected: int = 0, directory: Path = ROOT) -> str:
    """What a job of two workers on this machine prints."""
    done = launch("--nproc-per-node", "2", *words, limit_s=RUN_S, directory=directory)
    assert done.returncode == expected, done.said
    return done.said


def test_char_lm_learns() -> None:
    said = run("examples/char_lm.py", "--epochs", "1", "--characters", "20000")
    (loss,) = re.findall(r"epoch 0: evaluation loss ([\d.]+)", said)
    assert 1.0 < float(loss) < 4.0, "untrained it is 4.9, that of 128 characters at random"


def test_spot_nodes_go_on_where_they_were_preempted(tmp_path: Path) -> None:
    words = ["--rdzv-id", "spot", "--checkpoint-dir", str(tmp_path / "kept")]
    words += ["--ledger", str(tmp_path / "ledger"), "examples/spot_nodes.py"]
    first = run(*words, "--preempt-at", "40", expected=EXIT_OF_SIGTERM)
    assert "the run begins at step 0" in first
    written = ledger.read(tmp_path / "ledger").lines[-1].step
    assert written >= 40, "how many steps follow the signal depends on the machine"
    second = run(*words)
    begun = re.search(r"the run begins at step (\d+)", second)
    # the lines of the last step may be written by the run that goes on from it
    assert begun and int(begun[1]) in (written, written + 1), second
    assert "trained for 96 steps" in second


@pytest.mark.parametrize(
    "algorithm",
    [
        "low_precision_decentralized",
        "streaming_diloco",
        "power_sgd",
        pytest.param("gradient_allreduce", marks=pytest.mark.long),
    ],
)
def test_replicas_over_slow_links_end_as_one(algorithm: str) -> None:
    said = run("examples/slow_links.py", "--algorithm", algorithm, "--epochs", "1", "--characters", "20000")
    (during,), (at_the_end,) = (
        re.findall(rf"{what}.*drift (\S+)", said) for what in ("epoch 0:", "at the end:")
    )
    assert float(at_the_end) < 1e-6
    assert (float(during) > 1e-5) == (algorithm not in ("power_sgd", "gradient_allreduce"))


def test_the_notebook_runs_cell_after_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its jobs are forked from the lab's zygote; tests/core/test_function_launch.py starts them as a reader does."""
    pytest.importorskip("cloudpickle")
    monkeypatch.setattr(function_launch, "_run", lambda words: launch(*words, limit_s=RUN_S).returncode)
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    # kept without outputs: a difference shows changes of code alone
    assert all(not cell.get("outputs") for cell in cells)
    space = {"__name__": "__main__"}
    for code in code_cells(EXAMPLES / "notebook.ipynb"):
        exec(code, space)
    assert "best learning rate: 0.1" in capsys.readouterr().out
