"""The metrics of a job, by Prometheus's rules: names, types, help and labels. Pure.

Each series has the labels `bagua_job` (the job's id; `job` is Prometheus's own) and `node`. A counter whose labels are
known before anything is counted begins at 0: Prometheus sees no increase in the first value of a series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from bagua_agent.metrics.job_picture import WAYS_TO_END, JobPicture
from bagua_contract import session_pb2
from bagua_contract.compression_ratio import compression_of
from bagua_contract.records import GenerationKind
from bagua_contract.time_use import STEP_TIME_BOUNDS_S, TimeUse, goodput_of

LABELS = ("bagua_job", "node")
Samples = Mapping[tuple[str, ...], float]  # by the values of the further labels
_BOUNDS = (*(f"{bound:g}" for bound in STEP_TIME_BOUNDS_S), "+Inf")
_NOTHING_SPENT = {use.value: 0.0 for use in TimeUse}
_NO_REPORT = session_pb2.Progress(step_counts=[0] * len(_BOUNDS))


class _Families:
    """Makes families whose samples have the labels of one node first."""

    def __init__(self, job_id: str, node_name: str) -> None:
        self._first = (job_id, node_name)

    def gauge(self, name: str, help: str, labels: tuple[str, ...], samples: Samples) -> Metric:
        family = GaugeMetricFamily(f"bagua_{name}", help, labels=(*LABELS, *labels))
        return self._filled(family, samples)

    def counter(self, name: str, help: str, labels: tuple[str, ...], samples: Samples) -> Metric:
        family = CounterMetricFamily(f"bagua_{name}", help, labels=(*LABELS, *labels))
        return self._filled(family, samples)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
        for values, value in samples.items():
            family.add_metric((*self._first, *values), value)
        return family

    def step_times(self, counted: Mapping[str, session_pb2.Progress]) -> Metric:
        family = HistogramMetricFamily(
            "bagua_step_seconds",
            "Times of committed steps, from boundary to commit.",
            labels=(*LABELS, "slot"),
        )
        for slot, progress in counted.items():
            if len(progress.step_counts) != len(_BOUNDS):
                continue  # a worker of another version
            below, buckets = 0, []
            for bound, count in zip(_BOUNDS, progress.step_counts, strict=True):
                below += count
                buckets.append((bound, below))
            family.add_metric((*self._first, slot), buckets, sum_value=progress.step_sum_s)
        return family


def families(picture: JobPicture, net: Mapping[int, Mapping[str, int]]) -> Iterator[Metric]:
    """Yields the metrics of a job. net: counters of Bagua-Net by slot, of the workers that have loaded it."""
    make = _Families(picture.job_id, picture.node_name)
    alone: tuple[str, ...] = ()
    yield make.gauge("generation", "Number of the newest generation.", (), {alone: picture.generation})
    yield make.gauge("world_size", "Workers in the newest generation.", (), {alone: picture.world_size})
    yield make.gauge("nodes", "Nodes in the newest generation.", (), {alone: picture.nodes})
    yield make.gauge(
        "replicas", "Copies of the model in the newest generation.", (), {alone: picture.replicas}
    )
    yield make.gauge("replica_size", "Workers that hold one copy.", (), {alone: picture.replica_size})
    present = picture.present_nodes
    yield make.gauge(
        "present_nodes",
        "Nodes whose agents are in the job, in the newest generation or not; the leader alone knows it.",
        (),
        {} if present is None else {alone: present},
    )
    wanted: Samples = dict(zip((("min",), ("max",)), map(float, picture.wanted), strict=True))
    yield make.gauge("wanted_nodes", "Nodes that the job may have.", ("bound",), wanted)
    yield make.gauge("leader", "1 on the node whose agent leads the job.", (), {alone: picture.leads})
    yield make.gauge("workers", "Worker processes on this node.", (), {alone: len(picture.workers)})
    yield make.gauge(
        "restart_mode",
        "1 where workers start anew with each generation and report no steps.",
        (),
        {alone: picture.restarts},
    )
    yield make.counter(
        "generations",
        "Generations that this agent saw, by kind.",
        ("kind",),
        {(kind.name.lower(),): picture.generations.get(kind.name.lower(), 0) for kind in GenerationKind},
    )
    running = {worker.slot for worker in picture.workers}
    yield make.counter(
        "worker_exits",
        "Workers of this node that ended: ok, error (an exit code of their own) or signal.",
        ("slot", "how"),
        {
            (str(slot), how): picture.exits.get((slot, how), 0)
            for slot in sorted(running | {slot for slot, _ in picture.exits})
            for how in WAYS_TO_END
        },
    )
    yield make.counter(
        "worker_restarts",
        "Workers that were started in the place of one that had ended.",
        ("slot",),
        {
            (str(slot),): float(sum(n for (of, _), n in picture.exits.items() if of == slot))
            for slot in sorted(running)
        },
    )
    yield from _tuning(make, picture)
    yield from _reports(make, picture)
    yield make.gauge("etcd_up", "1 while etcd answers this agent.", (), {alone: picture.store_answers})
    yield make.counter("etcd_outages", "Outages of etcd.", (), {alone: picture.store_outages})
    yield make.counter("etcd_outage_seconds", "Time without etcd.", (), {alone: picture.store_away_s})
    for name in sorted({name for counters in net.values() for name in counters}):
        samples: Samples = {(str(slot),): float(of[name]) for slot, of in net.items() if name in of}
        help = f"Bagua-Net's counter {name} of a worker."
        make_one = make.gauge if name == "connections_open" else make.counter
        yield make_one(f"net_{name}", help, ("slot",), samples)


def _tuning(make: _Families, picture: JobPicture) -> Iterator[Metric]:
    """Yields the metrics of tuning: of the leader alone, once there is a trial."""
    if picture.trials:
        alone: tuple[str, ...] = ()
        yield make.gauge("autotune_trials", "Trials of the study under way.", (), {alone: picture.trials})
        yield make.gauge(
            "autotune_best_steps_per_second", "Rate of its best trial.", (), {alone: picture.best_steps_per_s}
        )
        yield make.gauge(
            "autotune_lost_seconds",
            "Time of training that its trials cost.",
            (),
            {alone: picture.trials_lost_s},
        )


def _reports(make: _Families, picture: JobPicture) -> Iterator[Metric]:
    """Yields the metrics of the last report of each worker; a worker's counters begin at 0 when it starts."""
    told = {str(w.slot): w.progress for w in picture.workers if w.progress is not None}
    # in restart mode no report will come
    starting = {} if picture.restarts else {str(w.slot): _NO_REPORT for w in picture.workers}
    counted = starting | told
    without_rank = {str(w.slot) for w in picture.workers if w.global_rank is None}
    # the last report of a worker on standby stays as it was, so it says nothing about the job now
    ranked = {s: p for s, p in told.items() if s not in without_rank}
    yield make.gauge(
        "worker_rank",
        "Global rank of a slot's worker in the newest generation; absent outside it.",
        ("slot",),
        {(str(w.slot),): w.global_rank for w in picture.workers if w.global_rank is not None},
    )
    sharded = [w for w in picture.workers if w.replica_rank is not None and w.shard_rank is not None]
    yield make.gauge(
        "worker_replica",
        "Replica rank of a slot's worker; absent outside the newest generation, and where a worker is a replica.",
        ("slot",),
        {(str(w.slot),): float(w.replica_rank or 0) for w in sharded},
    )
    yield make.gauge(
        "worker_shard",
        "Shard rank of a slot's worker in its replica; absent where its replica rank is.",
        ("slot",),
        {(str(w.slot),): float(w.shard_rank or 0) for w in sharded},
    )
    yield make.gauge(
        "step", "Steps that the job has committed.", ("slot",), {(s,): p.step for s, p in told.items()}
    )
    yield make.gauge("epoch", "The loader's epoch.", ("slot",), {(s,): p.epoch for s, p in told.items()})
    yield make.gauge(
        "steps_per_second",
        "Steps a second, lately; absent outside the newest generation.",
        ("slot",),
        {(s,): p.steps_per_s for s, p in ranked.items()},
    )
    yield make.gauge(
        "samples_per_second",
        "Samples of the whole job a second, lately; absent where batches have no known size, and outside the newest "
        "generation.",
        ("slot",),
        {(s,): p.steps_per_s * p.step_samples for s, p in ranked.items() if p.step_samples},
    )
    yield make.counter(
        "computing_seconds",
        "Time of committed steps without waits in collectives.",
        ("slot",),
        {(s,): p.computing_s for s, p in counted.items()},
    )
    yield from _amounts(make, told)
    yield make.gauge(
        "script_metric",
        "What the script reports by bagua.report(); absent outside the newest generation.",
        ("slot", "name"),
        {(s, name): value for s, p in ranked.items() for name, value in p.metrics.items()},
    )
    yield make.counter(
        "time_seconds",
        "Time of a worker by use; step alone is goodput.",
        ("slot", "use"),
        {
            (s, use): seconds
            for s, p in counted.items()
            for use, seconds in (_NOTHING_SPENT | dict(p.spent_s)).items()
        },
    )
    goodputs = {s: goodput_of(p.spent_s) for s, p in told.items()}
    yield make.gauge(
        "goodput_ratio",
        "Share of committed steps in a worker's time since its first generation, without standby.",
        ("slot",),
        {(s,): share for s, share in goodputs.items() if share is not None},
    )
    yield make.step_times(counted)


