"""An error names what replaces the arguments, methods and layers of torch that DistributedDataParallel lacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn
from torch.distributed.algorithms.join import Join

from bagua_core.parallel import DistributedDataParallel
from bagua_core.sync_batchnorm import SyncBatchNorm
from tests.core.communication.worlds import FakeEngine


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(4, 2), None, engine=FakeEngine())


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ({"device_ids": [0], "output_device": 0}, r"device_ids .*leave it out.*output_device .*leave it out"),
        ({"static_graph": True}, "static_graph .*leave it out"),
        ({"process_group": None}, "process_group .*new_group"),
        ({"no_such_argument": 1}, r"unexpected keyword argument 'no_such_argument'$"),
    ],
)
def test_an_argument_of_torchs_is_refused_with_what_replaces_it(
    argument: dict[str, object], remedy: str
) -> None:
    with pytest.raises(TypeError, match=remedy):
        DistributedDataParallel(nn.Linear(4, 2), None, engine=FakeEngine(), **argument)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [lambda m: m.join(), lambda m: Join([m])])
def test_torchs_join_is_refused_with_what_replaces_it(call: Callable[[nn.Module], object]) -> None:
    with pytest.raises(NotImplementedError, match="ElasticDataLoader"):
        call(wrapped())


def test_torchs_hooks_are_refused_with_what_replaces_them() -> None:
    with pytest.raises(NotImplementedError, match=r"algorithm=bagua\.algorithms\.Hook"):
        wrapped().register_comm_hook(None, lambda state, bucket: None)


def test_torchs_sync_batch_norm_is_refused() -> None:
    """It would look for torch's process group, find none, and use each worker's own samples."""
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    with pytest.raises(
        ValueError, match=r"layer 1 is a torch\.nn\.SyncBatchNorm.*bagua\.SyncBatchNorm\.convert"
    ):
        DistributedDataParallel(net, None, engine=FakeEngine())
    DistributedDataParallel(SyncBatchNorm.convert(net), None, engine=FakeEngine())
