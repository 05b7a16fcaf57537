"""Trainers refuse an algorithm whose unit of commit is the round, with one clear error."""

from __future__ import annotations

import pytest

from bagua_core.algorithms import LocalSGD, find_algorithm
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob, algorithm_of_steps


def test_an_algorithm_that_commits_rounds_is_refused() -> None:
    with pytest.raises(UnsupportedInElasticJob, match=r'unit round\) commits rounds.*unit="step"'):
        algorithm_of_steps(LocalSGD(unit="round"))
    steps = LocalSGD(unit="step")
    assert algorithm_of_steps(steps) is steps
    assert algorithm_of_steps("bytegrad").name == find_algorithm("bytegrad").name
