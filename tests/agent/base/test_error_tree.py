"""Every exception of agent and launcher has its place in one tree, which says who must act."""

from __future__ import annotations

import bagua_agent
import bagua_launch
from bagua_agent.base.errors import BaguaError, InfrastructureLost, InternalError, PeerViolation, UserError
from tests.error_tree import exceptions_of

KINDS = (UserError, PeerViolation, InfrastructureLost, InternalError)


def test_each_is_in_the_tree_and_of_one_kind_at_most() -> None:
    found = [*exceptions_of(bagua_agent), *exceptions_of(bagua_launch)]
    assert len(found) > 20
    outside = [kind for kind in found if not issubclass(kind, BaguaError)]
    assert not outside, "in no tree"
    several = [kind for kind in found if sum(issubclass(kind, one) for one in KINDS) > 1]
    assert not several, "of several kinds"
