"""Strikes the process at a point. Each row of the table as a fault of real processes, links and disks.

A fault strikes while the process is held at its point, and the process continues only after the fault. An
agent held at a point delays its writes, and nothing else: its worker is struck, or another node, as the
row says.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable

from bagua_agent.etcd.keys import JobKeys
from tests.faults import fault_table as table
from tests.faults.fault_stage import HELD_S, NODES, Held, Stage
from tests.faults.fault_table import Moment, Occasion, Row
from tests.faults.job import DEADLINE_S, Node
from tests.lab.network import Host
from tests.lab.wait import eventually

# A host is silent until the others have gone on for so long without it.
SILENT_S = 1.5
# A worker that gets into its next step at all does so in that time.
RAISES_MEANWHILE_S = 0.5
RAISED = "ended: FailpointRaised: failpoint"
HUNG = "ended: hung: "


def strike(stage: Stage, row: Row, moment: Moment, held: Held) -> float:
    """Done when the fault is there, and the process at the point was released.

    From when on, by the wall clock, steps must come again.
    """
    return _STRIKES[row](stage, moment, held)


def _kill_worker(stage: Stage, moment: Moment, held: Held) -> float:
    since = time.time()
    if moment.occasion is Occasion.END:
        held.node.workers[0].kill()
        stage.job_may_fail(128 + signal.SIGKILL)
    else:
        stage.end_worker(held.node)
    stage.let_go()
    return since


def _raise(stage: Stage, moment: Moment, held: Held) -> float:
    def raises() -> bool:
        return stage.standing([held.node], "step.begin") is not None

    raised = held.node.log.count(RAISED)
    since = time.time()
    if moment.of_agent:
        # It stands there until the script has raised, if that can come so far meanwhile.
        stage.ask([held.node], "step.begin", "raise")
        until_s = time.monotonic() + RAISES_MEANWHILE_S
        eventually(lambda: raises() or time.monotonic() > until_s, DEADLINE_S, "half a second to pass")
        held.let_go()
        eventually(raises, HELD_S, "a script that raises", 0.002)
        since = time.time()
    else:
        held.file.write_text("raise")
    if moment.occasion is Occasion.END:
        stage.job_may_fail(1)
    else:
        held.node.await_line(RAISED, times=raised + 1)
        stage.let_go()
    return since


def _kill_an_agent(stage: Stage, moment: Moment, held: Held) -> float:
    """Of the process at the point; an agent at the point is the leader, and loses another node."""
    victim = held.node
    if moment.of_agent:
        victim = next(n for n in stage.nodes.values() if n is not held.node and n.process.is_running)
    return _kill(stage, moment, victim)


def _kill_the_leader(stage: Stage, moment: Moment, held: Held) -> float:
    return _kill(stage, moment, held.node)


def _too_few(stage: Stage, moment: Moment, held: Held) -> float:
    said = stage.times_said("waiting: ", f" of {NODES} nodes")
    since = _kill(stage, moment, held.node)
    if moment.occasion is not Occasion.END:
        eventually(
            lambda: stage.times_said("waiting: ", f" of {NODES} nodes") > said,
            DEADLINE_S,
            "the job waits for nodes",
            0.05,
        )
    return since


def _kill(stage: Stage, moment: Moment, node: Node) -> float:
    since = time.time()
    stage.kill_agent(node)
    stage.let_go()
    if moment.point == "finish.done":
        stage.job_fails(1)
    return since


def _cut(stage: Stage, moment: Moment, held: Held) -> float:
    return _silence(stage, moment, held, Host.cut, Host.heal)


def _freeze(stage: Stage, moment: Moment, held: Held) -> float:
    return _silence(stage, moment, held, Host.freeze, Host.thaw)


def _silence(
    stage: Stage, moment: Moment, held: Held, begin: Callable[[Host], None], end: Callable[[Host], None]
) -> float:
    host = held.node.host
    assert host is not None
    agent_ids = [worker.worker_id.rsplit(".", 2)[0] for worker in held.node.workers]
    since = time.time()
    begin(host)
    stage.let_go()
    others = [n for n in stage.nodes.values() if n is not held.node and n.process.is_running]
    if moment.point == "finish.done":
        key = JobKeys(stage.job.job_id).agent(agent_ids[0])
        eventually(lambda: stage.value(key) is None, DEADLINE_S, "the others give the host up", 0.05)
    elif moment.occasion is Occasion.END:
        for node in others:
            node.process.wait(DEADLINE_S)
    else:
        stage.await_steps(since + SILENT_S)
    end(host)
    return since


def _kill_etcd_member(stage: Stage, moment: Moment, held: Held) -> float:
    leader = stage.cluster.leader
    since = time.time()
    leader.kill()
    stage.let_go()
    return since


def _etcd_away(stage: Stage, moment: Moment, held: Held) -> float:
    there = [node for node in stage.nodes.values() if node.process.is_running]
    away, back = "etcd does not answer", "etcd answers again"
    said = {node: (node.log.count(away), node.log.count(back)) for node in there}
    since = time.time()
    stage.cluster.kill()
    stage.let_go()
    for node in there:
        if moment.point == "result.after":
            # Written already: a process that has read it is done, and need not miss etcd any more.
            eventually(
                lambda n=node: n.says(away, times=said[n][0] + 1) or not n.process.is_running,  # type: ignore[misc]
                DEADLINE_S,
                f"{node.process} misses etcd, or is done",
            )
        else:
            node.await_line(away, times=said[node][0] + 1)
    if moment.occasion is not Occasion.END and moment.occasion not in table.STALLING:
        stage.await_steps(since + table.LEASE_S + 1.0)  # a job that depended on its keys would notice
    stage.cluster.restart()
    if moment.occasion in table.STALLING:
        since = time.time()  # a change of membership is needed, and that waits
    if moment.occasion is not Occasion.END:
        for node in there:
            node.await_line(back, times=said[node][1] + 1)
    return since


def _etcd_wiped(stage: Stage, moment: Moment, held: Held) -> float:
    stage.wiped = True
    since = time.time()
    stage.cluster.kill()
    for member in stage.cluster.members:
        shutil.rmtree(member.data)
    stage.let_go()
    stage.cluster.restart()
    if moment.occasion in table.STALLING:
        since = time.time()
    return since


def _terminate(stage: Stage, moment: Moment, held: Held) -> float:
    since = time.time()
    held.node.send(signal.SIGTERM)
    # There its loop may be over already: only the writer stands at the point
    if moment.point != "result.after":
        held.node.await_line("leaving at the next step boundary")
    stage.let_go()
    # 143: its worker was none of the job's yet, or it had to be ended
    stage.codes[held.node] = frozenset({0, 128 + signal.SIGTERM})
    held.node.process.wait(DEADLINE_S)
    return since


def _hang(stage: Stage, moment: Moment, held: Held) -> float:
    """The process at the point stays there; if it is an agent, its worker stops."""
    hung = held.node.log.count(HUNG)
    since = time.time()
    if moment.of_agent:
        held.node.workers[0].send(signal.SIGSTOP)
        stage.let_go()
    if moment.point == "heal.send":
        # All wait, the sender among them: the copy is begun anew over new connections, and no worker is replaced.
        stage.await_steps(since + table.HANG_NOTICE_S)
    else:
        held.node.await_line(HUNG, times=hung + 1)
    stage.let_go()
    return since


_STRIKES: dict[Row, Callable[[Stage, Moment, Held], float]] = {
    table.WORKER_KILLED: _kill_worker,
    table.SCRIPT_RAISES: _raise,
    table.AGENT_KILLED: _kill_an_agent,
    table.HOST_CUT: _cut,
    table.HOST_FROZEN: _freeze,
    table.LEADER_LOST: _kill_the_leader,
    table.ETCD_MEMBER_KILLED: _kill_etcd_member,
    table.ETCD_AWAY: _etcd_away,
    table.ETCD_WIPED: _etcd_wiped,
    table.SIGTERM: _terminate,
    table.WORKER_HANGS: _hang,
    table.BELOW_MINIMUM: _too_few,
}
