"""Real jobs, as the fault tests run them."""

from tests.faults.conftest import job

__all__ = ["job"]
