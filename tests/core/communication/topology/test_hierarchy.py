"""Node by node: the same result as a flat reduction, and what crosses between nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from bagua_core.communication.communicator import CollectiveFailed, Communicator, Lane, Pending, ReduceOp
from bagua_core.communication.reducible import BITWISE
from bagua_core.communication.reduction.operation_queue import OperationQueue
from bagua_core.communication.topology.hierarchical_sum import stages
from tests.core.algorithms.gradient_ranks import world_on_nodes
from tests.core.communication.worlds import gloo_world, in_process_world, run_ranks


def allreduce(communicator: Communicator, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
    for pending in stages(communicator, tensor, op):
        pending.wait()


Nodes = Callable[[Sequence[int]], list[Communicator]]


def gloo_on_nodes(nodes: Sequence[int]) -> list[Communicator]:
    """As world_on_nodes, over sockets."""
    main = gloo_world(sum(nodes))
    begins = [sum(nodes[:i]) for i in range(len(nodes))]
    leaders = gloo_world(len(nodes))
    ranks = tuple(tuple(range(b, b + n)) for b, n in zip(begins, nodes, strict=True))
    for node, of_node in enumerate(ranks):
        for rank, lane in zip(of_node, gloo_world(len(of_node)), strict=True):
            main[rank].nodes = ranks
            main[rank].lanes = {Lane.NODE: lane}
        main[of_node[0]].lanes = {**main[of_node[0]].lanes, Lane.LEADERS: leaders[node]}
    return list(main)


@pytest.fixture(params=[gloo_on_nodes, world_on_nodes], ids=["gloo", "in_process"])
def on_nodes(request: pytest.FixtureRequest) -> Nodes:
    build: Nodes = request.param
    return build


@pytest.mark.parametrize("nodes", [[2, 2], [3, 1], [1, 1, 1], [3]], ids=str)
def test_as_if_it_were_flat(on_nodes: Nodes, nodes: list[int]) -> None:
    def act(c: Communicator) -> None:
        for op in ReduceOp:
            for dtype in (torch.float32, torch.int32, torch.int16, torch.uint32, torch.bfloat16):
                if dtype.is_floating_point and op in BITWISE:
                    continue
                own = torch.tensor([[3, 8, 1], [2, 9, 5], [7, 2, 4], [4, 4, 6]])[c.global_rank].to(dtype)
                flat, by_node = own.clone(), own.clone()
                c.allreduce(flat, op).wait()
                allreduce(c, by_node, op)
                assert torch.equal(flat, by_node), (op, dtype)

    run_ranks(on_nodes(nodes), act)


def test_all_ranks_get_the_same_bits(on_nodes: Nodes) -> None:
    def act(c: Communicator) -> torch.Tensor:
        tensor = torch.randn(10_007, generator=torch.Generator().manual_seed(c.global_rank))
        allreduce(c, tensor, ReduceOp.AVG)
        return tensor

    first, *others = run_ranks(on_nodes([3, 2]), act)
    assert all(torch.equal(first, other) for other in others)


def test_several_at_a_time_beside_the_scripts_thread() -> None:
    def act(c: Communicator) -> list[float]:
        operation_queue = OperationQueue()
        tensors = [torch.full((100,), float(i)) for i in range(6)]
        pendings = [operation_queue.launch(c, stages(c, t)) for t in tensors]
        for pending in pendings:
            pending.wait()
        return [float(t[0]) for t in tensors]

    assert run_ranks(world_on_nodes([2, 2]), act) == [[4.0 * i for i in range(6)]] * 4


def test_only_the_first_of_a_node_talks_to_other_nodes() -> None:
    world = world_on_nodes([2, 2])
    started: list[tuple[int, str]] = []
    for communicator in world:
        for lane in (Lane.NODE, Lane.LEADERS):
            if lane in communicator.lanes:
                note(started, communicator.global_rank, lane, communicator.lanes[lane])
        note(started, communicator.global_rank, None, communicator)
    run_ranks(world, lambda c: allreduce(c, torch.ones(4)))
    of_node = [(r, f"node {what}") for r in range(4) for what in ("broadcast", "reduce")]
    assert sorted(started) == sorted([*of_node, (0, "leaders allreduce"), (2, "leaders allreduce")])


def note(started: list[tuple[int, str]], rank: int, lane: Lane | None, communicator: Communicator) -> None:
    for what in ("allreduce", "reduce", "broadcast"):
        original = getattr(communicator, what)

        def start(
            *arguments: object, original: Callable[..., Pending] = original, what: str = what
        ) -> Pending:
            started.append((rank, f"{lane.value if lane else 'main'} {what}"))
            return original(*arguments)

        setattr(communicator, what, start)


@pytest.mark.parametrize("lane", [Lane.NODE, Lane.LEADERS], ids=lambda lane: lane.value)
def test_a_loss_in_any_stage_is_a_failure(lane: Lane) -> None:
    world = world_on_nodes([2, 2])
    world[2].lanes[lane].lose("10.0.0.3")  # type: ignore[attr-defined]
    errors: list[CollectiveFailed] = []

    def act(c: Communicator) -> None:
        try:
            allreduce(c, torch.ones(4))
        except CollectiveFailed as error:
            errors.append(error)
            for other in world:  # as the job does, once it receives the report
                other.abort("a rank has failed")

    run_ranks(world, act)
    assert len(errors) == 4 and any(error.hosts == ("10.0.0.3",) for error in errors)


def test_without_known_nodes_it_is_flat() -> None:
    def act(c: Communicator) -> list[float]:
        tensor = torch.ones(2)
        allreduce(c, tensor)
        return tensor.tolist()

    assert run_ranks(in_process_world(2), act) == [[2.0, 2.0]] * 2


def test_what_cannot_be_reduced_is_refused_before_any_peer_is_asked() -> None:
    with pytest.raises(TypeError, match="bor"):
        allreduce(world_on_nodes([2, 2])[0], torch.ones(1), ReduceOp.BOR)
