"""`tune` against a real etcd: only desired state is written, and only of a job that can have it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagua_agent.autotune import tuned_records
from bagua_agent.autotune.records import encode_study
from bagua_agent.autotune.study_records import Phase, Study, Trial
from bagua_agent.autotune.tuned_records import PREFIX, Tuned, TunedFor
from bagua_agent.autotune.tuned_store import keep_tuned, read_tuned
from bagua_agent.base.errors import InfrastructureLost, UserError
from bagua_agent.cluster_client import tune
from bagua_agent.cluster_client.tune import pin, show
from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd.client import Put, Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.large_jobs.limits import Limits
from bagua_agent.large_jobs.record_parts import stored
from bagua_agent.large_jobs.stored_record import whole_value
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import PROTOCOL_VERSION, Generation, GenerationKind
from bagua_contract.step_settings import StepSettings, frozen_note
from bagua_launch.errors import RequestError
from bagua_launch.tune_command import size_bytes
from tests.launch.launcher import Launcher

KEYS = JobKeys("demo")


@pytest.fixture
def store(etcd: EmbeddedEtcd) -> Iterator[Store]:
    """An empty one."""
    client = Store(store_config([etcd.endpoint], StoreCredentials()))
    client.delete_prefix("/")
    yield client
    client.close()


def begin(
    store: Store, algorithm: str = "gradient_allreduce", optimizers: str = "SGD", **spec: object
) -> None:
    record = pb.JobSpec(protocol=PROTOCOL_VERSION, nonce="n", **spec)  # type: ignore[arg-type]
    store.put(KEYS.spec, record.SerializeToString())
    fingerprint = {"algorithm": algorithm, "optimizers": optimizers}
    generation = Generation(2, 1, GenerationKind.PLANNED, (), "n", fingerprint=fingerprint)
    store.put(KEYS.generation, generation.encode())


def pinned(store: Store) -> StepSettings:
    found = store.get(KEYS.settings)
    assert found is not None
    return StepSettings.from_proto(pb.PinnedSettings.FromString(found.value).settings)


def test_from_the_command_line(launch: Launcher, etcd: EmbeddedEtcd, store: Store) -> None:
    begin(store)
    env = {"BAGUA_ETCD": etcd.endpoint}
    result = launch("tune", "demo", env=env)
    nothing = "job 'demo': generation 2: as the script says; pinned: as the script says\n"
    assert (result.exit_code, result.output) == (0, nothing)
    assert store.get(KEYS.settings) is None

    result = launch("tune", "demo", "--bucket-size", "4MiB", "--hierarchical", "off", env=env)
    assert result.output.endswith("pinned: buckets of 4 MiB, flat; the next one follows what is pinned\n")
    assert pinned(store) == StepSettings(4 << 20, False)

    launch("tune", "demo", "--hierarchical", "script", "--algorithm", "bytegrad", env=env)
    assert pinned(store) == StepSettings(4 << 20, None, "bytegrad"), "what was not named stays"
    shown = json.loads(launch("tune", "demo", "--json", env=env).output)
    assert shown["pinned"] == {
        "bucket_bytes": 4 << 20,
        "hierarchical": None,
        "algorithm": "bytegrad",
        "order": [],
    }

    launch("tune", "demo", "--forget", env=env)
    assert pinned(store).is_empty, "written, not removed: a key that is gone is one that etcd lost"


def test_the_study_under_way_is_shown(store: Store) -> None:
    begin(store)
    trial = Trial(StepSettings(hierarchical=True), 30, 10.0)
    store.put(KEYS.study, encode_study(Study(2, "4 workers on 2 nodes", Phase.RESTING, trials=(trial,))))
    words = "; study 2 of 4 workers on 2 nodes is resting after 1 trial, best: hierarchical (3 steps/s)"
    assert str(show(store, "demo")).endswith(words)
    store.put(KEYS.study, b"\xff")
    assert str(show(store, "demo")).endswith("; the study can't be read")


def test_trials_are_drawn(launch: Launcher, etcd: EmbeddedEtcd, store: Store, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    env, picture = {"BAGUA_ETCD": etcd.endpoint}, tmp_path / "trials.svg"
    begin(store)
    words = ("tune", "demo", "--plot", str(picture))
    assert "has no study; start jobs with --autotune-level" in launch(*words, env=env).output
    trials = (Trial(StepSettings(), 20, 10.0, 12.0), Trial(StepSettings(hierarchical=True), 30, 10.0, 40.0))
    store.put(KEYS.study, encode_study(Study(2, "4 workers on 2 nodes", Phase.SETTLED, trials=trials)))
    result = launch(*words, env=env)
    assert result.exit_code == 0 and picture.stat().st_size > 1000, result.output
    store.put(KEYS.study, b"\xff")
    assert launch(*words, env=env).exit_code == 2


def put_in_parts(store: Store, generation: Generation) -> None:
    """As a job of many workers does: the generation's key has a head alone."""
    form = stored(generation, KEYS, Limits(whole_record_members=-1))
    for part in (*form.parts, Put(KEYS.generation, form.value)):
        store.put(part.key, part.value)


