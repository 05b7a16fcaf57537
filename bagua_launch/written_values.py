"""Holds values as they were written, with the place where: on the command line, in a variable or in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WrittenValue:
    """A value as written, and where: "--nnodes", "PET_NNODES", "launch.toml: nnodes"."""

    text: str
    where: str

    @property
    def is_typed(self) -> bool:
        return self.where.startswith("--")


Values = Mapping[str, WrittenValue]
