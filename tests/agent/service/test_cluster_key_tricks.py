"""Names of nodes become parts of keys: none of them may leave its folder."""

from __future__ import annotations

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.etcd import cluster_keys


@pytest.mark.parametrize("name", ["", ".", "..", "../h2", "h2/../h3", "h2\n", "h2\0", "h 2", "ü", "n" * 101])
def test_a_node_of_such_a_name_has_no_keys(name: str) -> None:
    for key in (cluster_keys.node, cluster_keys.drain, cluster_keys.orders):
        with pytest.raises(UserError, match=r"node id .* is not allowed"):
            key(name)
