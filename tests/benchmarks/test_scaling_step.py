"""The simulator of a step, against cases computed by hand and sums that must hold in any case."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bagua_core.communication.compressed.chunks import Chunks
from bagua_core.communication.compressed.compressed_sum import _TAIL_BYTES
from bagua_core.kernels.formats import minmax_bytes
from benchmarks.scaling import models
from benchmarks.scaling.hardware import Cluster, Costs, Network, Spread, Transport
from benchmarks.scaling.steps.order import Arrival, Job, SimulatedQueue
from benchmarks.scaling.steps.step import ALGORITHMS, Workload, simulate
from benchmarks.scaling.steps.timeline import Link, vote_s, within_node_s

MB = 1e6
GLOO = Transport.GLOO
FREE = Costs(wire_share=1.0)
ONE_TENSOR = Workload(models.uniform("one", [1_000_000]), compute_s=0.3)
BYTES = 4 * MB


def cluster(
    nodes: int, *, costs: Costs = FREE, latency_s: float = 0.0, transport: Transport = Transport.GLOO
) -> Cluster:
    return Cluster(nodes, Network(10 * MB, latency_s), costs, transport)


def test_an_allreduce_behind_backward() -> None:
    """One bucket leaves when all is computed: 2 * 3/4 * 4 MB at 10 MB/s, and six rounds."""
    found = simulate(cluster(4, latency_s=0.01), ONE_TENSOR, "gradient_allreduce")
    assert found.step_s == pytest.approx(0.3 + 0.6 + 6 * 0.01)
    assert found.sent_bytes == pytest.approx(1.5 * BYTES)
    assert found.busy_s == pytest.approx(0.6)


def test_buckets_travel_while_backward_runs() -> None:
    """Backward takes 2 s for two buckets of 4 MB: the first travels while the second is computed."""
    two = Workload(models.uniform("two", [1_000_000] * 2), 3.0, bucket_cap_bytes=4, first_bucket_bytes=4)
    assert len(two.buckets()) == 2
    found = simulate(cluster(4), two, "gradient_allreduce")
    assert found.step_s == pytest.approx(1.0 + 2.0 + 0.6)
    slow = replace(two, compute_s=0.3)  # now the link is the bottleneck: it begins after half of backward
    assert simulate(cluster(4), slow, "gradient_allreduce").step_s == pytest.approx(0.1 + 0.1 + 1.2)


def test_bytegrad_sends_its_chunks_twice() -> None:
    chunk = Chunks(1_000_000, 4).size
    assert chunk == 250_000
    found = simulate(cluster(4), ONE_TENSOR, "bytegrad")
    sent = 3 * minmax_bytes(chunk) + 3 * (minmax_bytes(chunk) + _TAIL_BYTES)
    assert found.sent_bytes == sent
    assert found.step_s == pytest.approx(0.3 + sent / (10 * MB))


def test_compression_costs_three_passes_and_a_chunk() -> None:
    costs = replace(FREE, codec_s_per_value=1e-8)
    dear, free = (simulate(cluster(4, costs=c), ONE_TENSOR, "bytegrad").step_s for c in (costs, FREE))
    assert dear - free == pytest.approx(1e-8 * (3 * 1_000_000 + 250_000))


def test_small_buckets_travel_as_they_are() -> None:
    small = Workload(models.uniform("small", [1000]), 0.1)
    assert simulate(cluster(4), small, "bytegrad").sent_bytes == pytest.approx(1.5 * 4000)


def test_weights_travel_while_the_step_computes() -> None:
    quick = simulate(cluster(4), ONE_TENSOR, "decentralized")
    assert quick.step_s == pytest.approx(0.6)  # the link's
    busy = simulate(cluster(4), replace(ONE_TENSOR, compute_s=5.0), "decentralized")
    assert busy.step_s == pytest.approx(5.0)
    assert quick.sent_bytes == busy.sent_bytes == pytest.approx(1.5 * BYTES)


def test_pairs_and_rings_send_to_their_peers() -> None:
    pair = simulate(cluster(4), ONE_TENSOR, "decentralized_shift_one")
    assert (pair.step_s, pair.sent_bytes) == (pytest.approx(0.4), BYTES)
    ring = simulate(cluster(4), ONE_TENSOR, "low_precision_decentralized")
    assert ring.sent_bytes == 2 * minmax_bytes(1_000_000)
    assert ring.step_s == pytest.approx(0.3 + ring.sent_bytes / (10 * MB))


def test_local_sgd_averages_once_in_a_round() -> None:
    found = simulate(cluster(4), replace(ONE_TENSOR, sync_every=10), "local_sgd")
    assert found.step_s == pytest.approx((10 * 0.3 + 0.6) / 10)
    assert max(found.single_s) == pytest.approx(0.9)
    assert found.sent_bytes == pytest.approx(0.15 * BYTES)


def test_background_exchanges_do_not_delay_steps() -> None:
    for algorithm in ("async", "streaming_diloco_int4"):
        long = replace(ONE_TENSOR, diloco_every=20)
        found = simulate(cluster(4), long, algorithm)
        assert found.step_s == pytest.approx(0.3, rel=0.06), algorithm


def test_a_processor_can_be_slower_than_the_link() -> None:
    costs = replace(FREE, transport_s_per_byte=1 / MB)
    found = simulate(cluster(4, costs=costs), ONE_TENSOR, "gradient_allreduce")
    assert found.step_s == pytest.approx(0.3 + 6.0, rel=0.001)
    assert FREE.shared_by(4, 2) == FREE
    assert costs.shared_by(4, 2).transport_s_per_byte == pytest.approx(2 / MB)
    equal = replace(FREE, transport_s_per_byte=0.1 / MB)  # as slow as the link
    assert cluster(4, costs=equal).byte_s == pytest.approx(2 ** (1 / 4) * 0.1 / MB)
    assert costs.shared_by(1, 2) == costs
    assert costs.shared_by(8, 2, 0.5).transport_s_per_byte == pytest.approx(2 / MB)


def test_a_burst_leaves_an_idle_link_at_once() -> None:
    """1 MB of 6 does not wait for the link, and grows again while the link is idle: 0.5 MB in 0.05 s of computation."""
    network = Network(10 * MB, 0.0, burst_bytes=1 * MB)
    found = simulate(replace(cluster(4), network=network), ONE_TENSOR, "gradient_allreduce")
    assert found.step_s == pytest.approx(0.3 + 0.5)
    short = replace(ONE_TENSOR, compute_s=0.05)
    assert simulate(
        replace(cluster(4), network=network), short, "gradient_allreduce"
    ).step_s == pytest.approx(0.6)
    slow = replace(FREE, transport_s_per_byte=1 / MB)  # a burst of the link makes no processor faster
    found = simulate(replace(cluster(4, costs=slow), network=network), ONE_TENSOR, "gradient_allreduce")
    assert found.step_s == pytest.approx(0.3 + 6.0, rel=0.001)


def test_nccl_takes_a_tree_where_rounds_are_dear() -> None:
    random = np.random.default_rng(0)
    many = Link(cluster(1024, latency_s=0.001, transport=Transport.NCCL), random)
    traffic = many.allreduce_traffic(1000.0)
    assert (traffic.sent_bytes, traffic.rounds) == (2000.0, 20)
    assert many.allreduce_traffic(100 * MB).rounds == 20
    few = Link(cluster(4, transport=Transport.NCCL), random)
    assert few.allreduce_traffic(100 * MB).sent_bytes == 150 * MB
    assert Link(cluster(1024, latency_s=0.001), random).allreduce_traffic(1000.0).rounds == 2046


def test_the_vote_visits_every_worker() -> None:
    eight = replace(
        cluster(4),
        workers_per_node=8,
        vote_latency_s=1e-4,
        inner_vote_latency_s=1e-5,
        transport=Transport.NCCL,
    )
    assert vote_s(eight) == pytest.approx(2 * 31 / 32 * (4 * 1e-4 + 28 * 1e-5))
    silent = replace(eight, vote_latency_s=0.0, inner_vote_latency_s=0.0)
    with_vote, without = (simulate(c, ONE_TENSOR, "bytegrad").step_s for c in (eight, silent))
    assert with_vote - without == pytest.approx(vote_s(eight))
    beside, ddp = (simulate(eight, ONE_TENSOR, a).step_s for a in ("gradient_allreduce", "ddp"))
    assert beside == pytest.approx(ddp)  # it travels beside the bucket, which takes longer
    long = replace(eight, vote_latency_s=1.0)
    assert simulate(long, ONE_TENSOR, "gradient_allreduce").step_s == pytest.approx(0.3 + vote_s(long))


def test_a_slow_node_delays_those_that_wait_for_it() -> None:
    slow = replace(cluster(8), spread=Spread(slow_nodes=1, slow_factor=2.0))
    found = simulate(slow, ONE_TENSOR, "gradient_allreduce")
    assert found.step_s == pytest.approx(0.6 + 2 * 7 / 8 * 0.4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bounds_that_hold_for_every_algorithm(algorithm: str) -> None:
    """No step is shorter than its computation or its interface's work; one node sends nothing; a seed repeats."""
    load = Workload(models.lstm_alexnet(), 0.2, sync_every=8, diloco_every=12)
    costs = Costs(0.95, 1e-10, 1e-10, 1e-10, 1e-5, 1e-6, 1e-4)
    rough = replace(
        cluster(6, costs=costs),
        network=Network(100 * MB, 1e-4, jitter_s=1e-4),
        spread=Spread(sigma=0.05),
    )
    found = simulate(rough, load, algorithm, seed=3)
    assert found.step_s >= found.busy_s * (1 - 1e-9)
    assert found.step_s > 0.2 * 0.9
    assert found == simulate(rough, load, algorithm, seed=3)
    assert found != simulate(rough, load, algorithm, seed=4)
    assert simulate(replace(rough, nodes=1), load, algorithm).sent_bytes == 0
    faster = replace(rough, network=Network(1000 * MB, 1e-4, jitter_s=1e-4))
    if algorithm != "async":  # it averages more often then, and each time copies the model
        assert simulate(faster, load, algorithm, seed=3).step_s <= found.step_s * 1.01


