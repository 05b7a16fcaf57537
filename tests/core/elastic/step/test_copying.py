"""A copy in place: its receiver has no state until it is verified, and one worker always has a whole state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from bagua_contract.records import StateName
from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending
from bagua_core.elastic.heal import heal, pinned_chunks, received_state
from bagua_core.elastic.heal.heal_plan import HealPlan, StateGone
from bagua_core.elastic.membership import entry
from bagua_core.elastic.state import heal_memory
from bagua_core.elastic.state.committed_state import CommittedState, Remains
from bagua_core.elastic.step.copying import Copying
from bagua_core.elastic.step.engine import Engine
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.in_process import InProcessCommunicator, build_in_process
from tests.core.communication.worlds import DEADLINE_S, gloo_world, run_ranks
from tests.core.elastic.records import generation
from tests.core.elastic.state.trainings import Training, through_the_wire, wire_form


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never enough memory; small pieces, so that a copy has a middle."""
    monkeypatch.setenv(heal_memory.LIMIT_VARIABLE, "0")
    monkeypatch.setattr(heal, "CHUNK_BYTES", 200)


def wait(pending: Pending) -> None:
    pending.wait()


class Waits:
    """What copying asks of the member."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.mate_fails = False

    @contextmanager
    def jointly(self) -> Iterator[None]:
        yield
        if self.mate_fails:
            raise CollectiveFailed("it failed on another shard of this replica")

    def wait_for_transfer(self, done: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(done, DEADLINE_S)

    def wait_unlearned(self, pending: Pending) -> None:
        pending.wait()


class Worker:
    """One worker's state and its part in the copies of a generation; its training went `steps` steps."""

    def __init__(self, name: StateName, steps: int, seed: int = 1) -> None:
        self.training = Training("adam", seed)
        self.training.train(steps, seed=9)
        self.state = CommittedState()
        self.state.registry = self.training.registry
        self.state.name = name
        self.said: list[str] = []
        self.member = Waits()
        self.copying = Copying(
            self.state,
            self.member,  # type: ignore[arg-type]
            lambda copied: self.state.restore(copied, "me", {}) and None,
            lambda point: None,
            self.said.append,
        )
        self.outside = False
        self.plan: HealPlan | None = None

    def enter(self, communicator: Communicator, since: Sequence[int]) -> None:
        """As the member and the engine do."""
        ids = [f"w{r}" for r in range(communicator.world_size)]
        record = generation(9, *ids, since=dict(zip(ids, since, strict=True)))
        info = entry.Info(
            self.state.name, self.outside, self.state.position, self.copying.stages(), self.state.remains
        )
        self.plan, _ = entry.exchange(communicator, record, info, wait)
        self.copying.enter(communicator, self.plan)
        if communicator.global_rank in self.plan.newcomers:
            self.copying.swap_in()
        else:
            self.copying.step_begins()
            self.copying.reduced()
            self.copying.sent()

    def form(self) -> Any:
        captured = self.training.registry.capture()
        captured.pop("gradients", None)  # a worker that joins gets them with the step's reduction
        return wire_form(captured)


def enter(world: Sequence[Communicator], workers: Sequence[Worker], since: Sequence[int] = ()) -> list[str]:
    """What each worker's entry failed with; empty if it did not."""

    def act(communicator: Communicator) -> str:
        try:
            workers[communicator.global_rank].enter(communicator, since or [1] * len(workers))
        except CollectiveFailed as error:
            workers[communicator.global_rank].copying.drop()
            return str(error)
        return ""

    return run_ranks(world, act)


class Dying(InProcessCommunicator):
    """Its process is lost when it has sent so many messages."""

    def __init__(self, honest: InProcessCommunicator, after: int) -> None:
        super().__init__(honest._exchange, honest.generation, honest.global_rank, honest.abort_flag)
        self._left = after

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Pending:
        if self._left == 0:
            self.lose("10.0.0.1")
        self._left -= 1
        return super().send(tensor, destination, tag)


