"""Every exception of agent and launcher has its place in one tree, which says who must act."""

from __future__ import annotations

import pytest

import bagua_agent
import bagua_launch
from bagua_agent.base.errors import BaguaError, InfrastructureLost, InternalError, PeerViolation, UserError
from tests.error_tree import exceptions_of

KINDS = (UserError, PeerViolation, InfrastructureLost, InternalError)
FOUND = [*exceptions_of(bagua_agent), *exceptions_of(bagua_launch)]


def test_there_are_some() -> None:
    assert len(FOUND) > 20


@pytest.mark.parametrize("found", FOUND, ids=lambda kind: kind.__name__)
def test_each_is_in_the_tree_and_of_one_kind_at_most(found: type[BaseException]) -> None:
    assert issubclass(found, BaguaError), f"{found.__module__}.{found.__name__}"
    assert sum(issubclass(found, kind) for kind in KINDS) <= 1
