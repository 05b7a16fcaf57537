"""Exceptions outside the two trees: those that agent and core share, and those of the rendezvous plugin of torchrun."""

from __future__ import annotations

import bagua_contract
import bagua_torchrun
from bagua_contract.environment import WorkerEnvironmentError
from bagua_contract.net_counters import NoCountersError
from tests.error_tree import exceptions_of


def test_shared_errors_are_of_pythons_kinds() -> None:
    """Agent and core have a tree each, and the shared package knows neither."""
    assert {kind: kind.__base__ for kind in exceptions_of(bagua_contract)} == {
        WorkerEnvironmentError: ValueError,
        NoCountersError: RuntimeError,
    }


def test_errors_of_the_plugin_stay_in_their_module() -> None:
    """torchrun handles torch's own errors of a rendezvous only."""
    assert [kind for kind in exceptions_of(bagua_torchrun) if not kind.__name__.startswith("_")] == []