def test_a_large_job_shows_its_settings_and_is_refused_what_it_cannot_have(store: Store) -> None:
    begin(store)
    fingerprint = {"algorithm": "gradient_allreduce", "optimizers": "SGD", "virtual_shards": "8"}
    settings = StepSettings(4 << 20)
    large = Generation(3, 2, GenerationKind.PLANNED, (), "n", fingerprint=fingerprint, settings=settings)
    put_in_parts(store, large)
    assert (show(store, "demo").generation, show(store, "demo").newest) == (3, settings)
    with pytest.raises(UserError, match="deterministic"):
        pin(store, "demo", {"bucket_bytes": 4096})
    store.delete_prefix(KEYS.records)
    missing = "parts of its newest generation's record are missing"
    with pytest.raises(InfrastructureLost, match=missing):
        show(store, "demo")
    with pytest.raises(InfrastructureLost, match=missing):
        pin(store, "demo", {"bucket_bytes": 4096})


def test_a_record_that_is_replaced_while_it_is_read_is_read_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(store)
    settings = StepSettings(4 << 20)
    put_in_parts(store, Generation(3, 2, GenerationKind.PLANNED, (), "n", settings=settings))
    store.delete_prefix(KEYS.records)
    reads = 0

    def replaced_at_first(*arguments: Any) -> bytes | None:
        nonlocal reads
        reads += 1
        if reads == 1:
            newer = Generation(4, 3, GenerationKind.PLANNED, (), "n", settings=settings)
            put_in_parts(store, newer)
            return None
        return whole_value(*arguments)

    monkeypatch.setattr(tune, "whole_value", replaced_at_first)
    assert (show(store, "demo").generation, reads) == (4, 2)


@pytest.mark.parametrize("large", [False, True])
def test_forgetting_removes_what_trials_of_the_model_found(store: Store, large: bool) -> None:
    fingerprint = {"model": "10 parameters", "algorithm": "gradient_allreduce"}
    store.put(KEYS.spec, pb.JobSpec(protocol=PROTOCOL_VERSION, nonce="n").SerializeToString())
    generation = Generation(2, 1, GenerationKind.PLANNED, (), "n", fingerprint=fingerprint)
    if large:
        put_in_parts(store, generation)
    else:
        store.put(KEYS.generation, generation.encode())
    for place in (
        TunedFor("10 parameters; gradient_allreduce", "w", "n"),
        TunedFor("10 parameters; gradient_allreduce", "w", "m"),
        TunedFor("another", "w", "n"),
    ):
        keep_tuned(store, Tuned(place, StepSettings(4096), 2.0, 1.0, "first", 1e9))
    store.put(PREFIX + "odd", b"\xff")
    assert "forgot what trials of this model had found (2 records)" in str(
        pin(store, "demo", {}, forgets=True)
    )
    records, odd = read_tuned(store)
    assert [r.place.model for r in records.values()] == ["another"] and len(odd) == 1
    pin(store, "demo", {"bucket_bytes": 4096})
    pin(store, "demo", {}, forgets=True)
    value = store.get(KEYS.settings)
    assert value is not None and pb.PinnedSettings.FromString(value.value).forgets == 2, "each is a request"


