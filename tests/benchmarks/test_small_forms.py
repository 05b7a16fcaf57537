"""Benchmarks whose whole form takes minutes run in a small form: they end with 0 and print the rows of their table.

No figure is judged. Lines that a page prints run with the page's words.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.result_file import ROOT
from tests.docs.printed import printed
from tests.lab import namespaces

pytestmark = pytest.mark.long
FORM_S = 900  # on a machine with other work; each takes a minute or two alone


@pytest.fixture
def on_lab_hosts() -> None:
    if reason := namespaces.unavailable():
        pytest.skip(reason)


def rows(words: list[str], folder: Path) -> list[list[str]]:
    """The cells of each row of each table that `python WORDS` prints, without heads. Fails unless it exits with 0."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"},
        capture_output=True,
        text=True,
        timeout=FORM_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}"
    tables = re.findall(r"^\|.*\n\|[-|]+\|\n((?:\|.*\n)+)", done.stdout, re.MULTILINE)
    return [
        [cell.strip() for cell in line[1:-1].split("|")] for table in tables for line in table.splitlines()
    ]


def first_cells(words: list[str], folder: Path) -> list[str]:
    return [row[0] for row in rows(words, folder)]


@pytest.mark.usefixtures("on_lab_hosts")
def test_the_overhead_of_a_step(tmp_path: Path) -> None:
    words = printed("benchmarks/README.md", "benchmarks.steps --part overhead")
    assert first_cells(words, tmp_path) == ["loader", "next-step"]


@pytest.mark.usefixtures("on_lab_hosts")
def test_rescale(tmp_path: Path) -> None:
    (row,) = rows(["-m", "benchmarks.rescale", "--only", "bagua", "--repeat", "1"], tmp_path)
    assert row[0] == "bagua" and row[-1] == "0+0"
    assert all(re.match(r"\d+\.\d+ s", cell) for cell in row[1:-2]), row


@pytest.mark.usefixtures("on_lab_hosts")
def test_uneven_workers(tmp_path: Path) -> None:
    words = printed("benchmarks/README.md", "benchmarks.uneven_workers --repeat 1 --epochs 2")
    (row,) = rows(words, tmp_path)
    assert row[0] == "async, unit round" and float(row[1]) > 0


@pytest.mark.usefixtures("on_lab_hosts")
def test_a_loss_in_a_round(tmp_path: Path) -> None:
    found = first_cells(["-m", "benchmarks.lost_in_round", "--repeat", "1"], tmp_path)
    assert found == ["local_sgd, unit round", "gradient_allreduce"]


@pytest.mark.usefixtures("on_lab_hosts")
def test_sharded_replicas(tmp_path: Path) -> None:
    short = ["--repeat", "1", "--steps", "16", "--faults", "0", "--width", "64", "--blocks", "2"]
    assert first_cells(["-m", "benchmarks.sharded", *short], tmp_path) == ["torch HSDP", "Bagua"]


@pytest.mark.usefixtures("on_lab_hosts")
def test_digests_of_a_deterministic_job(tmp_path: Path) -> None:
    words = printed("benchmarks/README.md", "benchmarks.deterministic --part digests")
    (row,) = rows(words, tmp_path)
    assert row[0] == "norm"


def test_kernels_of_the_cpu(tmp_path: Path) -> None:
    assert rows(["-m", "benchmarks.kernels", "--mebibytes", "1", "--rounds", "1"], tmp_path)


@pytest.mark.usefixtures("on_lab_hosts")
def test_autotune(tmp_path: Path) -> None:
    words = printed("benchmarks/README.md", "benchmarks.autotune --part grid --part tune")
    assert rows(words, tmp_path)
    assert {path.name.partition("-")[0] for path in (tmp_path / "autotune-parts-tiny").glob("*.json")} == {
        "grid",
        "tune",
        "drop",
    }
