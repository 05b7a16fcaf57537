"""The figures of docs/scaling.md on efficiency and failures are those of the kept study."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.result_file import RESULTS

PAGE = " ".join((Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text().split())
STUDY = RESULTS / "scaling-2026-11-30.json"
TCP = ("10 Gbit/s", "25 Gbit/s", "100 Gbit/s")
REPLICATED = ("VGG16", "BERT-Large", "LSTM+AlexNet")
SHARDED = "7B HSDP"
Row = dict[str, Any]


def rows_of(part: str) -> list[Row]:
    table = json.loads(STUDY.read_text())["values"][part]
    return [dict(zip(table["columns"], row.split(","), strict=True)) for row in table["rows"]]


@pytest.fixture(scope="module")
def efficiency() -> Callable[[str, str, str, int], float]:
    found = {
        (r["model"], r["link"], r["algorithm"], int(r["nodes"])): float(r["efficiency"])
        for r in rows_of("points")
    }
    return lambda model, link, algorithm, nodes: found[model, link, algorithm, nodes]


@pytest.fixture(scope="module")
def goodput() -> Callable[..., float]:
    found = {
        (r["model"], r["link"], r["system"], int(r["nodes"]), r["rate"], float(r["silent_share"])): float(
            r["useful_s"]
        )
        / float(r["wall_s"])
        for r in rows_of("lives")
    }
    return lambda model, link, system, rate="day", silent=0.0: found[model, link, system, 1024, rate, silent]


def between(values: Iterable[float]) -> str:
    """The values as the page writes them: one number, or the least and the most."""
    ends = sorted({f"{value:.2f}" for value in values})
    return ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def test_the_page_is_about_this_study() -> None:
    assert f"../benchmarks/results/{STUDY.stem}.md" in PAGE


def test_figures_of_efficiency(efficiency: Callable[[str, str, str, int], float]) -> None:
    def vgg16(algorithm: str, link: str = "10 Gbit/s", nodes: int = 128) -> str:
        return f"{efficiency('VGG16', link, algorithm, nodes):.2f}"

    assert (
        f"VGG16 reaches {vgg16('ddp')} with DDP on 128 nodes, {vgg16('bytegrad')} with ByteGrad, "
        f"{vgg16('qadam_1bit')} with 1-bit QAdam and {vgg16('streaming_diloco_int4')} with Streaming DiLoCo"
    ) in PAGE
    rdma = [vgg16("gradient_allreduce", "100 Gbit/s RDMA", nodes) for nodes in (8, 128)]
    assert f"VGG16 then reaches {rdma[0]} on 8 nodes and {rdma[1]} on 128 with plain allreduce" in PAGE
    whole, half = (efficiency("VGG16", "10 Gbit/s", name, 128) for name in ("ddp", "ddp_fp16"))
    assert (
        f"reaches {half:.2f} with VGG16 on 128 nodes at 10 Gbit/s, {half / whole:.1f} times plain DDP" in PAGE
    )


def test_figures_of_the_sharded_model(efficiency: Callable[[str, str, str, int], float]) -> None:
    sums = [efficiency(SHARDED, link, "gradient_allreduce", n) for link in TCP for n in (8, 128, 1024)]
    assert f"stays below {max(sums) + 0.005:.2f} with allreduce between nodes" in PAGE
    streaming, local = (
        between(efficiency(SHARDED, link, name, 128) for link in TCP)
        for name in ("streaming_diloco_int4", "local_sgd")
    )
    assert f"Streaming DiLoCo keeps {streaming} on 128 nodes, local SGD {local}." in PAGE


def test_figures_of_failures(goodput: Callable[..., float]) -> None:
    for models, links, label in (
        (REPLICATED, TCP, "VGG16, BERT-Large, LSTM+AlexNet | all three"),
        ((SHARDED,), TCP[:1], "7B HSDP | 10 Gbit/s"),
        ((SHARDED,), TCP[1:], "7B HSDP | 25 and 100 Gbit/s"),
    ):
        cells = [
            between(goodput(model, link, system, silent=silent) for model in models for link in links)
            for system, silent in (("bagua", 0.0), ("torchft", 0.0), ("torchrun", 0.0), ("torchrun", 0.2))
        ]
        assert f"| {label} | {' | '.join(cells)} |" in PAGE


def test_figures_of_a_failure_a_month(goodput: Callable[..., float]) -> None:
    def of(system: str, links: Iterable[str]) -> str:
        return between(goodput(SHARDED, link, system, "month") for link in links)

    assert of("bagua", TCP[:1]) == of("torchft", TCP[:1])
    assert of("bagua", TCP[1:]) == of("torchft", TCP[1:])
    assert (
        f"keep {of('bagua', TCP[:1])} of their throughput at 10 Gbit/s and {of('bagua', TCP[1:])} at 25 and 100 Gbit/s "
        f"with Bagua and with torchft; {of('torchrun', TCP[:1])} and {of('torchrun', TCP[1:])} with torchrun"
    ) in PAGE


def test_figures_of_silent_failures(goodput: Callable[..., float]) -> None:
    def cost(system: str) -> str:
        lost = [
            goodput(model, link, system) - goodput(model, link, system, silent=0.2)
            for model in (*REPLICATED, SHARDED)
            for link in TCP
        ]
        ends = sorted({f"{value:.3f}" for value in lost})
        return ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"

    assert (
        f"Silent failures cost Bagua {cost('bagua')} in these cases, and torchft {cost('torchft')}." in PAGE
    )
