"""What a study found is kept per model, world and network, in bounded space, and an odd record is passed over."""

from __future__ import annotations

from bagua_agent.autotune.tuned_records import (
    MOST_RECORD_BYTES,
    MOST_RECORDS,
    PREFIX,
    Tuned,
    TunedFor,
    beyond_bound,
    model_of,
    network_of,
    read_all,
    recalled,
)
from bagua_agent.etcd.client import KeyValue
from bagua_contract import membership_pb2 as pb
from bagua_contract.step_settings import StepSettings

MODEL, WORLD, SPEED = "10 parameters, shapes ab; gradient_allreduce", "4 workers on 2 nodes", 1.2e6
FOUND = StepSettings(1 << 20, True, "", (1, 0))


def record(model: str = MODEL, world: str = WORLD, bytes_per_s: float = SPEED) -> Tuned:
    return Tuned(TunedFor(model, world, network_of(bytes_per_s)), FOUND, 3.7, 2.35, "first", 1e9)


def kept(one: Tuned, revision: int = 1) -> KeyValue:
    return KeyValue(one.place.key, one.encode(), revision, revision)


def test_it_is_found_again_for_the_same_model_world_and_network_alone() -> None:
    records, odd = read_all([kept(record())])
    assert not odd and recalled(records, MODEL, WORLD, SPEED) == record()
    assert recalled(records, "another", WORLD, SPEED) is None
    assert recalled(records, MODEL, "3 workers on 2 nodes", SPEED) is None
    assert recalled(records, MODEL, WORLD, 100 * SPEED) is None
    assert recalled(records, MODEL, WORLD, 0.0) is None, "where the network was not measured"
    assert recalled(records, "", WORLD, SPEED) is None


def test_a_measurement_that_differs_a_little_is_of_the_same_network() -> None:
    records, _ = read_all([kept(record())])
    for factor in (0.7, 0.9, 1.1, 1.4):
        assert recalled(records, MODEL, WORLD, SPEED * factor) is not None, factor


def test_a_transport_that_is_not_measured_has_records_of_its_own() -> None:
    records, _ = read_all([kept(record(bytes_per_s=0.0))])
    assert recalled(records, MODEL, WORLD, 0.0) is not None
    assert recalled(records, MODEL, WORLD, SPEED) is None


def test_seed_and_data_are_no_part_of_the_model() -> None:
    model = {"model": "10 parameters, shapes ab", "algorithm": "gradient_allreduce"}
    assert model_of({**model, "seed": "1", "torch": "2.13"}) == model_of({**model, "seed": "2"}) == MODEL
    assert model_of({}) == "", "a job that has no model yet"


def test_odd_records_are_passed_over_and_named() -> None:
    good, other = kept(record()), record(world="8 workers on 2 nodes")
    no_number = pb.Tuned(steps_per_s=float("nan")).SerializeToString()
    odd_values = (b"\xff", b"x" * (MOST_RECORD_BYTES + 1), no_number, other.encode())
    odd_values += (pb.Tuned(settings=pb.StepSettings(algorithm="unheard-of")).SerializeToString(),)
    odd = [KeyValue(f"{PREFIX}m/{i}", value, 1, 1) for i, value in enumerate(odd_values)]
    records, problems = read_all([*odd, good])
    assert list(records) == [good.key]
    assert len(problems) == len(odd) and all(PREFIX in line for line in problems)


def test_the_oldest_records_give_way() -> None:
    found = [kept(record(world=f"{n} workers on 1 node"), revision=n) for n in range(1, MOST_RECORDS + 3)]
    written = found[-1].key
    gone = beyond_bound(found, written)
    assert gone == [kv.key for kv in found[:2]], "two more than fit"
    assert written not in beyond_bound(found[-1:], written)


def test_all_records_of_a_model_lie_in_its_folder() -> None:
    places = [record().place, record(world="w").place, record(bytes_per_s=0.0).place]
    assert all(place.key.startswith(TunedFor(MODEL, "", "").folder) for place in places)
    assert len({place.key for place in places}) == 3
