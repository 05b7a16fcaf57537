"""The store of a replica's torch group is served over both versions of IP."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from bagua_core.elastic.replica import torch_group
from tests.lab.ipv6 import IPV6_HERE, needs_ipv6


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param(IPV6_HERE, marks=needs_ipv6)])
def test_shards_share_a_store(host: str) -> None:
    meeting = HashStore()
    served = torch_group.shared_store(meeting, 0, host, host)
    served.set("said", "by shard 0")
    reached = torch_group.shared_store(meeting, 1, host, host)
    assert reached.get("said") == b"by shard 0"
