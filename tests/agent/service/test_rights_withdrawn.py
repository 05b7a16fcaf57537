"""An operator withdraws an agent's rights while it reads a large job's record, and gives them back: it reads on."""

from __future__ import annotations

import logging
import threading

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.job.new_identity import make_identity
from bagua_agent.large_jobs.kept_records import KeptRecords
from bagua_agent.large_jobs.limits import Limits
from bagua_agent.large_jobs.record_parts import stored
from bagua_agent.large_jobs.whole_records import WholeRecords
from bagua_agent.security.certificate_files import issued_in, utc_now
from bagua_agent.security.etcd_role_writer import apply
from bagua_contract.records import Generation, GenerationKind, Placement
from tests.agent.service.conftest import People, store_config
from tests.lab.wait import eventually

KEYS = JobKeys("job")
ADDRESS = "127.0.0.1:1"  # its own: a keeper asks etcd alone
LIMITS = Limits(whole_record_members=1)
RECORD = Generation(
    4,
    3,
    GenerationKind.FAILOVER,
    tuple(Placement(f"n{i}.0.a", f"n{i}", f"n{i}", 0, i, i, 0, "h:1", 1, 1, True) for i in range(4)),
    "nonce",
)


def test_a_record_is_read_once_the_rights_are_back(
    etcd: EmbeddedEtcd, people: People, caplog: pytest.LogCaptureFixture
) -> None:
    as_root = store_config(etcd.endpoint, people.files["root"])
    everybody = issued_in(people.folder, utc_now())
    others = [holder for holder in everybody if holder.name != "node-1"]
    apply(as_root, everybody)
    operator = Store(store_config(etcd.endpoint, people.files["ann"]))
    node = Store(store_config(etcd.endpoint, people.trusting_us("node-1")))
    form = stored(RECORD, KEYS, LIMITS, {"n0": ADDRESS})
    assert form.parts, "a large record"
    for part in form.parts:
        operator.put(part.key, part.value)
    apply(as_root, others, retired=["node-1"])
    with pytest.raises(UserError):
        node.get(form.parts[0].key)

    records = WholeRecords(node, KEYS, make_identity("job"), "n0", ADDRESS, KeptRecords(), LIMITS)
    told: list[tuple[Change, ...]] = []
    change = Change(KEYS.generation, form.value, 9, 2)
    reads = threading.Thread(target=lambda: told.append(records.whole((change,))))
    with caplog.at_level(logging.INFO):
        reads.start()
        eventually(lambda: caplog.text.count("reading the record") >= 2, 10.0, "it was refused, and again")
    assert told == []
    apply(as_root, everybody)
    reads.join(10.0)
    records.stop()
    assert [c.value for changes in told for c in changes] == [RECORD.encode()]
    for store in (operator, node):
        store.close()
