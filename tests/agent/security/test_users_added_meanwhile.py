"""A node writes to a real etcd while its users are changed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from bagua_agent.etcd.client import Put, Store, absent
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.security.certificate_files import issued_in, utc_now
from bagua_agent.security.certificates import Holder, Role
from bagua_agent.security.etcd_role_writer import apply
from tests.agent.service.conftest import People, store_config

ADDED = 50


def test_no_request_of_a_node_fails(etcd: EmbeddedEtcd, people: People) -> None:
    root = store_config(etcd.endpoint, people.files["root"])
    holders = issued_in(people.folder, utc_now())
    apply(root, holders)
    node = Store(store_config(etcd.endpoint, people.trusting_us("node-1")))
    over = threading.Event()

    def write(writer: int) -> int:
        written = 0
        while not over.is_set():
            key = f"/bagua/v1/written-{writer}-{written}"
            assert node.transact([absent(key)], [Put(key, b"")]).succeeded, "nor is it done twice"
            written += 1
        return written

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, writer) for writer in range(4)]
        try:
            expires = holders[0].expires
            added = [Holder(f"added-{number}", Role.AGENT, expires) for number in range(ADDED)]
            assert len(apply(root, (*holders, *added))) >= ADDED
        finally:
            over.set()
        assert all(writer.result() for writer in writers)
    node.close()
