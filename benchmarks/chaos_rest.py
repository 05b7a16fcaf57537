"""Decides whether the job has come to rest: no past event can still change its membership.

Committed steps alone do not show this. A worker continues while its agent is frozen and the agent's lease ends. After
the thaw the node commits as before, while the leader already excludes it. A fault that hits all other nodes at that
moment leaves no holder of the job's state.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import DecodeError

from bagua_agent.etcd.keys import JobKeys
from bagua_contract.records import Generation
from tests.lab.etcd import EtcdCluster
from tests.lab.namespaces import LabError


def why_unrest(etcd: EtcdCluster, job_id: str, in_force: int) -> str:
    """Empty if it has. in_force: the generation of the newest committed step."""
    keys = JobKeys(job_id)
    try:
        found = etcd.standing(keys.prefix)
    except (LabError, OSError) as error:
        return f"etcd: {error}"
    return judge(keys, {key: stands.value for key, stands in found.items()}, in_force)


def judge(keys: JobKeys, found: Mapping[str, bytes], in_force: int) -> str:
    """found: what stands under the job's prefix."""
    if keys.leader not in found:
        return "no agent leads"
    try:
        record = Generation.decode(found.get(keys.generation, b""))
    except (DecodeError, ValueError) as error:
        return f"no generation: {error}"
    if record.number != in_force:
        return f"generation {record.number} stands, {in_force} is in force"
    for member in record.members:
        if keys.agents + member.agent_id not in found:
            return f"the lease of {member.agent_id} has ended"
    return ""
