"""Ranks whose parameters differ find it out, all of them, and the message says where to look."""

from __future__ import annotations

import pytest
import torch

from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending
from bagua_core.elastic.checks import digest_trace
from bagua_core.elastic.checks.digest_check import DigestCheck, Diverged
from bagua_core.elastic.checks.digest_trace import Difference, first_difference
from tests.core.communication.in_process import InProcessCommunicator, build_in_process
from tests.core.communication.worlds import run_ranks


def wait(pending: Pending) -> None:
    pending.wait()


def parameters(change: float = 0.0) -> list[torch.Tensor]:
    made = [torch.linspace(0, 1, 101).reshape(1, 101), torch.zeros(0), torch.arange(7, dtype=torch.float64)]
    made[2][3] += change
    return made


def test_it_is_due_every_so_many_steps() -> None:
    assert [s for s in range(1, 10) if DigestCheck(3).is_due(s)] == [3, 6, 9]
    assert [s for s in range(1, 4) if DigestCheck(1).is_due(s)] == [1, 2, 3]
    assert not any(DigestCheck(0).is_due(s) for s in range(10))


def test_equal_parameters_pass() -> None:
    world = build_in_process(3)
    run_ranks(world, lambda c: DigestCheck(1).compare(c, parameters(), 1, wait))


def test_every_rank_names_the_odd_ones_and_the_steps() -> None:
    world = build_in_process(4, generation=6)
    changed = {2: 2**-50}

    def act(communicator: InProcessCommunicator) -> str:
        check = DigestCheck(10)
        check.compare(communicator, parameters(), 10, wait)
        with pytest.raises(Diverged) as caught:
            check.compare(communicator, parameters(changed.get(communicator.global_rank, 0.0)), 20, wait)
        return str(caught.value)

    messages = run_ranks(world, act)
    assert len(set(messages)) == 1
    assert "differ after step 20 (they agreed after step 10): global ranks [2] differ" in messages[0]
    assert "in generation 6" in messages[0] and "--digest-every 1" in messages[0]


def test_of_two_that_differ_neither_is_blamed() -> None:
    world = build_in_process(2)

    def act(communicator: InProcessCommunicator) -> str:
        with pytest.raises(Diverged) as caught:
            DigestCheck(1).compare(communicator, parameters(float(communicator.global_rank)), 1, wait)
        return str(caught.value)

    [message] = set(run_ranks(world, act))
    assert "global ranks [0, 1] differ from each other, with no majority among them" in message


@pytest.mark.parametrize("bits", [0, 1, 31])
def test_one_flipped_bit_is_enough(bits: int) -> None:
    world = build_in_process(2)

    def act(communicator: InProcessCommunicator) -> None:
        held = parameters()
        if communicator.global_rank == 1:
            held[0].view(torch.int32)[0, 50] ^= torch.tensor(
                1 << bits if bits < 31 else -(1 << 31), dtype=torch.int32
            )
        with pytest.raises(Diverged):
            DigestCheck(1).compare(communicator, held, 1, wait)

    run_ranks(world, act)


def test_a_comparison_that_could_not_be_made_is_no_divergence() -> None:
    world = build_in_process(2)
    world[1].lose("10.0.0.2")
    with pytest.raises(CollectiveFailed, match=r"10\.0\.0\.2"):
        DigestCheck(1).compare(world[0], parameters(), 1, wait)


# -- the first step that differs, at the usual interval


class Stepping:
    """One rank's parameters over steps; `flip` changes one bit in that step, from then on for good."""

    def __init__(self, every_steps: int, flip: int | None = None) -> None:
        self.check = DigestCheck(every_steps)
        self.parameters = [torch.linspace(0, 1, 300), torch.zeros(70_000), torch.arange(3, dtype=torch.int16)]
        self._flip = flip

    def run(self, communicator: Communicator, steps: range) -> None:
        for step in steps:
            self.parameters[0] += 0.01
            self.parameters[1][step] -= 1.0
            if step == self._flip:
                self.parameters[2].view(torch.uint8)[5] ^= 1
            if self.check.is_due(step):
                self.check.compare(communicator, self.parameters, step, wait)
            else:
                self.check.step_done(lambda: self.parameters, step)


