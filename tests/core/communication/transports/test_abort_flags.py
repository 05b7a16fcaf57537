"""Flags below a flag: the whole ends its parts, a part ends itself alone."""

from __future__ import annotations

import pytest
import torch

from bagua_core.communication.communicator import AbortFlag, CollectiveAborted
from tests.core.communication.in_process import build_in_process


def test_a_flag_ends_those_below_it_with_its_reason() -> None:
    whole = AbortFlag()
    part = whole.below()
    of_part = part.below()
    whole.set("lost")
    assert (part.reason, of_part.reason) == ("lost", "lost")
    assert whole.below().reason == "lost", "one that is made too late is set at once"


def test_a_part_ends_alone_and_keeps_its_own_reason() -> None:
    whole = AbortFlag()
    one, other = whole.below(), whole.below()
    one.set("training is over")
    assert not whole.is_set() and not other.is_set()
    whole.set("lost")
    assert (one.reason, other.reason) == ("training is over", "lost")


def test_a_wait_on_a_part_ends_with_the_whole() -> None:
    whole = AbortFlag()
    lane, peer = build_in_process(2, abort_flags=[whole.below(), AbortFlag()])
    pending = lane.allreduce(torch.ones(2))  # the peer never comes
    assert peer.world_size == 2
    whole.set("lost")
    with pytest.raises(CollectiveAborted, match="lost"):
        pending.wait()
