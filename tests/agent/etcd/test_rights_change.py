"""Requests that are under way while etcd's users or roles change."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from bagua_agent.etcd.client import Put, Store, StoreConfig, absent
from bagua_agent.etcd.endpoints import parse_endpoints
from bagua_agent.etcd.stubs import etcd3


class ChangingEtcd:
    """Its rights change under the first transactions: it answers them with `errors`, one after the other."""

    def __init__(self, errors: Sequence[tuple[grpc.StatusCode, str]]) -> None:
        self.asked = 0
        self._errors = errors
        txn = grpc.unary_unary_rpc_method_handler(
            self._txn,
            request_deserializer=etcd3.etcdrpc.TxnRequest.FromString,
            response_serializer=etcd3.etcdrpc.TxnResponse.SerializeToString,
        )
        self.server = grpc.server(ThreadPoolExecutor(1))
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("etcdserverpb.KV", {"Txn": txn}),)
        )
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def _txn(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.asked += 1
        if self.asked <= len(self._errors):
            context.abort(*self._errors[self.asked - 1])
        return etcd3.etcdrpc.TxnResponse(succeeded=True)


@pytest.mark.parametrize(
    "error",
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: revision of auth store is old"),
        (grpc.StatusCode.UNKNOWN, "auth: revision in header is old"),  # older versions
    ],
)
def test_a_request_without_a_log_in_is_sent_again(error: tuple[grpc.StatusCode, str]) -> None:
    """As that of a certificate's holder: etcd has not done it."""
    changing = ChangingEtcd([error] * 3)
    store = Store(StoreConfig(parse_endpoints(f"127.0.0.1:{changing.port}")))
    try:
        assert store.transact([absent("/a")], [Put("/a", b"")]).succeeded
        assert changing.asked == 4
    finally:
        store.close()
        changing.server.stop(None).wait()
