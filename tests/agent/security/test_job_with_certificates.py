"""A job whose nodes meet in an etcd that asks for certificates."""

from __future__ import annotations

from pathlib import Path

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.agent.service.conftest import People
from tests.docs.printed import printed
from tests.faults.conftest import MakeJob, job
from tests.faults.job import SCRIPT

__all__ = ["job"]


def test_two_nodes_train_with_their_certificate(job: MakeJob, etcd: EmbeddedEtcd, people: People) -> None:
    files = people.files["node-1"]
    given = {
        "etcd-1:2379,etcd-2:2379,etcd-3:2379": etcd.endpoint.removeprefix("https://"),
        "train.py": str(SCRIPT),
        "ca.pem": files.ca_file,
        "certificate.pem": files.cert_file,
        "key.pem": files.key_file,
    }
    *options, script = printed("docs/security.md", "--etcd-ca", given)
    one = job(options=options, file=Path(script), samples=120)
    one.hurry()
    nodes = [one.start() for _ in range(2)]
    one.finish()
    one.check(finished=2)
    assert {line.world_size for line in one.ledger.lines} == {2}
    assert not any(node.says("without TLS") for node in nodes)
