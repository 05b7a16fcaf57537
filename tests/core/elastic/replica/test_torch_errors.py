"""Errors that show the loss of another shard, and those that are the script's own."""

from __future__ import annotations

import pytest
from torch.distributed import DistBackendError

from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.elastic.replica.torch_errors import LONGEST_LINE, first_line, is_of_torch_group

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.6]:5346. "
    "This may indicate a remote worker crash.\nmore"
)


def wrapped(inner: Exception) -> Exception:
    try:
        raise ValueError("a trainer's own error") from inner
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(GLOO), True),
        (DistBackendError("NCCL error in: ncclRemoteError"), True),
        (wrapped(RuntimeError(GLOO)), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(GLOO), False),
        (CollectiveFailed(GLOO), False),
    ],
)
def test_errors_of_torchs_groups(error: Exception, expected: bool) -> None:
    assert is_of_torch_group(error) is expected


def test_a_chain_that_is_a_circle_ends() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not is_of_torch_group(one)


def test_the_first_line_has_no_source_position() -> None:
    line = first_line(RuntimeError(GLOO))
    assert line.startswith("Connection closed by peer [10.0.0.6]:5346") and "\n" not in line
    assert len(first_line(RuntimeError("x" * 1000))) == LONGEST_LINE
