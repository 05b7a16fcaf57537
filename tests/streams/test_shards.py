"""Gradients that torch's sharding brings on streams of its own are reduced over replicas in order. Weights of
shards are exchanged in order too.

torch calls the hooks of sharded parameters on the stream of its reduce-scatter, so a bucket is filled there, or at the
end of the backward on the script's, is summed on the communicator's, and is read by the optimizer on the script's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from bagua_core.algorithms import Algorithm, LocalSGD, StreamingDiLoCo
from bagua_core.algorithms.bytegrad import ByteGrad
from bagua_core.algorithms.gradient_allreduce import GradientAllreduce
from bagua_core.communication.communicator import Lane
from bagua_core.communication.nccl.nccl_line import NcclOperation
from bagua_core.communication.reduction import operation_queue
from bagua_core.model.sharded_tensors import is_sharded, local
from tests.core.algorithms.gradient_ranks import assert_equal_bits
from tests.streams.modelled_ranks import ModelledRank, parameters, train, waits_of_steps, world
from tests.streams.sharding_streams import (
    ShardingStream,
    mesh_of_one,
    sharded_net,
    use_modelled_streams,
)
from tests.streams.test_gradients import only_given
from tests.streams.test_weights import put_back
from tests.streams.watching import clean, install

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "allreduce": lambda: GradientAllreduce(hierarchical=False),
    "bytegrad": lambda: ByteGrad(hierarchical=False),
}
WEIGHTS: dict[str, Callable[[], Algorithm]] = {
    "local_sgd": lambda: LocalSGD(sync_every=2),
    # two fragments, each applied in the step after the one that sends it
    "streaming_diloco": lambda: StreamingDiLoCo(sync_every=2, fragments=2, delay=1),
}
REPLICAS = 2


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    install(monkeypatch)
    use_modelled_streams(monkeypatch)
    with mesh_of_one() as made:
        yield made


def replicas(name: str, mesh: DeviceMesh) -> list[ModelledRank]:
    algorithm = (ALGORITHMS | WEIGHTS)[name]
    lanes = frozenset({Lane.BACKGROUND} if name == "streaming_diloco" else ())
    return world(REPLICAS, algorithm, lambda: sharded_net(mesh), lanes)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_access_comes_after_what_it_depends_on(name: str, mesh: DeviceMesh) -> None:
    members = replicas(name, mesh)
    assert all(is_sharded(p) for m in members for p in m.rank.inner.parameters())
    train(members)
    assert clean([m.device for m in members]) == []
    assert_equal_bits([[local(p) for p in of_one] for of_one in parameters(members)])
    assert waits_of_steps(members) == [1] * (3 * REPLICAS), [m.device.host_waits for m in members]
    for member in members:
        streams = {on for name, on in member.device.writes if name.startswith("bucket")}
        assert any(on.startswith("sharding") for on in streams), "torch calls the hooks on its stream"


@pytest.mark.parametrize(
    ("flaw", "name"),
    [
        ("no event at the start of a collective", "allreduce"),
        ("no event after a collective", "allreduce"),
        ("no event at the launch of a job", "bytegrad"),
        ("no event where a job is waited for", "bytegrad"),
        ("torch does not order its stream after the script's", "allreduce"),
    ],
)
def test_a_missing_event_is_reported(
    flaw: str, name: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any) -> None:
        return None

    match flaw:
        case "no event at the start of a collective":
            monkeypatch.setattr(NcclOperation, "_come_after_start", nothing)
        case "no event after a collective":
            monkeypatch.setattr(NcclOperation, "follow", only_given)
        case "no event at the launch of a job":
            monkeypatch.setattr(operation_queue._Ticket, "_come_after_launch", nothing)
        case "no event where a job is waited for":
            monkeypatch.setattr(operation_queue._Ticket, "_come_before_waiter", nothing)
        case _:
            monkeypatch.setattr(ShardingStream, "wait_stream", nothing)
    members = replicas(name, mesh)
    train(members, steps=2)
    found = clean([m.device for m in members])
    assert any("bucket" in violation and "unordered" in violation for violation in found), found


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_shards_are_exchanged_in_order(name: str, mesh: DeviceMesh) -> None:
    members = replicas(name, mesh)
    assert all(is_sharded(p) for m in members for p in m.rank.inner.parameters())
    train(members, steps=5)
    assert clean([m.device for m in members]) == []
    if name == "streaming_diloco":
        assert all(m.exchange.rounds >= 2 for m in members)
    else:  # the fifth step begins with an average, and then each replica learns by its own samples
        waits = [1, 1, 2, 1, 2]
        assert waits_of_steps(members) == waits * REPLICAS, members[0].steps_waits


@pytest.mark.parametrize(
    ("flaw", "name"),
    [
        ("no event at the start of a collective", "local_sgd"),
        ("a round begins before its inputs are there", "streaming_diloco"),
        ("a round is done before its work is", "streaming_diloco"),
    ],
)
def test_a_missing_event_of_an_exchange_of_weights_is_reported(
    flaw: str, name: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "local_sgd":
        monkeypatch.setattr(NcclOperation, "_come_after_start", lambda operation: None)
    else:
        put_back(monkeypatch, flaw)
    members = replicas(name, mesh)
    train(members, steps=5)
    found = clean([m.device for m in members])
    assert any("unordered" in violation for violation in found), found
