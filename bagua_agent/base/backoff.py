"""Computes the wait before something that failed is tried again: almost none at first, then doubled up to a bound."""

from __future__ import annotations


def delay_s(failed: int, first_s: float, longest_s: float) -> float:
    """Returns the wait before the next try. failed: tries in a row that failed. No failure: no delay; one: first_s;
    from then on doubled, up to longest_s."""
    if failed <= 0:
        return 0.0
    # bounded exponent: 2 ** 10000 is no float
    return min(first_s * 2.0 ** min(failed - 1, 64), longest_s)
