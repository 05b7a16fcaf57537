"""Chooses how a loader's epochs divide into batches and shares: by its data set, its sampler and its balance."""

from __future__ import annotations

from typing import Any

from bagua_core.data.balancing.balance import Balance
from bagua_core.data.balancing.balanced_division import BalancedDivision
from bagua_core.data.division import Division, DivisionSettings, EvenDivision
from bagua_core.data.sampled_division import SampledDivision
from bagua_core.data.stream_division import StreamDivision


def choose_division(
    dataset: Any,
    length: int | None,
    sampler: Any,
    balance: Balance | None,
    settings: DivisionSettings,
    sample_seed: int | None,
) -> Division:
    """Returns the division of a data set of `length` samples, or of a stream (length None). sample_seed: see
    StreamDivision. Raises what the division raises of its arguments."""
    if length is None:
        return StreamDivision(dataset, settings, sample_seed)
    if sampler is not None:
        return SampledDivision(sampler, length, settings)
    if balance is not None:
        return BalancedDivision(dataset, balance, settings)
    return EvenDivision(length, settings)
