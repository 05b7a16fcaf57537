"""Answers people who look at this node's part of a job: a picture from the agent's loop, output, stacks, collectives.

Called in threads of the control server; nothing here changes the agent's state.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from bagua_agent.metrics.job_picture import JobPicture, PictureAsked, WorkerPicture
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.workers.collectives import NoCollectives, collectives_of
from bagua_agent.workers.output.output_options import Streams
from bagua_agent.workers.process.process_status import is_stopped
from bagua_agent.workers.stacks import readable_stacks
from bagua_contract import control_pb2
from bagua_contract.net_counters import NoCountersError, read

PICTURE_TIMEOUT_S = 2.0
_STREAMS = {
    control_pb2.ReadOutputRequest.STDOUT: Streams.OUT,
    control_pb2.ReadOutputRequest.STDERR: Streams.ERR,
}


class OwnAnswers:
    """Implements rpc.node_answers.NodeAnswers. put: gives the agent's loop a message. dashboard: the address as
    HOST:PORT at which this agent serves one; empty for none."""

    def __init__(
        self, agent_id: str, workers: NodeWorkers, put: Callable[[object], None], dashboard: str
    ) -> None:
        self._agent_id = agent_id
        self._workers = workers
        self._put = put
        self._dashboard = dashboard

    def node(self) -> control_pb2.ReadNodeReply:
        asked = PictureAsked()
        self._put(asked)
        try:
            picture = asked.answer.get(timeout=PICTURE_TIMEOUT_S)
        except queue.Empty:
            return control_pb2.ReadNodeReply()
        return reply_of(picture, self._agent_id, self._dashboard)

    def output(
        self, slot: int, stream: control_pb2.ReadOutputRequest.Stream, position: int
    ) -> control_pb2.ReadOutputReply:
        wanted = _STREAMS.get(stream)
        part = None if wanted is None else self._workers.output.recent.read(slot, wanted, position)
        if part is None:
            return control_pb2.ReadOutputReply()
        return control_pb2.ReadOutputReply(kept=True, position=part.position, data=part.data)

    def stacks(self, slot: int) -> control_pb2.ReadStacksReply:
        target = self._workers.stack_target_of(slot)
        if target is None:
            return control_pb2.ReadStacksReply(problem=f"slot {slot} has no worker now")
        text, problem = readable_stacks(target, "a person asked for them")
        return control_pb2.ReadStacksReply(text=text, problem=problem)

    def collectives(self, slot: int) -> control_pb2.ReadCollectivesReply:
        target = self._workers.stack_target_of(slot)
        if target is None:
            return control_pb2.ReadCollectivesReply(problem=f"slot {slot} has no worker now")
        try:
            return control_pb2.ReadCollectivesReply(answer=collectives_of(target))
        except NoCollectives as error:
            return control_pb2.ReadCollectivesReply(problem=str(error))


def reply_of(picture: JobPicture, agent_id: str, dashboard: str) -> control_pb2.ReadNodeReply:
    return control_pb2.ReadNodeReply(
        node_name=picture.node_name,
        agent_id=agent_id,
        leads=picture.leads,
        generation=picture.generation,
        workers=[_worker(worker) for worker in picture.workers],
        store_answers=picture.store_answers,
        store_outages=picture.store_outages,
        dashboard=dashboard,
    )


def _worker(worker: WorkerPicture) -> control_pb2.WorkerNow:
    return control_pb2.WorkerNow(
        slot=worker.slot,
        worker_id=worker.worker_id,
        pid=worker.pid,
        global_rank=worker.global_rank,
        progress=worker.progress,
        net=_net_counters(worker.pid),
        stopped=is_stopped(worker.pid),
    )


def _net_counters(pid: int) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in read(pid).items()}
    except NoCountersError:
        return {}
