"""Decides what a change of the job's members makes of a collective of the script. Pure.

A request was meant for certain workers. Among those that are present now it means the same, or has another root, or
raises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_core.elastic.script_collectives.requests import Request, Result
from bagua_core.errors import InfrastructureLost


class MembersChanged(InfrastructureLost, RuntimeError):
    """The members changed while this was under way. Among those that are left it means nothing, or it may have happened
    on some and not on others. It is raised on all that took part; ranks are new ones from now on."""


class PeerLostError(MembersChanged):
    """A worker that the collective needs is lost. ranks: of the lost workers, as they were when it was called."""

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks


class JobClosing(InfrastructureLost, RuntimeError):
    """A worker is lost after the end of the training, when the job forms no generation any more. It is no
    MembersChanged: every later collective raises it too, so to repeat the call is of no use."""


def answered(request: Request, recorded: torch.Tensor, unconfirmed: list[Result]) -> Result:
    """Returns this worker's result of a collective that the others completed. Raises MembersChanged if it has none."""
    if request.is_common:
        return [recorded.clone()]
    if unconfirmed:
        return unconfirmed[0]
    raise MembersChanged(
        f"{request.asked(request.root)}: this worker was away while the others completed it, so there is no part of "
        "the result for it"
    )


def check_present(
    request: Request, workers: Sequence[str], needed: Sequence[str], present: Sequence[str]
) -> None:
    """Checks that all of `needed` are in `present`. workers: by the rank that the script called them. Raises
    PeerLostError if one is not."""
    lost = tuple(r for r, w in enumerate(workers) if w in needed and w not in present)
    if lost:
        raise PeerLostError(
            f"{request.asked(request.root)}: {_ranks(lost)} lost ({', '.join(workers[r] for r in lost)}). Begin anew "
            f"with the ranks of now, and with a new group if there is one; {len(present)} workers are left",
            lost,
        )


def placed(request: Request, workers: Sequence[str], present: Sequence[str]) -> int | None:
    """Returns the place of the request's root among `present`, if it has one.

    workers: those it was meant for, by the rank that the script knew. Raises PeerLostError, MembersChanged if it means
    nothing among those that are present.
    """
    root = request.root
    if root is not None:
        check_present(request, workers, (workers[root],), present)
    if request.is_cut and tuple(workers) != tuple(present):
        check_present(request, workers, workers, present)
        raise MembersChanged(
            f"{request.asked(root)}: its parts were cut for other ranks; call it again with the ranks of now"
        )
    return None if root is None else present.index(workers[root])


def left_out(request: Request) -> str:
    """Returns the warning of a worker that the job went on without while it was in `request`."""
    return (
        f"bagua: warning: {request.asked(request.root)}: the job went on without this worker meanwhile. Until its next "
        "step, in which it joins the job anew, collectives return this worker's own input"
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {list(ranks)} are"
