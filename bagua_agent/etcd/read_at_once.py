"""Reads several ranges of keys as they were at one revision.

Several take one transaction, so one request. An etcd whose database is full refuses every transaction (seen with
3.5.1), even one that only reads; then the ranges are read one by one, all at the revision of the first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import grpc

from bagua_agent.etcd.connection import EtcdClient
from bagua_agent.etcd.failures import Trouble, classify
from bagua_agent.etcd.stubs import etcd3

MOST_ROUNDS = 5


def read_at_once(client: EtcdClient, reads: Sequence[Any]) -> tuple[list[Any], int]:
    """Returns an answer (RangeResponse) for each of `reads` (RangeRequest), and the revision of all. Raises
    grpc.RpcError."""
    limit_s = client.timeout
    deadline_s = None if limit_s is None else time.monotonic() + limit_s
    if len(reads) != 1:
        request = etcd3.etcdrpc.TxnRequest()
        for read in reads:
            request.success.add().request_range.CopyFrom(read)
        try:
            answer = client.raw(client.kvstub.Txn, request)
        except grpc.RpcError as error:
            if classify(error.code(), error.details()).trouble is not Trouble.FULL:
                raise
        else:
            return [one.response_range for one in answer.responses], int(answer.header.revision)
    for _ in range(MOST_ROUNDS):
        try:
            return _one_by_one(client, reads, deadline_s)
        except grpc.RpcError as error:
            # compacted between two of them: the operator is making room
            if classify(error.code(), error.details()).trouble is not Trouble.HISTORY_GONE:
                raise
            failed = error
    raise failed


def _one_by_one(client: EtcdClient, reads: Sequence[Any], deadline_s: float | None) -> tuple[list[Any], int]:
    revision, answers = 0, []
    for read in reads:
        left_s = None if deadline_s is None else max(0.001, deadline_s - time.monotonic())
        read.revision = revision
        answers.append(client.kvstub.Range(read, left_s, metadata=client.metadata))
        revision = revision or int(answers[-1].header.revision)
    return answers, revision
