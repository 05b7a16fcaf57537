"""The metrics of a picture, read back as Prometheus reads them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bagua_agent.metrics import endpoint
from bagua_agent.metrics.endpoint import exposition, readiness
from bagua_agent.metrics.families import compression_of
from bagua_agent.metrics.job_picture import JobPicture, WorkerPicture, how_it_ended
from bagua_contract import session_pb2
from bagua_contract.net_counters import NoCountersError
from bagua_contract.time_use import STEP_TIME_BOUNDS_S, TimeUse, goodput_of

PROGRESS = session_pb2.Progress(
    generation=3,
    step=17,
    epoch=2,
    steps_per_s=4.0,
    metrics={"loss": 0.25, 'odd "name"': math.nan},
    spent_s={"step": 8.0, "failover": 0.5},
    step_counts=[2, 1] + [0] * (len(STEP_TIME_BOUNDS_S) - 1),
    step_sum_s=0.004,
    computing_s=0.003,
    step_samples=32,
    samples=85,  # with a last batch of 21
    sent_bytes=4000,
    gradient_bytes=900,
    copied_bytes=70,
    copied_s=0.5,
    interface="eth0",
    algorithm="bytegrad",
)


def picture(**changed: Any) -> JobPicture:
    values: dict[str, Any] = {
        "job_id": "demo",
        "node_name": "h1",
        "leads": True,
        "generation": 3,
        "world_size": 2,
        "nodes": 1,
        "wanted": (1, 4),
        "workers": (WorkerPicture(0, 11, 1, PROGRESS), WorkerPicture(1, 12, None, None)),
        "generations": {"planned": 2, "failover": 1},
        "exits": {(1, "signal"): 3},
        "store_answers": False,
        "store_outages": 1,
        "store_away_s": 2.5,
    }
    return JobPicture(**{**values, **changed})


def no_counters(pid: int) -> dict[str, int]:
    raise NoCountersError(f"process {pid} has not loaded Bagua-Net")


@pytest.fixture(autouse=True)
def net(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "read", no_counters)


def samples(of: JobPicture) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values by name and labels, without the two that every series has."""
    found = {}
    for family in text_string_to_metric_families(exposition(of).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("bagua_job"), labels.pop("node")) == (of.job_id, of.node_name)
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def test_what_a_picture_says_is_in_its_metrics() -> None:
    found = samples(picture())

    def value(name: str, /, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    assert value("bagua_generation") == 3
    assert value("bagua_wanted_nodes", bound="max") == 4
    assert value("bagua_workers") == 2
    assert value("bagua_generations_total", kind="failover") == 1
    assert value("bagua_worker_exits_total", slot="1", how="signal") == 3
    assert value("bagua_worker_rank", slot="0") == 1
    assert value("bagua_time_seconds_total", slot="0", use="failover") == 0.5
    assert value("bagua_script_metric", slot="0", name="loss") == 0.25
    assert math.isnan(value("bagua_script_metric", slot="0", name='odd "name"'))
    assert value("bagua_step_seconds_bucket", slot="0", le="0.001") == 2
    assert (
        value("bagua_step_seconds_bucket", slot="0", le="+Inf")
        == value("bagua_step_seconds_count", slot="0")
        == 3
    )
    assert value("bagua_etcd_up") == 0
    of_node = {"worker_exits_total", "worker_restarts_total"}
    begin_at_0 = {"time_seconds_total", "computing_seconds_total"} | {
        f"step_seconds_{part}" for part in ("bucket", "count", "sum")
    }
    without_report = {name for name, labels in found if dict(labels).get("slot") == "1"}
    assert without_report == {f"bagua_{name}" for name in of_node | begin_at_0}
    assert value("bagua_worker_restarts_total", slot="1") == 3
    assert value("bagua_samples_per_second", slot="0") == 128
    assert value("bagua_computing_seconds_total", slot="0") == 0.003
    assert value("bagua_sent_bytes_total", slot="0", algorithm="bytegrad") == 4000
    assert value("bagua_gradient_bytes", slot="0", algorithm="bytegrad") == 900
    assert value("bagua_samples_total", slot="0") == 85
    assert value("bagua_goodput_ratio", slot="0") == pytest.approx(8.0 / 8.5)
    assert value("bagua_compression_ratio", slot="0", algorithm="bytegrad") == 3 * 900 / 4000
    assert value("bagua_heal_bytes_total", slot="0", interface="eth0") == 70
    assert value("bagua_heal_seconds_total", slot="0", interface="eth0") == 0.5
    assert ("bagua_total_steps", frozenset({("slot", "0")})) not in found, "unknown"


def test_counters_with_known_labels_begin_at_0() -> None:
    """Prometheus sees no increase in the first value of a series."""
    found = samples(picture(generations={}, exits={}, workers=(WorkerPicture(0, 11, 1, PROGRESS),)))
    kinds = {"planned", "failover", "restart", "gathering"}
    assert of_name(found, "bagua_generations_total", "kind") == dict.fromkeys(kinds, 0)
    assert of_name(found, "bagua_worker_exits_total", "how") == {"ok": 0, "error": 0, "signal": 0}
    spent = of_name(found, "bagua_time_seconds_total", "use")
    assert spent == dict.fromkeys((use.value for use in TimeUse), 0) | {"step": 8.0, "failover": 0.5}


def test_times_of_a_worker_begin_at_0_before_its_first_report() -> None:
    """Also in a slot whose last worker had counted more: the fall to 0 is a restart of the counter for Prometheus."""
    starting = WorkerPicture(0, 11, None, None)
    found = samples(picture(workers=(starting,), exits={(0, "signal"): 1}))
    assert of_name(found, "bagua_time_seconds_total", "use") == dict.fromkeys(
        (use.value for use in TimeUse), 0
    )
    for name in ("step_seconds_count", "step_seconds_sum", "computing_seconds_total"):
        assert of_name(found, f"bagua_{name}", "slot") == {"0": 0}, name
    assert "bagua_sent_bytes_total" not in {name for name, _ in found}, "its algorithm is not known yet"
    of_restarts = {name for name, _ in samples(picture(workers=(starting,), restarts=True))}
    assert of_restarts.isdisjoint({"bagua_time_seconds_total", "bagua_step_seconds_count"}), (
        "no report will come"
    )


def of_name(
    found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, label: str
) -> dict[str, float]:
    return {dict(labels)[label]: value for (of, labels), value in found.items() if of == name}


def test_the_leader_alone_says_how_many_nodes_there_are() -> None:
    none: frozenset[tuple[str, str]] = frozenset()
    assert samples(picture(present_nodes=3))["bagua_present_nodes", none] == 3
    assert ("bagua_present_nodes", none) not in samples(picture())


def test_a_worker_on_standby_has_counters_and_no_speed_or_numbers_of_the_script() -> None:
    """Its last report stays, and a mean over slots would have its old loss in it for ever."""
    training, waiting = (WorkerPicture(slot, 11 + slot, rank, PROGRESS) for slot, rank in ((0, 1), (1, None)))
    found = samples(picture(workers=(training, waiting)))
    of_both, of_one = ("step", "samples_total", "goodput_ratio"), ("steps_per_second", "samples_per_second")
    for names, slots in ((of_both, {"0", "1"}), ((*of_one, "script_metric"), {"0"})):
        for name in names:
            assert {dict(labels)["slot"] for of, labels in found if of == f"bagua_{name}"} == slots, name


def test_no_ratio_is_shown_of_what_has_not_begun() -> None:
    assert goodput_of({"start": 3.0, "standby": 4.0}) is None
    assert goodput_of({"start": 3.0, "step": 1.0, "standby": 4.0, "hang": 3.0}) == 0.25
    assert compression_of(session_pb2.Progress(gradient_bytes=900, step_counts=[0, 2])) is None
    assert compression_of(session_pb2.Progress(sent_bytes=900)) is None


def test_workers_of_a_sharded_model_have_replica_and_shard() -> None:
    workers = (WorkerPicture(0, 11, 5, PROGRESS, 2, 1), WorkerPicture(1, 12, None, None))
    found = samples(picture(world_size=6, replica_size=2, workers=workers))
    assert found["bagua_replicas", frozenset()] == 3
    assert found["bagua_replica_size", frozenset()] == 2
    assert found["bagua_worker_replica", frozenset({("slot", "0")})] == 2
    assert found["bagua_worker_shard", frozenset({("slot", "0")})] == 1
    assert ("bagua_worker_shard", frozenset({("slot", "1")})) not in found


def test_each_worker_of_another_job_is_a_replica() -> None:
    found = samples(picture())
    assert found["bagua_replicas", frozenset()] == found["bagua_world_size", frozenset()] == 2
    assert not any(name in ("bagua_worker_replica", "bagua_worker_shard") for name, _ in found)


def test_bagua_net_is_counted_where_a_worker_has_loaded_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(pid: int) -> dict[str, int]:
        return {"bytes_sent": 5, "connections_open": 2} if pid == 11 else no_counters(pid)

    monkeypatch.setattr(endpoint, "read", read)
    found = samples(picture())
    assert found["bagua_net_bytes_sent_total", frozenset({("slot", "0")})] == 5
    assert found["bagua_net_connections_open", frozenset({("slot", "0")})] == 2


@pytest.mark.parametrize("restarts", [False, True])
def test_the_mode_of_the_job_is_told(restarts: bool) -> None:
    assert samples(picture(restarts=restarts))["bagua_restart_mode", frozenset()] == restarts


def test_a_study_under_way_is_in_the_leaders_metrics() -> None:
    none: frozenset[tuple[str, str]] = frozenset()
    found = samples(picture(trials=3, best_steps_per_s=2.5, trials_lost_s=0.75))
    assert found["bagua_autotune_trials", none] == 3
    assert found["bagua_autotune_best_steps_per_second", none] == 2.5
    assert found["bagua_autotune_lost_seconds", none] == 0.75
    assert not any("autotune" in name for name, _ in samples(picture()))


def test_a_report_of_another_version_has_no_histogram() -> None:
    other = session_pb2.Progress(step=1, step_counts=[1, 2, 3])
    found = samples(picture(workers=(WorkerPicture(0, 11, 1, other),)))
    assert found["bagua_step", frozenset({("slot", "0")})] == 1
    assert not any(name.startswith("bagua_step_seconds_bucket") for name, _ in found)


def test_a_node_is_ready_while_a_worker_of_it_has_a_rank() -> None:
    assert readiness(picture()).status == 200
    spare = picture(workers=(WorkerPicture(1, 12, None, None),))
    assert readiness(spare).status == 503 and b"no worker of this node" in readiness(spare).body
    assert readiness(None).status == 503


@pytest.mark.parametrize(("returncode", "how"), [(0, "ok"), (1, "error"), (-9, "signal")])
def test_how_a_worker_ended(returncode: int, how: str) -> None:
    assert how_it_ended(returncode) == how
