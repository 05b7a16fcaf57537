"""Makes the data of the cluster's page from its facts. Pure; JSON-like values only. The page draws."""

from __future__ import annotations

from dataclasses import asdict

from bagua_agent.base.plain_text import listed, plain_line, shortened
from bagua_agent.cluster.cluster_plan import JobState
from bagua_agent.cluster.node_state import NodeState, SlotUse, slot_uses
from bagua_agent.dashboard.page_data import Page
from bagua_agent.observation.cluster_facts import ClusterFacts
from bagua_agent.observation.cluster_status import JobStatus, NodeStatus
from bagua_agent.observation.cluster_verdict import cluster_verdict, drain_is_under_way

MOST_NODES = 1000  # rows of the table; more can't be read
MOST_JOBS = 300
MOST_ENDED = 30

# Names of what a slot may be used for, in the order of the bar.
SLOT_NAMES = {
    SlotUse.USED: "in use",
    SlotUse.FREE: "free",
    SlotUse.DRAINED: "free on drained nodes",
    SlotUse.TROUBLE: "free on nodes in trouble",
    SlotUse.ABSENT: "on silent nodes",
}


def cluster_page(facts: ClusterFacts, served_by: str) -> Page:
    """Returns the data of the cluster's page. served_by: name of the node whose daemon serves the page; empty for
    none."""
    said = cluster_verdict(facts)
    slots = slot_uses((NodeState(n.state), n.slots, n.taken) for n in facts.status.nodes)
    ended = [job for job in facts.jobs if job.state == JobState.ENDED.value]
    ended.sort(key=lambda job: -job.ended_unix_s)
    return {
        "cluster": True,
        "at": facts.at_unix_s,
        "served_by": served_by,
        "verdict": {**asdict(said), "level": said.level.value},
        "scheduler": facts.status.scheduler,
        "slots": [
            {"use": use.value, "name": name, "slots": slots[use]}
            for use, name in SLOT_NAMES.items()
            if slots[use]
        ],
        "counts": {
            "nodes": len(facts.status.nodes),
            "ready": sum(node.state == "ready" for node in facts.status.nodes),
            "going": len(facts.going),
            "waiting": len(facts.queue),
            "ended": len(ended),
        },
        "queue": [_waiting(job, facts) for job in facts.queue[:MOST_JOBS]],
        "jobs": [_going(job, facts) for job in facts.going[:MOST_JOBS]],
        "nodes": [_node(node) for node in facts.status.nodes[:MOST_NODES]],
        "ended": [_ended(job) for job in ended[:MOST_ENDED]],
        "absent": [_ended(job) for job in facts.jobs if job.state == "absent"][:MOST_ENDED],
    }


def health(node: NodeStatus) -> str:
    """Returns the state of a node in one word or two, for people."""
    if node.state == "absent":
        return "silent"
    if node.state == "drained":
        return "draining" if drain_is_under_way(node) else "drained"
    return node.state


def _waiting(job: JobStatus, facts: ClusterFacts) -> Page:
    return {
        "position": job.position,
        "job": job.job_id,
        "asks": asks(job),
        "priority": job.priority,
        "submitter": shortened(plain_line(job.submitter), 80),
        "since": job.submitted_unix_s,
        "starts_in_s": facts.starts_in_s.get(job.job_id),
        "fits": job.fits,
        "why": job.reason,
    }


def _going(job: JobStatus, facts: ClusterFacts) -> Page:
    pace = facts.paces.get(job.job_id)
    return {
        "job": job.job_id,
        "state": job.state,
        "by_hand": job.by_hand,
        "nodes": list(job.nodes),
        "asks": asks(job),
        "step": None if pace is None else pace.step,
        "total": 0 if pace is None else pace.total_steps,
        "steps_per_s": None if pace is None else pace.steps_per_s,
        "left_s": None if pace is None else pace.left_s,
        "why": job.reason,
    }


def _node(node: NodeStatus) -> Page:
    return {
        "name": node.node_name,
        "health": health(node),
        "slots": node.slots,
        "taken": node.taken,
        "jobs": [
            {"job": job_id, "slots": listed(sorted(slots)), "state": state}
            for job_id, slots, state in node.going
        ],
        "why": node.reason,
        "labels": [f"{name}={value}" for name, value in node.labels],
        "version": shortened(plain_line(node.version), 40),
    }


def _ended(job: JobStatus) -> Page:
    return {
        "job": job.job_id,
        "at": job.ended_unix_s,
        "exit_code": job.exit_code,
        "by_hand": job.by_hand,
        "why": job.reason,
    }


def asks(job: JobStatus) -> str:
    """Returns the nodes that a job asks for, as "2 to 4 nodes of 8 slots"."""
    least, most = job.min_nodes, job.max_nodes
    nodes = f"{least} to {most} nodes" if least != most else f"{least} node{'s' if least != 1 else ''}"
    return f"{nodes} of {job.slots_per_node} slots" if job.slots_per_node else nodes
