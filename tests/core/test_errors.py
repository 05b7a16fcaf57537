"""Every exception of the core has its place in one tree, which says who must act."""

from __future__ import annotations

import bagua_core
from bagua_core.errors import (
    BaguaError,
    InfrastructureLost,
    InternalError,
    LeaveInterrupt,
    PeerViolation,
    UserError,
)
from bagua_core.kernels.compilation import CompilationError
from tests.error_tree import exceptions_of

KINDS = (UserError, PeerViolation, InfrastructureLost, InternalError)

# The first is no error. The second is of a module that setup.py loads without the package.
OUTSIDE = (LeaveInterrupt, CompilationError)


def test_each_is_in_the_tree_and_of_one_kind_at_most() -> None:
    """Integrations import their frameworks: tests/integrations/test_integration_errors.py reads their text."""
    found = [kind for kind in exceptions_of(bagua_core, without=("integrations",)) if kind not in OUTSIDE]
    assert len(found) > 50
    outside = [kind for kind in found if not issubclass(kind, BaguaError)]
    assert not outside, "in no tree"
    several = [kind for kind in found if sum(issubclass(kind, one) for one in KINDS) > 1]
    assert not several, "of several kinds"
