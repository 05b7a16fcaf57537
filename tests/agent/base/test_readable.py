"""Descriptors that can be read are found whatever their number, and no source uses select.select."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import bagua_agent
import bagua_core
from bagua_agent.base.readable import readable
from tests.lab.descriptors import thousand_descriptors


def test_beyond_a_thousand_descriptors() -> None:
    with thousand_descriptors():
        reader, writer = os.pipe()
        try:
            assert reader > 1023
            assert readable([reader], 0) == []
            os.write(writer, b"x")
            assert readable([reader]) == [reader]
        finally:
            os.close(reader)
            os.close(writer)
    assert readable([], 0) == []


def test_the_end_of_the_writer_can_be_read_and_objects_are_given_back() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert readable([file], 10) == [file]


@pytest.mark.parametrize("package", [bagua_agent, bagua_core], ids=lambda package: package.__name__)
def test_no_source_selects_by_number(package: object) -> None:
    root = Path(package.__file__).parent  # type: ignore[attr-defined]
    assert [path for path in root.rglob("*.py") if "select.select(" in path.read_text()] == []
