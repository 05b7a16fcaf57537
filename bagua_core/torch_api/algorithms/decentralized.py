"""Provides the averaging of weights, in full precision or in eight bits."""

from __future__ import annotations

from bagua_core import algorithms as core
from bagua_core.communication.topology.peer_selection import PeerSelection
from bagua_core.torch_api.algorithms.base import BuiltIn

__all__ = ["DecentralizedAlgorithm", "LowPrecisionDecentralizedAlgorithm"]


class DecentralizedAlgorithm(BuiltIn):
    """Declares bagua_core.algorithms.Decentralized, whose arguments it takes; `peer_selection` is named
    peer_selection_mode here."""

    equal_states = False

    def __init__(
        self,
        hierarchical: bool = True,
        peer_selection_mode: str | PeerSelection = "all",
        communication_interval: int = 1,
    ) -> None:
        self._core = core.Decentralized(
            hierarchical=hierarchical,
            peer_selection=peer_selection_mode,
            communication_interval=communication_interval,
        )


class LowPrecisionDecentralizedAlgorithm(BuiltIn):
    """Declares bagua_core.algorithms.LowPrecisionDecentralized, whose arguments it takes."""

    equal_states = False

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        self._core = core.LowPrecisionDecentralized(
            hierarchical=hierarchical, communication_interval=communication_interval
        )