@pytest.mark.parametrize("flip", [1, 2, 50, 99, 100, 101, 137, 199, 200])
def test_the_first_step_that_differs_is_named(flip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_trace, "LEAST_BUDGET_S", 1.0)  # whatever this machine is busy with
    world = build_in_process(3, generation=6)
    ranks = [Stepping(100), Stepping(100, flip), Stepping(100)]

    def act(communicator: InProcessCommunicator) -> str:
        with pytest.raises(Diverged) as caught:
            ranks[communicator.global_rank].run(communicator, range(1, 201))
        return str(caught.value)

    [message] = set(run_ranks(world, act))
    assert f"parameters differ after step {flip}, the first step that differs" in message
    assert "global ranks [1] differ from the others in generation 6" in message


def test_where_digests_cost_too_much_the_steps_between_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_trace, "stride", lambda *_: 8)
    ranks = [Stepping(100), Stepping(100, 42)]

    def act(communicator: InProcessCommunicator) -> str:
        with pytest.raises(Diverged) as caught:
            ranks[communicator.global_rank].run(communicator, range(1, 201))
        return str(caught.value)

    [message] = set(run_ranks(build_in_process(2), act))
    assert "differ after step 48 (they agreed after step 40)" in message and "--digest-every 1" in message


def test_a_newcomer_s_copy_counts_from_the_step_it_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_trace, "LEAST_BUDGET_S", 1.0)
    old, new = Stepping(100), Stepping(100, flip=61)
    world = build_in_process(2)

    def act(communicator: InProcessCommunicator) -> str:
        rank = (old, new)[communicator.global_rank]
        first = 1
        if rank is new:
            for step in range(1, 61):  # what the copy brings
                rank.parameters[0] += 0.01
                rank.parameters[1][step] -= 1.0
            rank.check.state_replaced(lambda: rank.parameters, 60)
            first = 61
        with pytest.raises(Diverged) as caught:
            rank.run(communicator, range(first, 101))
        return str(caught.value)

    [message] = set(run_ranks(world, act))
    assert "differ after step 61, the first step that differs" in message


@pytest.mark.parametrize(
    ("digests", "last_equal", "compared", "expected"),
    [
        ([{1: 5, 2: 6}, {1: 5, 2: 7}], [0, 0], [8, 9], Difference(2, 1, (0, 1), True)),
        ([{1: 5, 2: 6}, {1: 4, 2: 7}], [0, 0], [8, 9], Difference(1, 0, (0, 1), True)),
        ([{}, {}], [10, 10], [8, 9], Difference(20, 10, (0, 1), True)),
        ([{18: 1}, {19: 2}], [10, 10], [8, 9], Difference(20, 10, (0, 1), True)),  # no step in common
        ([{19: 1}, {19: 1}], [10, 10], [8, 9], Difference(20, 19, (0, 1), True)),
        # the third did not take one after step 19: of two, neither is blamed
        ([{18: 1, 19: 3}, {18: 1, 19: 4}, {}], [10, 10, 0], [8, 9, 8], Difference(19, 18, (0, 1), True)),
        ([{17: 1, 19: 3}, {19: 4}, {17: 1, 19: 3}], [10, 0, 10], [8, 9, 8], Difference(19, 10, (1,))),
    ],
)
def test_what_follows_from_the_digests(
    digests: list[dict[int, int]], last_equal: list[int], compared: list[int], expected: Difference
) -> None:
    found = first_difference(digests, last_equal, compared, 3 if expected.step < 3 else 20)
    assert (found.step, found.agreed_after) == (expected.step, expected.agreed_after)
    assert found.is_exact is (expected.agreed_after == expected.step - 1)
    assert (found.odd, found.all_differ) == (expected.odd, expected.all_differ)


@pytest.mark.parametrize(
    ("cost_s", "step_s", "expected"),
    [
        (10e-6, 1e-3, 1),  # below what is always granted
        (40e-6, 1e-3, 2),
        (100e-6, 1e-3, 4),
        (1e-3, 0.3, 1),  # large models have long steps
        (10e-3, 0.3, 8),
        (1.0, 1e-3, 128),  # no more than the interval: then next to nothing
    ],
)
def test_how_often_a_digest_is_taken(cost_s: float, step_s: float, expected: int) -> None:
    assert digest_trace.stride(cost_s, step_s, 100) == expected