def test_the_store_keeps_a_bounded_number_of_records(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned_records, "MOST_RECORDS", 2)
    for world in ("1", "2", "3", "2"):
        keep_tuned(store, Tuned(TunedFor("m", world, "n"), StepSettings(4096), 2.0, 1.0, "first", 1e9))
    assert {r.place.world for r in read_tuned(store)[0].values()} == {"2", "3"}


@pytest.mark.parametrize("algorithm", ["local_sgd", "plain loop"])
def test_a_job_that_cannot_be_tuned_is_refused(store: Store, algorithm: str) -> None:
    begin(store, algorithm)
    with pytest.raises(UserError, match="only jobs of gradient_allreduce, bytegrad, qadam can"):
        pin(store, "demo", {"bucket_bytes": 4096})
    assert store.get(KEYS.settings) is None


def test_qadam_is_pinned_where_the_optimizer_is_its_own_and_refused_elsewhere(store: Store) -> None:
    begin(store, optimizers="Adam")
    with pytest.raises(
        UserError, match=r"has the optimizer Adam, and qadam needs bagua.algorithms.QAdamOptimizer"
    ):
        pin(store, "demo", {"algorithm": "qadam"})
    assert store.get(KEYS.settings) is None
    pin(store, "demo", {"algorithm": "bytegrad"})
    begin(store, optimizers="QAdamOptimizer")
    pin(store, "demo", {"algorithm": "qadam"})
    assert pinned(store).algorithm == "qadam"
    begin(store, "qadam(hierarchical=True, bits=8)", optimizers="QAdamOptimizer")
    pin(store, "demo", {"algorithm": "gradient_allreduce"})
    assert pinned(store).algorithm == "gradient_allreduce"


def test_qadam_is_refused_where_parameters_were_frozen_at_the_wrapping(store: Store) -> None:
    """The script may unfreeze them later, which qadam can't follow."""
    note = frozen_note(4, 6, "1a2b3c4d")
    begin(store, "gradient_allreduce" + note, optimizers="QAdamOptimizer")
    with pytest.raises(
        UserError, match=r"frozen when the model was wrapped.*use gradient_allreduce or bytegrad"
    ):
        pin(store, "demo", {"algorithm": "qadam"})
    assert store.get(KEYS.settings) is None
    pin(store, "demo", {"algorithm": "bytegrad"})
    begin(store, "qadam(hierarchical=True, bits=8)" + note, optimizers="QAdamOptimizer")
    pin(store, "demo", {"algorithm": "qadam"})
    assert pinned(store).algorithm == "qadam"


def test_a_job_of_restart_mode_is_refused(store: Store) -> None:
    begin(store, mode=pb.JobSpec.RESTART)
    with pytest.raises(UserError, match="restart mode"):
        pin(store, "demo", {"bucket_bytes": 4096})


def test_an_ended_and_an_unknown_job_are_refused(store: Store) -> None:
    with pytest.raises(UserError, match="no job 'demo' in this etcd"):
        show(store, "demo")
    begin(store)
    store.put(KEYS.result, pb.Result(outcome=pb.Result.SUCCEEDED).SerializeToString())
    with pytest.raises(UserError, match="has ended"):
        pin(store, "demo", {"bucket_bytes": 4096})


def test_a_size_that_no_job_can_use_is_refused(store: Store) -> None:
    begin(store)
    with pytest.raises(UserError, match="buckets of 12 bytes are not from 1024"):
        pin(store, "demo", {"bucket_bytes": 12})


def test_sizes_as_people_write_them() -> None:
    assert [size_bytes(t) for t in ("4MiB", "512 KiB", "1g", "4096", "64K")] == [
        4 << 20, 512 << 10, 1 << 30, 4096, 64 << 10,
    ]  # fmt: skip
    for text in ("", "0", "4 TiB", "-1", "1.5MiB"):
        with pytest.raises(RequestError, match="not a size"):
            size_bytes(text)
