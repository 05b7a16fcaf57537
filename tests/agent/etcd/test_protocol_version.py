"""A changed record or key makes its author decide whether versions may mix.

Readers of the wire's messages and of the keys are agents, workers and daemons of possibly another version. The digests
below are of the messages' definitions, without comments, and of the places of keys.
"""

from __future__ import annotations

import hashlib

import pytest

from bagua_agent.cluster.cluster_records import PROTOCOL
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.keys import JOBS_PREFIX, KEY_TABLE, RECORDS_PREFIX, SECRETS_PREFIX
from bagua_contract import cluster_pb2, control_pb2, membership_pb2, node_pb2, session_pb2, trace_pb2
from bagua_contract.records import PROTOCOL_VERSION

JOB_KEYS = [JOBS_PREFIX, RECORDS_PREFIX, SECRETS_PREFIX]
JOB_KEYS += sorted(f"{name} {row.prefix} {row.place}" for name, row in KEY_TABLE.items())
CLUSTER_KEYS = sorted(f"{name} {text}" for name, text in vars(cluster_keys).items() if name.isupper())

# etcd.proto is etcd's own interface.
DEFINITIONS = {
    "membership.proto": membership_pb2.DESCRIPTOR.serialized_pb,
    "session.proto": session_pb2.DESCRIPTOR.serialized_pb,
    "control.proto": control_pb2.DESCRIPTOR.serialized_pb,
    "trace.proto": trace_pb2.DESCRIPTOR.serialized_pb,
    "keys of a job": "\n".join(JOB_KEYS).encode(),
    "cluster.proto": cluster_pb2.DESCRIPTOR.serialized_pb,
    "node.proto": node_pb2.DESCRIPTOR.serialized_pb,
    "keys of a cluster": "\n".join(CLUSTER_KEYS).encode(),
}
OF_THE_CLUSTER = {"cluster.proto", "node.proto", "keys of a cluster"}

# With the version at which each was last changed: of PROTOCOL for the cluster's, else of PROTOCOL_VERSION.
PINNED = {
    "membership.proto": (14, "e25a0bf8b6791819"),
    "session.proto": (14, "b77c366224b5a84c"),
    "control.proto": (14, "5c6315ae49ff7bef"),
    "trace.proto": (14, "24b4b4ebd15d6b32"),
    "keys of a job": (14, "01a4354d1688fce0"),
    "cluster.proto": (1, "d92bf98c03cfa669"),
    "node.proto": (1, "2a65b347376c460e"),
    "keys of a cluster": (1, "6f33b92c2bd938a5"),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_change_of_the_wire_is_decided(name: str) -> None:
    constant, version = (
        ("cluster_records.PROTOCOL", PROTOCOL)
        if name in OF_THE_CLUSTER
        else ("records.PROTOCOL_VERSION", PROTOCOL_VERSION)
    )
    found = (version, hashlib.sha256(DEFINITIONS[name]).hexdigest()[:16])
    assert PINNED[name] == found, (
        f"{name} or its version changed. If readers of version {version} would misread the new form, raise {constant}; "
        f"if they work, say why in the commit. Then put {found} here."
    )
