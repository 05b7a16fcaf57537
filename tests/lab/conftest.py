"""The lab's own tests use the fixtures that it offers to others."""

from tests.lab.fixtures import lab, make_lab

__all__ = ["lab", "make_lab"]
