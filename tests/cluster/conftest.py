"""Clusters that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.lab.fixtures import MakeLab, make_lab

__all__ = ["MakeCluster", "make_cluster", "make_lab"]

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def make_cluster(make_lab: MakeLab, tmp_path: Path) -> Iterator[MakeCluster]:
    """make_cluster(nodes, slots=1, etcd_beside=False, node_lease_s=2.0, dashboard="", otel_port=0, authority=None), see
    Cluster: with its daemons started."""
    with ExitStack() as made:

        def make(
            nodes: int,
            slots: int = 1,
            etcd_beside: bool = False,
            node_lease_s: float = 2.0,
            dashboard: str = "",
            otel_port: int = 0,
            authority: Path | None = None,
        ) -> Cluster:
            lab = make_lab(nodes if etcd_beside else 1 + nodes)
            directory = tmp_path / "cluster"
            directory.mkdir()
            cluster = made.enter_context(
                closing(
                    Cluster(lab, directory, slots, etcd_beside, node_lease_s, dashboard, otel_port, authority)
                )
            )
            for daemon in cluster.daemons:
                daemon.start()
            cluster.await_nodes(nodes)
            return cluster

        yield make
