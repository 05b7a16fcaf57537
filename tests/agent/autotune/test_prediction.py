"""The predicted time of a step follows from bandwidth, latency and computation, and agrees with the simulator's."""

from __future__ import annotations

import pytest

from bagua_agent.autotune.prediction import CODEC_S_PER_VALUE, MEMORY_S_PER_BYTE, Link, Load, link_of, step_s
from bagua_contract.collective_costs import compressed_bytes, ring_allreduce
from bagua_core.kernels.formats import minmax_bytes
from benchmarks.scaling.hardware import Cluster, Costs, Network
from benchmarks.scaling.models import Layer, Model
from benchmarks.scaling.steps.step import Workload, simulate

MBIT = 1e6 / 8


def timed(link: Link, workers: int, *sizes: int) -> list[tuple[int, float]]:
    costs = [ring_allreduce(workers, size) for size in sizes]
    return [
        (size, cost.sent_bytes / link.bytes_per_s + cost.rounds * link.latency_s)
        for size, cost in zip(sizes, costs, strict=True)
    ]


def test_the_link_is_found_from_the_times_of_buckets() -> None:
    link = Link(12e6, 0.002)
    found = link_of(timed(link, 4, 1 << 20, 25 << 20, 3 << 20), 4)
    assert found is not None
    assert found.bytes_per_s == pytest.approx(12e6) and found.latency_s == pytest.approx(0.002)


@pytest.mark.parametrize("sizes", [(1 << 20,), (1 << 20, 1 << 20)])
def test_buckets_of_one_size_tell_the_bandwidth_alone(sizes: tuple[int, ...]) -> None:
    found = link_of(timed(Link(12e6, 0.0), 4, *sizes), 4)
    assert found is not None and found.latency_s == 0.0
    assert found.bytes_per_s == pytest.approx(12e6)


def test_noise_makes_no_negative_link() -> None:
    """Here the larger bucket was faster."""
    found = link_of([(1 << 20, 0.5), (4 << 20, 0.1), (64, 0.0)], 2)
    assert found is not None and found.bytes_per_s > 0 and found.latency_s >= 0


def test_nothing_is_known_where_nothing_was_measured_or_sent() -> None:
    assert link_of([], 4) is None
    assert link_of([(1 << 20, 0.1)], 1) is None
    assert link_of([(0, 0.1)], 4) is None


@pytest.mark.parametrize("gbit, gain", [(0.1, 3.0), (1.0, 2.5)])
def test_bytegrad_is_worth_it_where_the_network_is_slow(gbit: float, gain: float) -> None:
    load, link = Load(0.05, (1 << 20, 25 << 20, 25 << 20), 4, 4), Link(gbit * 1000 * MBIT, 1e-4)
    assert step_s("gradient_allreduce", load, link) > gain * step_s("bytegrad", load, link)


def test_nothing_is_gained_where_computation_hides_the_network() -> None:
    load, link = Load(1.0, (1 << 20, 1 << 20, 64 << 10), 4, 4), Link(1e9, 1e-5)
    plain, compressed = (step_s(name, load, link) for name in ("gradient_allreduce", "bytegrad"))
    assert plain == pytest.approx(1.0, rel=0.01) and compressed == pytest.approx(1.0, rel=0.01)


def test_qadam_goes_through_memory_nine_times_beside_what_bytegrad_does() -> None:
    """By the arrays that its kernels read and write; see the passes in collective_costs.py."""
    size_bytes = 64 << 20
    load, link = Load(1e-6, (size_bytes,), 4, 4), Link(1e12, 0.0)
    more_s = step_s("qadam", load, link) - step_s("bytegrad", load, link)
    assert more_s == pytest.approx(9 * MEMORY_S_PER_BYTE * size_bytes, rel=1e-3)


def test_one_node_has_nothing_to_compress() -> None:
    load, link = Load(0.1, (1 << 20,), 1, 4), Link(1e9, 1e-5)
    assert step_s("bytegrad", load, link) == step_s("gradient_allreduce", load, link)


def test_an_algorithm_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="'local_sgd'"):
        step_s("local_sgd", Load(0.1, (1 << 20,), 2, 2), Link(1e9, 1e-5))


@pytest.mark.parametrize("values", [1, 2048, 100_000, 1 << 22])
def test_the_size_of_compressed_values_is_the_kernels(values: int) -> None:
    assert compressed_bytes(values) == pytest.approx(minmax_bytes(values), abs=32)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "qadam"])
@pytest.mark.parametrize("mbit", [100, 1000, 10_000])
@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_it_agrees_with_the_simulator(algorithm: str, mbit: int, nodes: int) -> None:
    """Both of a model whose computation and gradients are spread evenly over its layers."""
    compute_s, latency_s = 0.12, 1e-4
    model = Model("even", tuple(Layer(str(i), (1 << 18,), 1.0) for i in range(16)))
    cluster = Cluster(
        nodes,
        Network(mbit * MBIT, latency_s),
        Costs(wire_share=1.0, codec_s_per_value=CODEC_S_PER_VALUE, memory_s_per_byte=MEMORY_S_PER_BYTE),
    )
    load = Workload(model, compute_s, bucket_cap_bytes=4 << 20)
    buckets = tuple(plan.elements * plan.dtype.itemsize for plan in load.buckets())
    simulated = "qadam_8bit" if algorithm == "qadam" else algorithm
    predicted = step_s(algorithm, Load(compute_s, buckets, nodes, nodes), Link(mbit * MBIT, latency_s))
    assert predicted == pytest.approx(simulate(cluster, load, simulated).step_s, rel=0.1)