AHEAD, BEHIND, NONE = StateName(3, 8), StateName(3, 7), StateName()


@pytest.mark.parametrize("stages", [True, False])
def test_a_shard_whose_mate_lost_its_copy_swaps_none_in(
    stages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its replica, which counts by its older shard, could hold two shards of different steps."""
    if stages:
        monkeypatch.delenv(heal_memory.LIMIT_VARIABLE)
    source, behind = Worker(AHEAD, 8), Worker(BEHIND, 7)
    behind.member.mate_fails = True
    own = behind.form()
    assert enter(build_in_process(2), [source, behind]) == [
        "",
        "it failed on another shard of this replica",
    ]
    if stages:
        assert (behind.state.name, behind.form()) == (BEHIND, own)
    else:
        assert behind.state.name.is_none, "its memory has the copy, which does not count"
    behind.member.mate_fails = False
    assert enter(build_in_process(2), [source, behind]) == ["", ""]
    assert (behind.state.name, behind.form()) == (AHEAD, source.form())


@pytest.mark.parametrize("build", [build_in_process, gloo_world], ids=["threads", "sockets"])
def test_a_newcomer_gets_the_state_into_the_memory_it_has(
    build: Callable[[int], list[Communicator]], monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = received_state.Staging.open

    def no_memory(staging: received_state.Staging, manifest: bytes, total_bytes: int) -> None:
        assert b"exp_avg" not in manifest, "parameters and optimizer state may not be staged"
        staged(staging, manifest, total_bytes)

    monkeypatch.setattr(received_state.Staging, "open", no_memory)
    workers = [Worker(AHEAD, 4), Worker(AHEAD, 4), Worker(NONE, 0, seed=5)]
    memory = [p.data_ptr() for p in workers[2].training.model.parameters()]
    assert enter(build(3), workers) == ["", "", ""]
    assert workers[2].form() == workers[0].form()
    assert [p.data_ptr() for p in workers[2].training.model.parameters()] == memory
    assert (workers[2].state.name, workers[2].state.remains) == (AHEAD, Remains.UNTOUCHED)
    assert "copied in place" in workers[2].said[0]
    for worker in workers:
        worker.training.train(3, seed=10)
    assert workers[2].form() == workers[0].form()


@pytest.mark.parametrize("behind", [NONE, BEHIND])
def test_the_rest_of_the_state_is_captured_by_the_one_worker_that_sends_it(
    behind: StateName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others train meanwhile, and all of them would wait for the slowest."""
    workers = [Worker(AHEAD, 3), Worker(AHEAD, 3), Worker(behind, 2)]
    captured: list[CommittedState] = []
    rest = CommittedState.rest

    def counted(state: CommittedState, **keywords: bool) -> dict[str, Any]:
        captured.append(state)
        return rest(state, **keywords)

    monkeypatch.setattr(CommittedState, "rest", counted)
    assert not any(enter(build_in_process(3), workers))
    assert captured == [workers[0].state]
    assert workers[2].form() == workers[0].form()


def test_who_is_behind_by_one_commit_copies_over_its_own_state() -> None:
    workers = [Worker(AHEAD, 4), Worker(BEHIND, 3)]
    assert enter(build_in_process(2), workers) == ["", ""]
    assert workers[1].form() == workers[0].form()
    assert workers[1].state.name == AHEAD


def test_who_is_behind_by_one_commit_copies_the_gradients_that_the_script_adds_up() -> None:
    behind, ahead = Worker(BEHIND, 3), Worker(AHEAD, 4)
    assert enter(build_in_process(2), [behind, ahead]) == ["", ""]
    (found,), (held,) = behind.training.registry.gradients(), ahead.training.registry.gradients()
    assert held and wire_form(found) == wire_form(held)


@pytest.mark.parametrize("messages", [3, 4, 7, 12])
def test_a_source_that_dies_in_the_middle_leaves_no_half_counted_worker(messages: int) -> None:
    """The heart of it: two are behind, without memory; the only source dies while the first of them is half written."""
    workers = [Worker(AHEAD, 4), Worker(BEHIND, 3), Worker(BEHIND, 3)]
    untouched = workers[1].form()
    first, *others = build_in_process(3)
    failed = enter([Dying(first, messages), *others], workers)
    assert all("10.0.0.1" in text for text in failed)
    plan = workers[1].plan
    assert plan is not None and (plan.at_once, plan.spared) == ({1, 2}, {1})

    spared, half = workers[1], workers[2]
    assert spared.form() == untouched and (spared.state.name, spared.state.remains) == (
        BEHIND,
        Remains.UNTOUCHED,
    )
    assert (half.state.name, half.state.remains) == (NONE, Remains.HALF_COMMITTED)
    assert half.form() != untouched or messages == 3, "it is half written"

    # the job goes on from the state that is whole, whichever of the two is rank 0 now
    assert enter(build_in_process(2), [half, spared]) == ["", ""]
    assert half.plan is not None and half.plan.holders == (1,)
    assert half.form() == spared.form() == untouched
    assert (half.state.name, half.state.remains) == (BEHIND, Remains.UNTOUCHED)


def test_the_spared_one_copies_when_the_others_have() -> None:
    workers = [Worker(AHEAD, 4), Worker(BEHIND, 3), Worker(BEHIND, 3), Worker(AHEAD, 4)]
    two_sources = workers
    assert enter(build_in_process(4), two_sources) == [""] * 4
    assert workers[0].plan is not None and not workers[0].plan.spared, (
        "the second source is the one untouched"
    )
    workers = [Worker(AHEAD, 4), Worker(BEHIND, 3), Worker(BEHIND, 3)]
    assert enter(build_in_process(3), workers) == [""] * 3
    assert workers[0].plan is not None and workers[0].plan.rounds == ({2}, {1})
    assert workers[0].form() == workers[1].form() == workers[2].form()


@pytest.mark.parametrize("was_left_out", [False, True])
def test_half_a_state_never_becomes_the_job_s_beginning(was_left_out: bool) -> None:
    """Its source died and no other worker has the state: it must end, and a joiner must not begin the job anew."""
    half, newcomer = Worker(BEHIND, 3), Worker(NONE, 0)
    if was_left_out:
        half.state.forget()
    half.state.declare_stateless(Remains.HALF_COMMITTED)

    def act(communicator: Communicator) -> str:
        worker = (half, newcomer)[communicator.global_rank]
        try:
            worker.enter(communicator, [1, 9])
        except (StateGone, CollectiveFailed) as error:
            return type(error).__name__
        return "entered"

    assert run_ranks(build_in_process(2), act) == ["StateGone", "CollectiveFailed"]


def test_half_an_initial_state_is_replaced_by_a_whole_one() -> None:
    half, whole = Worker(NONE, 0, seed=2), Worker(NONE, 0, seed=3)
    half.state.remains = Remains.HALF_INITIAL
    expected = whole.form()
    assert enter(build_in_process(2), [half, whole]) == ["", ""]
    assert half.form() == whole.form() == expected
    assert half.state.remains is Remains.UNTOUCHED


def test_who_lost_its_state_in_the_middle_of_a_collective_is_no_newcomer() -> None:
    """Its script is still in that collective, and takes part in it when it has the state again."""
    holder, half = Worker(StateName(3, 8, 2), 4), Worker(StateName(3, 8, 1), 4)
    holder.outside = half.outside = True
    holder.state._script_step = half.state._script_step = 8
    results = [torch.tensor([1.0]), torch.tensor([2.0])]
    for value in results:
        holder.state.operations.record(value)
    half.state.operations.record(results[0])
    half.state.operations.returned()
    half.state.declare_stateless(Remains.HALF_COMMITTED)
    assert enter(build_in_process(2), [holder, half]) == ["", ""]
    assert holder.plan is not None and not holder.plan.newcomers and holder.plan.at_once == {1}
    log = half.state.operations
    assert log.next_index == 1
    result = log.recorded(1)
    assert result is not None and float(result) == 2.0


def test_after_it_was_dropped_a_copy_writes_nothing_more() -> None:
    worker = Worker(NONE, 0)
    place = received_state.InPlace(lambda: worker.state.bulk(with_gradients=False), lambda: None)
    source = Worker(AHEAD, 4)
    manifest, tensors = heal.state_codec.encode(source.state.bulk(with_gradients=False))
    place.open(manifest, tensors.size_bytes)
    place.put(0, torch.full((100,), 7, dtype=torch.uint8))
    place.give_up()
    before = worker.form()
    with pytest.raises(CollectiveFailed, match="given up"):
        place.put(100, torch.full((100,), 7, dtype=torch.uint8))
    assert worker.form() == before


def test_a_copy_in_place_may_be_dropped_under_the_guard_while_it_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a roll-back does, with the state's guard held, while the copy is about to declare that state void."""
    source, newcomer = Worker(AHEAD, 4), Worker(NONE, 0, seed=5)
    untouched = newcomer.form()
    held, opens = newcomer.state.guard.held, threading.Event()

    def held_by_the_copy_too() -> AbstractContextManager[None]:
        opens.set()
        return held()

    monkeypatch.setattr(newcomer.state.guard, "held", held_by_the_copy_too)
    joins = frozenset({1})
    plan = HealPlan(AHEAD, (0,), frozenset(), joins, False, "", joins)

    def act(communicator: Communicator) -> Any:
        worker = (source, newcomer)[communicator.global_rank]
        if worker is source:
            worker.copying.enter(communicator, plan)
            worker.copying.step_begins()
            return None
        with held():
            worker.copying.enter(communicator, plan)
            transfer = worker.copying._transfer
            assert transfer is not None and opens.wait(DEADLINE_S)
            worker.copying.drop()
        worker.member.wait_for_transfer(lambda: transfer.done)
        return transfer.error

    _, error = run_ranks(build_in_process(2), act)
    assert isinstance(error, CollectiveFailed) and "given up" in str(error)
    assert newcomer.form() == untouched


def test_a_forward_beside_the_copy_may_go_backward() -> None:
    """In place means under the eyes of autograd, which must not take it for the script's doing."""
    worker, source = Worker(NONE, 0), Worker(AHEAD, 4)
    loss = worker.training.model(torch.randn(5, 4)).sum()
    place = received_state.InPlace(lambda: worker.state.bulk(with_gradients=False), lambda: None)
    manifest, tensors = heal.state_codec.encode(source.state.bulk(with_gradients=False))
    place.open(manifest, tensors.size_bytes)
    run = torch.empty(tensors.size_bytes, dtype=torch.uint8)
    tensors.read(0, run)
    place.put(0, run)
    loss.backward()
    rest = through_the_wire(source.training.registry.rest(at_resume_point=False))
    worker.training.registry.restore_parts(place.state(), rest)
    assert worker.form() == source.form(), "buffers too, which the forward had changed"


def test_a_state_may_be_swapped_in_between_two_backwards_of_one_graph() -> None:
    worker, source = Worker(NONE, 0), Worker(AHEAD, 4)
    loss = worker.training.model(torch.randn(5, 4)).sum()
    loss.backward(retain_graph=True)
    bulk, rest = source.training.registry.bulk(), source.training.registry.rest(at_resume_point=False)
    worker.training.registry.restore_parts(*through_the_wire([bulk, rest]))
    loss.backward()
    assert worker.form() == source.form()


def test_a_script_goes_on_behind_its_first_reduction_when_the_copy_of_its_state_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may move parameters from then on, and what travels is the live ones."""
    engine, world, moved = Engine(None), build_in_process(2), threading.Event()
    net = torch.nn.Linear(4, 3)
    model = DistributedDataParallel(net, [torch.optim.SGD(net.parameters())], engine=engine)
    copying = engine.copying = Copying(
        engine.state,
        Waits(),  # type: ignore[arg-type]
        lambda copied: None,
        lambda point: None,
        lambda text: None,
    )
    read = pinned_chunks.read

    def late(*arguments: Any) -> torch.Tensor:
        moved.wait(0.3)
        return read(*arguments)

    monkeypatch.setattr(pinned_chunks, "read", late)

    def act(communicator: Communicator) -> Any:
        if communicator.global_rank == 1:
            bulk = heal.receive_state(communicator, [0], received_state.Staging())
            heal.receive_state(communicator, [0])
            return bulk["modules"][0]["parameter.weight"]
        newcomer = frozenset({1})
        engine.next_step()
        copying.enter(communicator, HealPlan(AHEAD, (0,), frozenset(), newcomer, False, "", newcomer))
        copying.step_begins()
        before = net.weight.detach().clone()
        model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            net.weight.add_(1.0)
        moved.set()
        return before

    sent, received = run_ranks(world, act)
    assert torch.equal(sent, received)


# -- with memory, as it seemed


def test_memory_that_is_missing_after_all_is_told_before_anything_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(heal_memory.LIMIT_VARIABLE)
    monkeypatch.setattr(heal_memory, "available_bytes", lambda: None)
    failing = True

    def allocate(*sizes: int, **kinds: Any) -> torch.Tensor:
        if failing:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes.")
        return torch.zeros(*sizes, **kinds)

    behind = Worker(BEHIND, 3)
    untouched = behind.form()

    class Allocating(received_state.Staging):
        def open(self, manifest: bytes, total_bytes: int) -> None:
            allocate(total_bytes)
            super().open(manifest, total_bytes)

    monkeypatch.setattr("bagua_core.elastic.step.copying.Staging", Allocating)
    assert behind.copying.stages()
    world = build_in_process(2)
    ahead = Worker(AHEAD, 4)

    def act(communicator: InProcessCommunicator) -> str:
        worker = (ahead, behind)[communicator.global_rank]
        try:
            worker.enter(communicator, [1, 1])
        except CollectiveFailed as error:
            communicator.lose("no peer")
            return str(error)
        return ""

    assert "no memory for a copy beside the state" in run_ranks(world, act)[1]
    assert (behind.state.name, behind.form()) == (BEHIND, untouched)
    assert not behind.copying.stages(), "the next generation is planned with it"
    ahead = Worker(AHEAD, 4)
    assert enter(build_in_process(2), [ahead, behind]) == ["", ""]
    assert behind.form() == ahead.form()


def test_a_newcomer_without_the_memory_goes_in_place_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(received_state.Staging, "open", refuses)
    declared: list[bool] = []
    worker, source = Worker(NONE, 0), Worker(AHEAD, 4)
    place = received_state.Fitting(
        lambda needed: True,
        received_state.InPlace(
            lambda: worker.state.bulk(with_gradients=False), lambda: declared.append(True)
        ),
    )
    manifest, tensors = heal.state_codec.encode(source.state.bulk(with_gradients=False))
    place.open(manifest, tensors.size_bytes)
    assert declared == [True]


def test_a_state_that_can_not_land_in_place_leaves_the_live_one_valid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: object) -> None:
        raise heal.state_codec.NoMemory("no memory")

    declared: list[bool] = []
    worker, source = Worker(BEHIND, 2), Worker(AHEAD, 4)
    manifest, tensors = heal.state_codec.encode(source.state.bulk(with_gradients=False))
    place = received_state.InPlace(
        lambda: worker.state.bulk(with_gradients=False), lambda: declared.append(True)
    )
    monkeypatch.setattr(heal.state_codec, "allocate", refuses)
    with pytest.raises(heal.state_codec.NoMemory):
        place.open(manifest, tensors.size_bytes)
    assert declared == []