def _amounts(make: _Families, told: Mapping[str, session_pb2.Progress]) -> Iterator[Metric]:
    """Yields samples and bytes. told: the last report by slot."""
    yield make.gauge(
        "total_steps",
        "Steps of all epochs that the script asked for; absent where this is unknown.",
        ("slot",),
        {(s,): p.total_steps for s, p in told.items() if p.total_steps},
    )
    yield make.counter(
        "samples",
        "Samples of the whole job in the steps that this worker committed.",
        ("slot",),
        {(s,): p.samples for s, p in told.items() if p.step_samples},
    )
    yield make.counter(
        "sent_bytes",
        "Bytes handed to Gloo and NCCL, compressed where the algorithm compresses, without copies of the state.",
        ("slot", "algorithm"),
        {(s, p.algorithm): p.sent_bytes for s, p in told.items()},
    )
    yield make.gauge(
        "gradient_bytes",
        "Size of the trained parameters' gradients, uncompressed: what plain data parallelism exchanges in a step.",
        ("slot", "algorithm"),
        {(s, p.algorithm): p.gradient_bytes for s, p in told.items() if p.gradient_bytes},
    )
    ratios = {s: compression_of(p) for s, p in told.items()}
    yield make.gauge(
        "compression_ratio",
        "Bytes of gradients for each byte handed to Gloo and NCCL since the worker started; absent before any.",
        ("slot", "algorithm"),
        {(s, told[s].algorithm): ratio for s, ratio in ratios.items() if ratio is not None},
    )
    yield make.counter(
        "heal_bytes",
        "Bytes of copies of the state that a worker received, by the network interface of this host.",
        ("slot", "interface"),
        {(s, p.interface): p.copied_bytes for s, p in told.items()},
    )
    yield make.counter(
        "heal_seconds",
        "Time in which these copies came; time_seconds has the part of it for which the script waited.",
        ("slot", "interface"),
        {(s, p.interface): p.copied_s for s, p in told.items()},
    )
