"""Keys of service mode in etcd, under /bagua/v1/cluster/, as in docs/design/service-mode.md. Pure."""

from __future__ import annotations

from bagua_agent.etcd.keys import JobKeys, check_id

EVERYTHING = "/bagua/v1/"
PREFIX = "/bagua/v1/cluster/"
SUBMISSIONS = PREFIX + "submissions/"
NODES = PREFIX + "nodes/"
DRAINS = PREFIX + "drains/"
ORDERS = PREFIX + "orders/"
OUTCOMES = PREFIX + "outcomes/"
REMOVALS = PREFIX + "removals/"
SCHEDULER = PREFIX + "scheduler"


def submission(job_id: str) -> str:
    return SUBMISSIONS + check_id("job", job_id)


def outcome(job_id: str) -> str:
    return OUTCOMES + check_id("job", job_id)


def removal(nonce: str) -> str:
    """Returns the key of a removal. nonce: of the submission that was removed."""
    return REMOVALS + check_id("submission", nonce)


def node(node_name: str) -> str:
    return NODES + check_id("node", node_name)


def drain(node_name: str) -> str:
    return DRAINS + check_id("node", node_name)


def orders(node_name: str) -> str:
    return ORDERS + check_id("node", node_name)


def id_in(folder: str, key: str) -> str | None:
    """Returns the id in `key` if it lies directly in `folder`, else None."""
    return JobKeys.id_in(folder, key)
