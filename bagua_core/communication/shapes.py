"""Checks that a caller's tensors fit the collective, before any message is sent. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_allgather(world_size: int, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Checks the tensors of an allgather. Raises ValueError unless output is [world_size, *tensor.shape]."""
    _check_pair("allgather", output, (world_size, *tensor.shape), tensor, world_size)


def check_alltoall(world_size: int, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Checks the tensors of an alltoall. Raises ValueError unless both are [world_size, ...] and share no memory."""
    if not tensor.dim() or tensor.shape[0] != world_size:
        raise ValueError(
            f"alltoall among {world_size} sends one part to each, so its tensor is [{world_size}, ...], "
            f"not {tuple(tensor.shape)}"
        )
    _check_pair("alltoall", output, tuple(tensor.shape), tensor, world_size)
    _check_apart("alltoall", output, tensor)


def check_gather(
    world_size: int, output: torch.Tensor | None, tensor: torch.Tensor, is_destination: bool
) -> None:
    """Checks the tensors of a gather. Raises ValueError unless output is [world_size, *tensor.shape] on the
    destination."""
    if not is_destination:
        return
    if output is None:
        raise ValueError("gather needs an output on the rank that everything goes to; this is it")
    _check_pair("gather", output, (world_size, *tensor.shape), tensor, world_size)


def check_scatter(
    world_size: int, output: torch.Tensor, tensor: torch.Tensor | None, is_source: bool
) -> None:
    """Checks the tensors of a scatter. Raises ValueError unless, on the source, tensor is [world_size, *output.shape]
    and the two share no memory."""
    if not is_source:
        return
    if tensor is None:
        raise ValueError("scatter needs the parts on the rank that they come from; this is it")
    if tensor.shape != (world_size, *output.shape) or output.dtype != tensor.dtype:
        raise ValueError(
            f"scatter of {_said(tensor)} among {world_size} cannot fill an output of {_said(output)}; "
            f"its tensor is [{world_size}, *output.shape]"
        )
    _check_apart("scatter", output, tensor)


def check_alltoall_v(
    world_size: int,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> None:
    """Checks the tensors of an alltoall_v. Raises ValueError unless the splits cut both along their first dimension,
    and they share no memory."""
    for of, whole, splits in (("its input", tensor, input_splits), ("its output", output, output_splits)):
        if not whole.dim() or len(splits) != world_size or sum(splits) != whole.shape[0] or min(splits) < 0:
            raise ValueError(
                f"alltoall_v among {world_size} cannot cut {of} of {_said(whole)} into {list(splits)} rows: "
                f"one number for each rank, whose sum is the first dimension"
            )
    if output.shape[1:] != tensor.shape[1:] or output.dtype != tensor.dtype:
        raise ValueError(f"alltoall_v of {_said(tensor)} cannot fill an output of {_said(output)}")
    _check_apart("alltoall_v", output, tensor)


def check_reduce_scatter(world_size: int, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Checks the tensors of a reduce_scatter. Raises ValueError unless tensor is [world_size, *output.shape] and they
    share no memory."""
    if tensor.shape != (world_size, *output.shape) or output.dtype != tensor.dtype:
        raise ValueError(
            f"reduce_scatter of {_said(tensor)} among {world_size} cannot fill an output of {_said(output)}; "
            f"its tensor is [{world_size}, *output.shape]"
        )
    _check_apart("reduce_scatter", output, tensor)


def _check_pair(
    what: str, output: torch.Tensor, expected: tuple[int, ...], tensor: torch.Tensor, world_size: int
) -> None:
    if output.shape != expected or output.dtype != tensor.dtype:
        raise ValueError(
            f"{what} of {_said(tensor)} among {world_size} cannot fill an output of {_said(output)}"
        )


def _check_apart(what: str, output: torch.Tensor, tensor: torch.Tensor) -> None:
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    if tensor.nbytes and begin < output.data_ptr() + output.nbytes and output.data_ptr() < end:
        raise ValueError(f"{what} cannot work in place: its output lies in the memory of its input")


def _said(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