def test_jobs_follow_the_queues_order() -> None:
    """A launch moves the jobs before it on by one wait, after the new one has begun; a flush runs all to the end."""
    operation_queue, happened = SimulatedQueue(1), []

    def job(name: str) -> Job:
        for part in range(3):
            happened.append((f"{name}{part}", float(operation_queue.clock.at[0])))
            yield Arrival(operation_queue.clock, operation_queue.clock.at + 1.0)

    operation_queue.launch(np.array([0.0]), job("a"))
    operation_queue.launch(np.array([0.5]), job("b"))
    end = operation_queue.flush(np.array([5.0]))
    # a's first wait ends at 1.0 and b's at 1.5, but both go on at the flush
    assert happened == [("a0", 0.0), ("b0", 0.5), ("a1", 1.0), ("a2", 5.0), ("b1", 5.0), ("b2", 6.0)]
    assert float(end[0]) == 7.0


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(ValueError, match="'nothing' is unknown"):
        simulate(cluster(2), ONE_TENSOR, "nothing")


def test_models_have_their_published_sizes() -> None:
    sizes = {
        m.name: round(m.parameters / MB) for m in (models.vgg16(), models.bert_large(), models.llama_7b())
    }
    assert sizes == {"VGG16": 138, "BERT-Large": 334, "7B HSDP": 6738}
    ready = models.vgg16().ready_after()
    assert ready[0] == pytest.approx(1.0) and ready[-1] < 0.01  # the classifier's gradients come first
    assert models.vgg16().specs()[0].elements == 3 * 3 * 3 * 64


def test_a_node_of_one_worker_has_no_inner_stage() -> None:
    assert within_node_s(cluster(4), BYTES, 2) == 0.0
    eight = replace(cluster(4), workers_per_node=8, inner_bytes_per_s=1e9)
    assert within_node_s(eight, BYTES, 2) == pytest.approx(2 * 7 / 8 * BYTES / 1e9)