def test_digests_are_taken_less_often_while_they_cost_too_much() -> None:
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 1e-3  # each look at the clock: a digest costs 1 ms, a step but a little more
        return now_s[0]

    trace = digest_trace.DigestTrace(100, clock)
    held = parameters()
    for step in range(1, 101):
        trace.step_done(lambda: held, step)
    assert trace.every_steps >= 32
    assert 3 <= len(trace.taken) < 20


@pytest.mark.parametrize(("shared_by", "expected"), [(1, 1), (8, 8)])
def test_workers_that_share_processors_take_digests_by_what_a_step_costs(
    shared_by: int, expected: int
) -> None:
    """A digest of 1 ms in steps of 0.24 s: with the processor to itself that is 0.4 % of the step's cost."""
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 1e-3
        return now_s[0]

    trace = digest_trace.DigestTrace(100, clock, processor=lambda: now_s[0] / shared_by)
    held = parameters()
    for step in range(1, 20):
        trace.step_done(lambda: held, step)
        now_s[0] += 0.24
    assert trace.every_steps == expected


@pytest.mark.parametrize("elements", [30_000, 60_001])
def test_a_digest_keeps_no_copy_of_a_model_of_small_parameters(elements: int) -> None:
    """Forty parameters that are all gathered: of four and of one in a group, with gaps between and behind them."""
    held = [torch.full((elements // (1 + n % 2),), float(n)) for n in range(40)]
    digest = digest_trace.ParameterDigest(held)
    assert digest.scratch_bytes <= 256 << 10 < sum(p.nbytes for p in held) / 10
    before = digest.value()
    assert digest.value() == before == digest_trace.ParameterDigest(held).value()
    for parameter in held:
        parameter.view(torch.uint8)[-1] ^= 1
        assert digest.value() != before
        parameter.view(torch.uint8)[-1] ^= 1
    held[0].copy_(held[2])
    assert digest.value() != before


def test_what_a_group_leaves_in_the_gaps_of_another_does_not_count() -> None:
    """The groups share their memory. The first has a gap of 12 bytes, where the second has a parameter."""
    held = [torch.ones(60_001), torch.ones(65_000)]
    digest = digest_trace.ParameterDigest(held)
    digest.value()
    held[1] += 1
    assert digest.value() == digest_trace.ParameterDigest(held).value()


def test_the_order_of_parameters_of_different_groups_counts() -> None:
    one, other = torch.ones(60_000), torch.full((60_000,), 2.0)
    digests = {digest_trace.ParameterDigest(held).value() for held in ([one, other], [other, one])}
    assert len(digests) == 2


@pytest.mark.parametrize(
    "held",
    [
        [],
        [torch.zeros(0)],
        [torch.zeros(0), torch.ones(3), torch.zeros(0)],
        [torch.ones(1), torch.ones(3, dtype=torch.complex128)],
    ],
)
def test_a_model_may_have_parameters_without_elements_or_of_large_ones(held: list[torch.Tensor]) -> None:
    digest = digest_trace.ParameterDigest(held)
    assert digest.value() == digest.value() and digest.fits()


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("byte", [0, 3, 799, 100_003])
def test_every_bit_of_every_parameter_counts(byte: int, large: bool) -> None:
    held = [
        torch.zeros(200),
        torch.zeros(50_000 if not large else 100_000),
        torch.zeros(3, dtype=torch.bfloat16),
    ]
    digest = digest_trace.ParameterDigest(held)
    before = digest.value()
    assert digest.value() == before
    target, place = (held[0], byte) if byte < 800 else (held[1], byte)
    for bit in range(8):
        target.view(torch.uint8)[place] ^= 1 << bit
        assert digest.value() != before
        target.view(torch.uint8)[place] ^= 1 << bit
    held[2].view(torch.uint8)[5] ^= 128
    assert digest.value() != before and digest.fits()
    held[0].data = torch.zeros(10)
    assert not digest.fits()


def test_computing_times_travel_along() -> None:
    world = build_in_process(3)
    found = run_ranks(world, lambda c: DigestCheck(1).compare(c, parameters(), 1, wait, 100 * c.global_rank))
    assert found == [(0, 100, 200)] * 3
