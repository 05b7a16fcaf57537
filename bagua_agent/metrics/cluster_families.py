"""The metrics of a daemon and of the cluster's queue, by Prometheus's rules: names, types, help and labels. Pure.

Each series has the label `node`: the daemon that serves it. Those of the cluster come from the daemon that schedules,
alone, so that a sum over daemons counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from bagua_agent.metrics.daemon_picture import WAIT_BOUNDS_S, DaemonPicture, QueuePicture

_BOUNDS = (*(f"{bound:g}" for bound in WAIT_BOUNDS_S), "+Inf")


def daemon_families(picture: DaemonPicture) -> Iterator[Metric]:
    node = picture.node_name
    yield _gauge(
        node, "daemon_schedules", "1 at the daemon that schedules.", float(picture.queue is not None)
    )
    yield _gauge(node, "daemon_etcd_up", "1 while etcd's watch reaches this daemon.", float(picture.in_touch))
    yield _gauge(node, "node_slots", "Workers that this node can run.", picture.slots)
    yield _gauge(node, "node_slots_used", "Slots of this node that units of jobs have.", picture.slots_used)
    yield _gauge(node, "node_troubles", "Faults that keep jobs from this node.", picture.troubles)
    yield _gauges(node, "node_units", "Units of jobs on this node.", "state", picture.units)
    if picture.queue is not None:
        yield from _of_cluster(node, picture.queue)


def _of_cluster(node: str, queue: QueuePicture) -> Iterator[Metric]:
    yield _gauges(node, "cluster_jobs", "Submitted jobs that have not ended.", "state", queue.jobs)
    yield _gauges(node, "cluster_nodes", "Nodes of the cluster.", "state", queue.nodes)
    yield _gauges(node, "cluster_slots", "Slots of the cluster's nodes.", "use", queue.slots)
    yield _gauge(
        node,
        "cluster_oldest_wait_seconds",
        "Of the job that has waited longest: since it was submitted, or had no node any more.",
        queue.oldest_wait_s,
    )
    ended = CounterMetricFamily(
        "bagua_cluster_jobs_ended", "Jobs that ended while this daemon schedules.", labels=("node", "outcome")
    )
    for outcome, count in queue.ended.items():
        ended.add_metric((node, outcome), count)
    yield ended
    waits = HistogramMetricFamily(
        "bagua_cluster_wait_seconds",
        "From the submission of a job, or the loss of its last node, until it is given nodes.",
        labels=("node",),
    )
    below, buckets = 0, []
    for bound, count in zip(_BOUNDS, queue.waits, strict=True):
        below += count
        buckets.append((bound, below))
    waits.add_metric((node,), buckets, sum_value=queue.wait_sum_s)
    yield waits


def _gauge(node: str, name: str, help: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"bagua_{name}", help, labels=("node",))
    family.add_metric((node,), value)
    return family


def _gauges(node: str, name: str, help: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(f"bagua_{name}", help, labels=("node", label))
    for value, number in values.items():
        family.add_metric((node, value), number)
    return family
