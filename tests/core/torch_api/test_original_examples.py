"""The original's examples in short form, each with its import alone changed: two workers of a job on the CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.lab import zygote

ROOT = Path(__file__).parents[3]
EXAMPLES = Path(__file__).with_name("original_examples")
WORKERS = 2
ALGORITHMS = (
    "gradient_allreduce",
    "bytegrad",
    "decentralized",
    "low_precision_decentralized",
    "qadam",
    "async",
)


def run(example: str, out: Path, *words: str) -> list[str]:
    """What each worker wrote at its end, by rank."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("BAGUA_", "PET_"))}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bagua_launch", "--standalone", "--nproc-per-node", str(WORKERS)]
    command += [str(EXAMPLES / f"{example}.py"), "--out", str(out), *words]
    said = out / "said"
    assert zygote.run(command, environment, said, out, 180) == 0, said.read_text()
    return [(out / str(rank)).read_text() for rank in range(WORKERS)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_mnist(algorithm: str, tmp_path: Path) -> None:
    one, other = run("mnist", tmp_path, "--algorithm", algorithm)
    if algorithm not in ("decentralized", "low_precision_decentralized", "async"):
        assert one == other


def test_mnist_with_a_fused_optimizer(tmp_path: Path) -> None:
    one, other = run("mnist", tmp_path, "--fuse-optimizer")
    assert one == other


def test_elastic_training_resumes_from_the_scripts_own_checkpoint(tmp_path: Path) -> None:
    one, other = run("elastic_training", tmp_path, "--epochs", "2")
    assert one == other and one.startswith("2 ")
    one, other = run("elastic_training", tmp_path, "--epochs", "3")
    assert one == other and one.startswith("1 ")


def test_imagenet_draws_disjoint_shards(tmp_path: Path) -> None:
    results = [text.split() for text in run("imagenet", tmp_path)]
    assert results[0][1] == results[1][1]
    shards = [set(seen.split(",")[:60]) for seen, _ in results]
    assert not shards[0] & shards[1] and len(shards[0] | shards[1]) == 120


def test_squad(tmp_path: Path) -> None:
    one, other = run("squad", tmp_path)
    assert one == other and one.startswith("6 ")


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_synthetic_benchmark(algorithm: str, tmp_path: Path) -> None:
    one, other = run("synthetic_benchmark", tmp_path, "--algorithm", algorithm)
    assert one == other


def test_communication_primitives(tmp_path: Path) -> None:
    assert run("communication_primitives", tmp_path) == ["same"] * WORKERS


@pytest.mark.parametrize(("local_experts", "experts"), [(0, 0), (2, 4)])
def test_moe(local_experts: int, experts: int, tmp_path: Path) -> None:
    one, other = run("moe", tmp_path, "--num-local-experts", str(local_experts))
    assert one == other and one.startswith(f"{experts} ")
