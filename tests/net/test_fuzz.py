"""Bagua-Net's receiver against seeded mutations of a valid exchange: the data as the peer said it, or one error."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter

import pytest

from benchmarks.net_driver.process import CallFailedError
from tests.net import fuzzing
from tests.net.conftest import MakeDriver

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


# whole is not asked for: the plugin's limits are short here, and a busy machine may make a peer look silent
def kinds(outcomes: dict[str, int]) -> set[str]:
    return {outcome.split()[0] for outcome in outcomes}


def test_mutated_exchanges_are_received_refused_or_fail() -> None:
    assert kinds(fuzzing.run(range(100))) >= {"refused", "failed"}


@pytest.mark.parametrize(
    ("sanitizer", "threads"), [("address", "0"), pytest.param("thread", "2", marks=pytest.mark.long)]
)
def test_mutated_exchanges_under_a_sanitizer(sanitizer: str, threads: str) -> None:
    outcomes = fuzzing.run(range(1000, 1030), sanitizer, BAGUA_NET_THREADS=threads)
    assert kinds(outcomes) >= {"refused", "failed"}


@pytest.mark.long
@pytest.mark.parametrize(("sanitizer", "threads"), [("address", "0"), ("thread", "2"), ("", "2")])
def test_thousands_of_mutated_exchanges(sanitizer: str, threads: str) -> None:
    outcomes = fuzzing.run(range(10_000, 12_000), sanitizer, BAGUA_NET_THREADS=threads)
    assert kinds(outcomes) >= {"refused", "failed"}


def test_valid_exchanges_are_received_whole() -> None:
    target = fuzzing.Target(BAGUA_NET_TIMEOUT_S="20", BAGUA_NET_HANDSHAKE_TIMEOUT_S="20")
    with target.driver:
        for seed in range(20):
            outcome, exchange = target.run(seed, mutated=False)
            assert outcome == "whole" and not exchange.mutations


def test_mutated_handles_are_refused_or_lead_to_no_communicator(make_driver: MakeDriver) -> None:
    """A peer's handle comes from NCCL. Its port and address stay, so that no other host is asked."""
    driver, draw = (
        make_driver("plugin", words=[fuzzing.library(), "12"], BAGUA_NET_TIMEOUT_S="1"),
        random.Random(19),
    )
    driver.ask("init")
    handle = bytes.fromhex(driver.ask("listen l 0")[0])
    before, outcomes = driver.usage(), Counter[str]()
    for _ in range(300):
        mutated = bytearray(handle)
        for at in draw.choices(range(fuzzing.HANDLE.size), k=draw.randint(1, 2)):
            mutated[at] ^= 1 << draw.randrange(8)
        try:
            outcome = driver.ask(f"connect c 0 {mutated.hex()}")[0]
        except CallFailedError as failure:
            assert failure.result in (2, 6), failure
            outcome = "failed"
        outcomes[outcome] += 1
        if outcome == "ready":
            driver.ask("close-send c")
        if driver.ask("accept r l") == ["ready"]:
            driver.ask("close-receive r")
    driver.ask("finalize")
    assert outcomes["failed"] and outcomes["ready"]
    deadline_s = time.monotonic() + 20
    while (now := driver.usage())["descriptors"] != before["descriptors"]:  # those whose token was wrong
        if driver.ask("accept r l") == ["ready"]:
            driver.ask("close-receive r")
        assert time.monotonic() < deadline_s, now


def test_wrong_data_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: against a reference of other bytes, a whole exchange does not pass."""

    def other_bytes(exchange: fuzzing.Exchange) -> dict[int, list[set[int]]]:
        return {number: [{256}] * size for number, size in enumerate(exchange.sizes)}

    monkeypatch.setattr(fuzzing, "said", other_bytes)
    target = fuzzing.Target(BAGUA_NET_TIMEOUT_S="20", BAGUA_NET_HANDSHAKE_TIMEOUT_S="20")
    with target.driver, pytest.raises(AssertionError, match="message 0 is wrong at"):
        for seed in range(20):  # one of them begins with a message that is not empty
            target.run(seed, mutated=False)
