"""Reads ranges of keys page by page, all as they were at one revision.

Jobs leave records, so a range grows without bound. A page does not, and each has an attempt's time of its own. Does not
know endpoints: `ask` makes one request, with its time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bagua_agent.etcd.connection import EtcdClient
from bagua_agent.etcd.failures import CallFailed, Trouble
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.read_at_once import read_at_once
from bagua_agent.etcd.stubs import etcd3
from bagua_contract import etcd_pb2 as pb

Ask = Callable[[Callable[[EtcdClient], Any]], Any]

PAGE_KEYS = 256  # records of failures and events have some KiB each
MOST_STARTS = 5


def read_ranges(ask: Ask, ranges: Sequence[KeyRange]) -> tuple[list[pb.KeyValue], int]:
    """Returns all keys in the ranges as they were at one revision, and that revision.

    Begins anew if that revision was compacted between two pages. Raises CallFailed if this happens again and again, and
    what `ask` raises.
    """
    for _ in range(MOST_STARTS - 1):
        try:
            return _read_ranges(ask, ranges)
        except CallFailed as error:
            if error.failure.trouble is not Trouble.HISTORY_GONE:
                raise
    return _read_ranges(ask, ranges)


def _read_ranges(ask: Ask, ranges: Sequence[KeyRange]) -> tuple[list[pb.KeyValue], int]:
    most = max(1, PAGE_KEYS // max(1, len(ranges)))

    def first_pages(client: EtcdClient) -> tuple[list[Any], int]:
        reads = [etcd3.etcdrpc.RangeRequest(key=r.start, range_end=r.end, limit=most) for r in ranges]
        return read_at_once(client, reads)

    answers, revision = ask(first_pages)
    found: list[pb.KeyValue] = []
    for keys, answer in zip(ranges, answers, strict=True):
        found += answer.kvs
        if answer.more:
            found += read_at(ask, _behind(answer.kvs[-1], keys), revision)[0]
    return found, revision


def read_at(ask: Ask, keys: KeyRange, revision: int) -> tuple[list[pb.KeyValue], int]:
    """Returns the keys of the range as they were at `revision`, and the newest revision of the store. Raises what `ask`
    raises."""

    def page(client: EtcdClient) -> Any:
        request = etcd3.etcdrpc.RangeRequest(
            key=keys.start, range_end=keys.end, limit=PAGE_KEYS, revision=revision
        )
        return client.raw(client.kvstub.Range, request)

    found: list[pb.KeyValue] = []
    while True:
        answer = ask(page)
        found += answer.kvs
        if not answer.more:
            return found, int(answer.header.revision)
        keys = _behind(answer.kvs[-1], keys)


def _behind(last: pb.KeyValue, keys: KeyRange) -> KeyRange:
    """Returns the part of the range behind the last key of a page."""
    return KeyRange(last.key + b"\0", keys.end)
