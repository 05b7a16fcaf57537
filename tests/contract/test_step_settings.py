"""Settings of steps come back from their wire form as they were; those that no job can use are refused at birth."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_contract import membership_pb2 as pb
from bagua_contract.step_settings import (
    AS_SCRIPTED,
    LEAST_BUCKET_BYTES,
    MOST_BUCKET_BYTES,
    SWITCHABLE,
    StepSettings,
    declared_algorithm,
    frozen_note,
    size_text,
    takes,
)

SETTINGS = st.builds(
    StepSettings,
    bucket_bytes=st.just(0) | st.integers(LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES),
    hierarchical=st.sampled_from([None, True, False]),
    algorithm=st.sampled_from(["", *SWITCHABLE]),
    order=st.integers(0, 6).flatmap(lambda n: st.permutations(range(n))).map(tuple),
)


@given(SETTINGS)
def test_they_come_back_as_they_were(settings: StepSettings) -> None:
    wire = pb.StepSettings.FromString(settings.to_proto().SerializeToString())
    assert StepSettings.from_proto(wire) == settings


@pytest.mark.parametrize(
    ("algorithm", "declared", "takes_qadam"),
    [
        ("gradient_allreduce", "gradient_allreduce", True),
        ("gradient_allreduce" + frozen_note(1, 2, "0a"), "gradient_allreduce", False),
        ("bytegrad(hierarchical=True, average=True)" + frozen_note(1, 2, "0a"), "bytegrad", False),
        ("qadam(hierarchical=True, bits=8)" + frozen_note(1, 2, "0a"), "qadam", True),
        ("qadam(hierarchical=True, bits=8)", "qadam", True),
        ("none", "none", True),
    ],
)
def test_the_algorithm_of_a_fingerprint(algorithm: str, declared: str, takes_qadam: bool) -> None:
    fingerprint = {"algorithm": algorithm, "optimizers": "QAdamOptimizer"}
    assert declared_algorithm(fingerprint) == declared
    assert takes("qadam", fingerprint) == takes_qadam and takes("bytegrad", fingerprint)
    assert not takes("qadam", {**fingerprint, "optimizers": "Adam"}) and not takes("qadam", {})
    sharded = {**fingerprint, "sharding": "1a2b3c4d"}
    assert takes("qadam", sharded) == (declared == "qadam") and takes("bytegrad", sharded)


def test_every_field_of_the_message_is_written() -> None:
    assert {f.name for f in pb.StepSettings.DESCRIPTOR.fields} == {
        f.name for f in dataclasses.fields(StepSettings)
    }


@given(SETTINGS, SETTINGS)
def test_settings_over_others_leave_only_gaps_to_them(above: StepSettings, below: StepSettings) -> None:
    for field in dataclasses.fields(StepSettings):
        own, other = getattr(above, field.name), getattr(below, field.name)
        expected = other if own == getattr(AS_SCRIPTED, field.name) else own
        assert getattr(above.over(below), field.name) == expected


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.StepSettings(bucket_bytes=1), "buckets of 1 bytes"),
        (pb.StepSettings(bucket_bytes=MOST_BUCKET_BYTES + 1), "are not from"),
        (pb.StepSettings(hierarchical=7), "hierarchical 7"),  # type: ignore[arg-type]
        (pb.StepSettings(algorithm="local_sgd"), "is not one of"),
        (pb.StepSettings(order=[0, 0]), "not a permutation"),
        (pb.StepSettings(order=[1, 2]), "not a permutation"),
    ],
)
def test_what_no_job_can_use_is_refused(message: pb.StepSettings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StepSettings.from_proto(message)


def test_they_are_shown_in_words() -> None:
    assert str(AS_SCRIPTED) == "as the script says"
    settings = StepSettings(4 << 20, False, "bytegrad", (1, 0))
    assert str(settings) == "algorithm bytegrad, buckets of 4 MiB, flat, measured order of 2 tensors"
    assert [size_text(n) for n in (1 << 30, 3 << 10, 1025)] == ["1 GiB", "3 KiB", "1025 bytes"]
