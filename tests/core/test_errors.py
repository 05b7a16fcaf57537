"""Every exception of the core has its place in one tree, which says who must act."""

from __future__ import annotations

import pytest

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
# Integrations import their frameworks: tests/integrations/test_integration_errors.py reads their text.
FOUND = [
    kind for kind in exceptions_of(bagua_core, without=("worker", "integrations")) if kind not in OUTSIDE
]


def test_there_are_some() -> None:
    assert len(FOUND) > 50


@pytest.mark.parametrize("found", FOUND, ids=lambda kind: kind.__name__)
def test_each_is_in_the_tree_and_of_one_kind_at_most(found: type[BaseException]) -> None:
    assert issubclass(found, BaguaError), f"{found.__module__}.{found.__name__}"
    assert sum(issubclass(found, kind) for kind in KINDS) <= 1
