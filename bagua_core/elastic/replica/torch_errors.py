"""Recognizes errors of torch's own process groups: inside a replica they show that another shard is gone. Pure.

torch raises them as a DistError for NCCL, and as a plain RuntimeError whose text names Gloo's source for Gloo.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed import DistError

from bagua_core.errors import BaguaError

_GLOO = "/gloo/"  # in the path of the source file, with which Gloo's errors begin
LONGEST_LINE = 200


def is_of_torch_group(error: BaseException) -> bool:
    """Tells whether `error`, or what it was raised from, is a failed operation of a process group of torch. Errors of
    this package are not: it handles its groups itself."""
    return not isinstance(error, BaguaError) and any(
        isinstance(each, DistError) or (isinstance(each, RuntimeError) and _GLOO in str(each))
        for each in _chain(error)
    )


def first_line(error: BaseException) -> str:
    """Returns the first line of the error's text, without the source position before it, in at most LONGEST_LINE
    characters."""
    text = str(error).strip().partition("\n")[0]
    if text.startswith("[") and "] " in text:
        text = text.partition("] ")[2]
    return text if len(text) <= LONGEST_LINE else text[: LONGEST_LINE - 3] + "..."


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__
