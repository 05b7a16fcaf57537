"""Makes all members of a generation use the same transport: each reports to the first, which replies to each.

Owns the keys in the meeting store: one is written and one read by every member. The decision is transport_choice.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.communication.transport_choice import Choice, Compared, Statement, choose

_CHOICE = "transport/choice"


def _said_by(global_rank: int) -> str:
    return f"transport/said/{global_rank}"


def tell(store: Store, global_rank: int, statement: Statement) -> None:
    """Writes this member's statement, early, so that the first member need not wait for it. Raises CollectiveFailed."""
    try:
        store.set(_said_by(global_rank), statement.to_text())
    except RuntimeError as error:
        raise CollectiveFailed(f"agreeing on a transport: {error}") from error


def agree(store: Store, global_rank: int, world_size: int, transports: Sequence[Compared]) -> Choice:
    """Returns the first member's choice. Waits for all to `tell`, in the store's time. Raises CollectiveFailed."""
    try:
        if global_rank == 0:
            said = [Statement.from_text(_text(store, _said_by(r))) for r in range(world_size)]
            store.set(_CHOICE, choose(said, transports).to_text())
        return Choice.from_text(_text(store, _CHOICE))
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CollectiveFailed(f"agreeing on a transport: {error}") from error


def _text(store: Store, key: str) -> str:
    return bytes(store.get(key)).decode()
