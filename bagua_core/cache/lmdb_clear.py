"""Removes all entries of an LMDB environment, also of one whose map is full, and makes their pages usable.

A transaction lists the pages that it frees in pages of their own, one after the other. To drop the table of a large
map in one transaction needs many of them, which a full map lacks; smaller transactions need few.
"""

from __future__ import annotations

import lmdb

_FIRST_COUNT = 1 << 12  # entries of a transaction


def clear_environment(environment: lmdb.Environment) -> None:
    """Removes all entries, in parts if one transaction has no room. Raises lmdb.Error."""
    try:
        with environment.begin(write=True) as transaction:
            transaction.drop(environment.open_db(txn=transaction), delete=False)
    except (lmdb.MapFullError, lmdb.TxnFullError):
        _remove_in_parts(environment)
    _make_pages_usable(environment)


def _remove_in_parts(environment: lmdb.Environment) -> None:
    """Removes all entries in transactions of a size that the map has room for. Raises lmdb.Error."""
    count, is_empty = _FIRST_COUNT, False
    while not is_empty:
        try:
            is_empty = _remove(environment, count)
            count *= 2
        except (lmdb.MapFullError, lmdb.TxnFullError):
            if count == 1:
                raise
            count = max(1, count // 8)


def _remove(environment: lmdb.Environment, count: int) -> bool:
    """Removes the first `count` entries. Returns whether no others are left. Raises lmdb.Error."""
    with environment.begin(write=True) as transaction, transaction.cursor() as cursor:
        there = cursor.first()
        while there and count:
            there = cursor.delete()
            count -= 1
        return not there


def _make_pages_usable(environment: lmdb.Environment) -> None:
    """Commits two transactions that change something: a transaction uses pages that were freed two transactions ago."""
    key = b"\0"
    try:
        for _ in range(2):
            with environment.begin(write=True) as transaction:
                transaction.put(key, b"")
                transaction.delete(key)
    except lmdb.MapFullError:
        pass  # the next writers' transactions do the same
