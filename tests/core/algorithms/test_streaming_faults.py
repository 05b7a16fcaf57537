"""Streaming DiLoCo through losses, joins and failed steps at any point: nothing is half applied, anchors stay equal."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from bagua_core.algorithms import StreamingDiLoCo
from bagua_core.communication.communicator import CollectiveFailed, Communicator, Lane
from tests.core.algorithms.plain_diloco import PlainDiLoCo
from tests.core.algorithms.test_streaming_diloco import (
    BY_SAMPLES,
    INT4,
    STREAM,
    Held,
    exchange_of,
    lane_of,
    under_way,
    workers,
    world,
)
from tests.core.algorithms.weight_workers import Lossy, Replica, Shares, Worker, train_all
from tests.core.communication.worlds import DEADLINE_S, run_ranks


def everything(worker: Worker) -> list[torch.Tensor]:
    return [worker.weights(), *(t.clone() for t in worker.model.travelling().values())]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def lossy_world(size: int, at: int, by: int) -> tuple[list[Communicator], list[str]]:
    """It is lost when rank `by` starts its operation `at`, in a step or beside; and what that rank has started."""
    main = world(size)
    everyone = [c for m in main for c in (m, m.lanes[Lane.BACKGROUND])]
    started: list[str] = []
    main[by] = Lossy(main[by], started, at, everyone)  # type: ignore[call-overload]
    return main, started


@pytest.mark.parametrize(("algorithm", "by", "operations"), [(STREAM, 0, 2), (STREAM, 2, 2), (INT4, 1, 3)])
def test_a_loss_at_any_operation(algorithm: StreamingDiLoCo, by: int, operations: int) -> None:
    """Six steps: fragments are sent in the steps 2 and 4 and applied in 3 and 5."""
    shares, at = Shares.even(3), 0
    while True:
        main, started = lossy_world(3, at, by)
        members = [Worker(c, algorithm) for c in main]

        def act(worker: Worker) -> tuple[bool, list[torch.Tensor], list[torch.Tensor]]:
            for _ in range(6):
                before = everything(worker)
                if not worker.train(shares):
                    return False, before, everything(worker)
            return True, before, before

        results = run_ranks(members, act)
        if all(happened for happened, _, _ in results):
            break
        assert len(started) > at, "the fault happened"
        assert all(same(before, after) for _, before, after in results)
        go_on([members[r] for r in range(3) if r != by], algorithm)
        at += 1
    assert at == len(started) == 6 + 2 * operations, (
        "every vote and every operation of two exchanges were lost once"
    )


def go_on(survivors: list[Worker], algorithm: StreamingDiLoCo, steps: int = 7) -> None:
    """The survivors redo the step that failed, and send again what was under way."""
    newest = max(worker.engine.step for worker in survivors)
    holder = next(worker for worker in survivors if worker.engine.step == newest)
    for worker in survivors:
        if worker.engine.step < newest:
            worker.heal_from(holder)
    for worker, communicator in zip(survivors, world(len(survivors), generation=2), strict=True):
        worker.enter(communicator)
        assert under_way(worker) == []
    plain = PlainDiLoCo([Replica(w.rank, like=w) for w in survivors], algorithm, newest)
    plain.takes_over(holder)
    # weights count from each round's begin, and not from here
    plain.samples = [exchange_of(w)._samples for w in survivors]
    for number, fragment in enumerate(plain.fragments):
        owned = [exchange_of(w)._fragments[number].own for w in survivors]
        fragment.began = [own.began for own in owned]
        for error, own in zip(fragment.errors, owned, strict=True):
            if own.errors:
                error.copy_(own.errors[0])
    shares = Shares.even(len(survivors))
    train_all(survivors, steps, shares)
    plain.run(range(newest, newest + steps), shares)
    plain.check(survivors)


def test_a_loss_while_an_exchange_is_under_way_repeats_it_at_once() -> None:
    members, shares = workers(3, BY_SAMPLES), Shares.even(3)
    train_all(members, 2, shares)
    held = Held(lane_of(members[2]))
    train_all(members, 1, shares)
    assert held.started.wait(DEADLINE_S) and [under_way(w) for w in members] == [[1]] * 3
    old = [lane_of(worker) for worker in members]
    survivors = members[:2]
    go_on(survivors, BY_SAMPLES, steps=1)
    assert all(lane.abort_flag.is_set() for lane in old[:2])
    assert [under_way(w) for w in survivors] == [[1]] * 2, "sent again in the first step of the generation"
    assert [exchange_of(w).dropped for w in survivors] == [1, 1]
    held.goes_on.set()  # the lost one's late message reaches no survivor


def test_a_dropped_exchange_that_ends_late_writes_into_nothing_that_is_used() -> None:
    members, shares = workers(2, STREAM), Shares.even(2)
    train_all(members, 2, shares)
    held = Held(lane_of(members[1]))
    train_all(members, 1, shares)
    flight = exchange_of(members[0])._fragments[1].flight
    assert flight is not None and held.started.wait(DEADLINE_S)
    before = [everything(worker) for worker in members]
    for worker, communicator in zip(members, world(2, generation=2), strict=True):
        worker.enter(communicator)
    held.goes_on.set()
    for gradient in flight.gradients:
        gradient.fill_(torch.nan)
    assert all(same(kept, everything(worker)) for kept, worker in zip(before, members, strict=True))
    train_all(members, 3, shares)
    assert all(worker.weights().isfinite().all() for worker in members)
    assert all(exchange_of(worker).rounds == 2 for worker in members)


def test_a_step_that_applies_and_fails_at_its_vote_is_put_back() -> None:
    members, shares = workers(2, STREAM), Shares.even(2)
    train_all(members, 3, shares)
    late = members[1]

    def is_missed(pair: object) -> None:
        late.engine.reduction_failed(CollectiveFailed("lost at the vote"))

    late.engine.reduction_done = is_missed  # type: ignore[method-assign]
    before = everything(late)
    assert run_ranks(members, lambda worker: worker.train(shares)) == [True, False]
    assert not torch.equal(late.seen[3], before[0]), "its forward ran on the new weights"
    assert same(before, everything(late))
    del late.engine.reduction_done
    go_on(members, STREAM)


def test_a_step_that_fails_behind_its_vote_adds_no_samples() -> None:
    """The fourth step, after which a fragment is sent, is done again."""
    members, shares = workers(2, BY_SAMPLES), Shares.uneven(2)
    train_all(members, 3, shares)

    def fails(worker: Worker) -> bool:
        worker.engine.reduction_failed(CollectiveFailed("a sum of the script was lost"))
        return Worker.end_step(worker)

    for worker in members:
        worker.end_step = partial(fails, worker)  # type: ignore[method-assign]
    used = [exchange_of(worker)._samples for worker in members]
    assert run_ranks(members, lambda worker: worker.train(shares)) == [False, False]
    assert [exchange_of(worker)._samples for worker in members] == used == [1.0, 2.0]
    for worker in members:
        del worker.end_step
    go_on(members, BY_SAMPLES)


def test_a_rank_that_missed_a_vote_counts_from_the_state_that_it_copied() -> None:
    members, shares = workers(2, BY_SAMPLES), Shares.even(2)
    train_all(members, 4, shares)
    late = members[1]
    own = exchange_of(late)._fragments[1].own
    assert (own.clock, own.began) == (2, 1.0)
    late.model.travelling()["clocks"][1] = 3  # another one's clock
    late.engine.healing = frozenset()
    exchange_of(late).begin(None, late.engine.plan)
    own = exchange_of(late)._fragments[1].own
    assert (own.clock, own.began) == (3, 2.0)


def test_a_rank_that_copied_a_state_under_its_own_clocks_counts_from_there_too() -> None:
    """It lost a step between two exchanges."""
    members, shares = workers(2, INT4), Shares.even(2)
    train_all(members, 4, shares)
    late = members[1]
    assert exchange_of(late)._fragments[1].own.errors
    late.heal_from(members[0])
    late.model.state_replaced()
    for fragment, clock in zip(exchange_of(late)._fragments, [0, 2], strict=True):
        assert (fragment.own.clock, fragment.own.began, fragment.own.errors) == (clock, 2.0, [])


def test_an_exchange_that_fails_here_fails_the_step_that_waits_for_it() -> None:
    members, shares = workers(2, STREAM), Shares.even(2)
    train_all(members, 2, shares)
    held = Held(lane_of(members[0]))
    train_all(members, 1, shares)
    assert held.started.wait(DEADLINE_S)
    lane_of(members[0]).abort("its connection broke")
    held.goes_on.set()
    before = everything(members[0])
    assert not members[0].train(shares)
    assert "its connection broke" in str(members[0].engine.failed)
    assert same(before, everything(members[0]))


def test_a_newcomer_copies_anchors_and_clocks_and_the_exchange_is_sent_after_that() -> None:
    """Fragment 1 is under way when rank 2 joins: it is sent again in step 4, with fragment 0, by three workers."""
    two, shares = workers(2, BY_SAMPLES), Shares.even(2)
    train_all(two, 3, shares)
    plain = PlainDiLoCo([Replica(r) for r in range(2)], BY_SAMPLES)
    plain.run(range(3), shares)
    plain.drop()
    newcomer = Worker(None, BY_SAMPLES)
    newcomer.set_weights(newcomer.weights() + 100.0)
    newcomer.engine.step = 3
    everyone = [*two, newcomer]
    for worker, communicator in zip(everyone, world(3, generation=2), strict=True):
        worker.enter(communicator)
        worker.engine.healing = frozenset({2})
    copied = Replica(2, like=two[0])
    holder_state = {name: t.clone() for name, t in two[0].model.travelling().items()}
    weights, optimizer_state = two[0].weights(), copy.deepcopy(two[0].optimizer.state_dict())
    note = newcomer.engine.reduction_done

    def arrives(pair: tuple[float, float] | None) -> None:
        note(pair)
        newcomer.set_weights(weights)
        newcomer.optimizer.load_state_dict(optimizer_state)
        for name, tensor in newcomer.model.travelling().items():
            tensor.copy_(holder_state[name])

    newcomer.engine.reduction_done = arrives  # type: ignore[method-assign]
    changes = [worker.engine.parameter_changes for worker in two]
    train_all(everyone, 1, Shares(((0.5,), (0.5,), (0.0,))))
    assert changes == [worker.engine.parameter_changes for worker in two], "copies may be under way"
    assert [under_way(worker) for worker in everyone] == [[], [], []]
    newcomer.engine.reduction_done = note  # type: ignore[method-assign]
    plain.run(range(3, 4), shares, silent=frozenset({3}))
    for parameter in copied.inner.parameters():
        parameter.grad = torch.zeros_like(parameter)
    copied.step()
    plain.joins(copied)
    plain.check(everyone)
    for worker in everyone:
        worker.engine.healing = frozenset()
    train_all(everyone, 1, Shares.uneven(3))
    plain.run(range(4, 5), Shares.uneven(3))
    assert [under_way(worker) for worker in everyone] == [[0, 1]] * 3
    train_all(everyone, 6, Shares.uneven(3))
    plain.run(range(5, 11), Shares.uneven(3))
    plain.check(everyone)


def test_a_newcomer_in_the_very_first_step_takes_the_same_anchor() -> None:
    members = workers(2, STREAM)
    late, start = members[1], members[0].weights()
    late.set_weights(start + 100.0)
    for worker in members:
        worker.engine.healing = frozenset({1})
    note = late.engine.reduction_done

    def arrives(pair: tuple[float, float] | None) -> None:
        note(pair)
        late.set_weights(start)

    late.engine.reduction_done = arrives  # type: ignore[method-assign]
    train_all(members, 1, Shares(((1.0,), (0.0,))))
    first = members[0].model.travelling()
    assert all(torch.equal(t, first[name]) for name, t in late.model.travelling().items())
    assert first["clocks"].tolist() == [0, 0]
