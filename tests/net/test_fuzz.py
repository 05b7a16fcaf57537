"""Bagua-Net's receiver against seeded mutations of a valid exchange: the data as the peer said it, or one error."""

from __future__ import annotations

import shutil

import pytest

from tests.net import fuzzing

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


def kinds(outcomes: dict[str, int]) -> set[str]:
    return {outcome.split()[0] for outcome in outcomes}


def test_mutated_exchanges_are_received_refused_or_fail() -> None:
    assert kinds(fuzzing.run(range(100))) == {"whole", "refused", "failed"}


@pytest.mark.parametrize(("sanitizer", "threads"), [("address", "0"), ("thread", "2")])
def test_mutated_exchanges_under_a_sanitizer(sanitizer: str, threads: str) -> None:
    outcomes = fuzzing.run(range(1000, 1030), sanitizer, BAGUA_NET_THREADS=threads)
    assert kinds(outcomes) == {"whole", "refused", "failed"}


@pytest.mark.long
@pytest.mark.parametrize(("sanitizer", "threads"), [("address", "0"), ("thread", "2"), ("", "2")])
def test_thousands_of_mutated_exchanges(sanitizer: str, threads: str) -> None:
    outcomes = fuzzing.run(range(10_000, 12_000), sanitizer, BAGUA_NET_THREADS=threads)
    assert kinds(outcomes) == {"whole", "refused", "failed"}


def test_valid_exchanges_are_received_whole() -> None:
    target = fuzzing.Target(BAGUA_NET_TIMEOUT_S="20", BAGUA_NET_HANDSHAKE_TIMEOUT_S="20")
    with target.driver:
        for seed in range(20):
            outcome, exchange = target.run(seed, mutated=False)
            assert outcome == "whole" and not exchange.mutations


def test_wrong_data_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: against a reference of other bytes, a whole exchange does not pass."""

    def other_bytes(exchange: fuzzing.Exchange) -> dict[int, list[set[int]]]:
        return {number: [{256}] * size for number, size in enumerate(exchange.sizes)}

    monkeypatch.setattr(fuzzing, "said", other_bytes)
    target = fuzzing.Target(BAGUA_NET_TIMEOUT_S="20", BAGUA_NET_HANDSHAKE_TIMEOUT_S="20")
    with target.driver, pytest.raises(AssertionError, match="message 0 is wrong at"):
        for seed in range(20):  # one of them begins with a message that is not empty
            target.run(seed, mutated=False)
