"""Collects a trace of a running job from its agents, for `bagua-launch trace` (docs/design/tracing.md).

Calls each agent as another agent of the job would, with the job's key pair from etcd. Agents are asked one after the
other, in the order of their ids: of two commands at once one is refused by the first agent that both ask. Every wait is
bounded; a lost agent costs the spans that it had not passed on, and is named.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

import grpc

from bagua_agent.base.background import OperationEnd, Succeeded, background_thread
from bagua_agent.base.errors import InfrastructureLost, UserError
from bagua_agent.cluster_client.cluster_requests import unknown_job
from bagua_agent.cluster_client.job_trace import (
    ClockSample,
    HostClock,
    JobTrace,
    WorkerTrace,
    best,
    is_complete,
    remarks_of,
    sample_of,
)
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.rpc.control_client import endpoint_of
from bagua_agent.rpc.job_identity import JobIdentity, open_channel
from bagua_contract import control_pb2_grpc, trace_pb2
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import read_message

CALL_TIMEOUT_S = 5.0
LOOK_S = 0.5  # for agents that have come since
SAY_S = 5.0  # how the wait goes
ROUND_TRIPS = 8
SPANS_OF_A_WORKER = 50_000
_MOST_REPLY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class TraceMessage:
    """A message of an agent's stream. reply None: the agent's stream is over. is_lost: that was not its regular end."""

    agent_id: str
    reply: trace_pb2.TraceReply | None
    is_lost: bool = False


def following(
    agent_id: str, call: Iterable[trace_pb2.TraceReply], put: Callable[[TraceMessage], object]
) -> threading.Thread:
    """Returns a thread, not started yet, that reads one agent's stream; the last message that it puts is the end of the
    stream."""

    def read() -> bool:
        """Passes the replies on. Returns whether the agent ended the stream itself, or this command did."""
        try:
            for reply in call:
                put(TraceMessage(agent_id, reply))
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.CANCELLED
        return True

    def ended(end: OperationEnd[bool]) -> None:
        is_regular = isinstance(end, Succeeded) and end.value
        put(TraceMessage(agent_id, None, is_lost=not is_regular))

    return background_thread("bagua-trace", read, ended)


class TraceReader:
    """Collects the trace of a job. Close it. complain: takes lines about what is missing, and about a long wait, as
    they become known. trace: what has come so far."""

    def __init__(
        self,
        store: Store,
        job_id: str,
        steps: int,
        within_s: float,
        asker: str,
        complain: Callable[[str], None],
    ) -> None:
        """Finds the job and its key pair. Raises UserError for a job that is unknown, has ended, or has no agents."""
        self._store = store
        self._keys = JobKeys(job_id)
        self._until_s = time.monotonic() + within_s
        self._asker = asker
        self._complain = complain
        self.trace = JobTrace(job_id, steps)
        self._opened = ExitStack()
        self._inbox: queue.SimpleQueue[TraceMessage] = queue.SimpleQueue()
        self._stubs: dict[str, control_pb2_grpc.AgentControlStub] = {}
        self._nodes: dict[str, str] = {}
        self._open: set[str] = set()
        self._first: set[str] = set()
        self._present: set[str | None] = set()  # agents that had a key at the last look
        if store.get(self._keys.spec) is None:
            raise unknown_job(store, job_id)
        if store.get(self._keys.result) is not None:
            raise UserError(f"job {job_id!r} has ended; `bagua-launch status` shows those that run")
        record = store.get(self._keys.identity)
        try:
            self._identity = JobIdentity.decode(job_id, b"" if record is None else record.value)
        except ValueError as error:
            raise UserError(
                f"the key pair of job {job_id!r} in etcd can't be read ({error}), and its agents answer no one "
                "without it; use an account of etcd that may read it, or wait until the job has started"
            ) from error

    def collect(self) -> JobTrace:
        """Waits until all workers have recorded the steps, or the time is over. Raises UserError if the job is being
        traced already or is in restart mode. After a KeyboardInterrupt `finish` returns what has come."""
        for agent in self._agents():
            self._begin(agent)
        if not self._open:
            raise UserError(
                f"no agent of job {self.trace.job_id!r} answers here; "
                f"see `bagua-launch status {self.trace.job_id}`, and run this command in the network of its nodes"
            )
        began_s = time.monotonic()
        look_s, say_s = began_s + LOOK_S, began_s + SAY_S
        while (now_s := time.monotonic()) < self._until_s:
            complete, reason = is_complete(self._first, self.trace.workers.values(), len(self._open))
            if complete:
                break
            if now_s >= say_s:
                say_s = now_s + SAY_S
                self._complain(f"after {now_s - began_s:.0f} s: {reason}")
            if now_s >= look_s:
                self._look()
                look_s = time.monotonic() + LOOK_S
            with suppress(queue.Empty):
                wait_s = max(0.0, min(look_s, self._until_s) - time.monotonic())
                self._take(self._inbox.get(timeout=wait_s))
        return self.finish()

    def _look(self) -> None:
        """Asks agents that have come since. The stream of one whose key is gone is over: a host without power ends no
        connection."""
        try:
            agents = self._agents()
        except InfrastructureLost as error:
            self._miss(f"agents that came or went meanwhile were not noticed: {error}")
            return
        for agent_id in self._open - self._present:
            self._take(TraceMessage(agent_id, None, is_lost=True))
        for agent in agents:
            self._begin(agent)

    def finish(self) -> JobTrace:
        """Returns what has come so far, with the clocks compared once more."""
        while True:
            try:
                self._take(self._inbox.get_nowait())
            except queue.Empty:
                break
        for agent_id, clock in self.trace.clocks.items():
            after = self._sample(agent_id) if agent_id in self._open else None
            self.trace.clocks[agent_id] = replace(clock, after=after)
        for remark in remarks_of(self.trace.workers.values(), self.trace.steps):
            self._miss(remark)
        return self.trace

    def close(self) -> None:
        """Ends the trace on all agents."""
        self._opened.close()

    # -- agents

    def _agents(self) -> list[pb.Agent]:
        """Returns the agents that have not been asked, in the order of their ids. Raises InfrastructureLost."""
        records, _ = self._store.get_prefix(self._keys.agents)
        self._present = {JobKeys.id_in(self._keys.agents, record.key) for record in records}
        found = []
        for record in records:
            agent = read_message(pb.Agent, record.value)
            if agent is not None and agent.agent_id and agent.agent_id not in self._nodes:
                found.append(agent)
        return sorted(found, key=lambda a: a.agent_id)

    def _begin(self, agent: pb.Agent) -> None:
        agent_id = agent.agent_id
        self._nodes[agent_id] = agent.node_name
        if endpoint_of(agent.control_address) is None:
            self._miss(f"node {agent.node_name} is missing: {agent.control_address[:100]!r} is no address")
            return
        channel = self._opened.enter_context(
            open_channel(agent.control_address, self._identity, _MOST_REPLY_BYTES)
        )
        self._stubs[agent_id] = control_pb2_grpc.AgentControlStub(channel)  # type: ignore[no-untyped-call]
        sample = self._sample(agent_id)
        if sample is None:
            self._miss(
                f"node {agent.node_name} is missing: its agent at {agent.control_address} does not answer"
            )
            return
        self.trace.clocks[agent_id] = HostClock(sample)
        left_s = max(0.1, self._until_s - time.monotonic())
        request = trace_pb2.TraceRequest(
            job_id=self._keys.job_id,
            agent_id=agent_id,
            steps=self.trace.steps,
            within_s=left_s,
            asker=self._asker,
            most_spans=SPANS_OF_A_WORKER,
        )
        call = self._stubs[agent_id].Trace(request, timeout=left_s + CALL_TIMEOUT_S)
        self._opened.callback(call.cancel)
        try:
            first: trace_pb2.TraceReply = next(call)
        except grpc.RpcError as error:
            self._refused(agent, error)
            return
        except StopIteration:
            self._miss(f"node {agent.node_name} is missing: its agent ended")
            return
        if first.begun.restart_mode:
            raise UserError(
                f"job {self._keys.job_id!r} is in restart mode: its script is started anew for each generation and "
                "makes no steps of Bagua's, so there is nothing to trace"
            )
        self._open.add(agent_id)
        for worker_id in first.begun.workers:
            self._first.add(worker_id)
            self._worker(agent_id, worker_id)
        thread = following(agent_id, call, self._inbox.put)
        thread.start()
        self._opened.callback(lambda: thread.join(CALL_TIMEOUT_S))
        self._opened.callback(call.cancel)  # first: closing goes backwards

    def _refused(self, agent: pb.Agent, error: grpc.RpcError) -> None:
        """Notes that an agent refused the trace. Raises UserError if another command traces the job."""
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise UserError(
                f"job {self._keys.job_id!r} is being traced already: on node {agent.node_name} {details}; "
                "wait until that trace ends, or end that command"
            ) from error
        why = f"its agent answers {code.name}"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            why = "its version of bagua has no traces; install one version on all nodes"
        self._miss(f"node {agent.node_name} is missing: {why}")

    def _sample(self, agent_id: str) -> ClockSample | None:
        """Returns the best of several round trips; None if the agent does not answer."""
        request = trace_pb2.ClockRequest(job_id=self._keys.job_id, agent_id=agent_id)
        samples = []
        with suppress(grpc.RpcError):
            for _ in range(ROUND_TRIPS + 1):
                sent_ns = time.monotonic_ns()
                reply = self._stubs[agent_id].ReadClock(request, timeout=CALL_TIMEOUT_S)
                received_ns = time.monotonic_ns()
                if reply.monotonic_ns:
                    samples.append(sample_of(sent_ns, reply.monotonic_ns, received_ns))
        return best(samples)

    # -- what agents say

    def _worker(self, agent_id: str, worker_id: str) -> WorkerTrace:
        workers = self.trace.workers
        if worker_id not in workers:
            workers[worker_id] = WorkerTrace(worker_id, agent_id, self._nodes[agent_id])
        return workers[worker_id]

    def _take(self, said: TraceMessage) -> None:
        agent_id, reply = said.agent_id, said.reply
        if reply is None:
            self._open.discard(agent_id)
            for worker in self.trace.workers.values():
                worker.ended |= worker.agent_id == agent_id
            if said.is_lost:
                self._miss(f"node {self._nodes[agent_id]} was lost during the trace")
            return
        match reply.WhichOneof("kind"):
            case "appeared":
                self._worker(agent_id, reply.appeared.worker_id)
            case "ended":
                self._worker(agent_id, reply.ended.worker_id).ended = True
            case "spans":
                worker = self._worker(agent_id, reply.spans.worker_id)
                try:
                    worker.take(reply.spans.spans)
                except ValueError as error:
                    self._miss(f"worker {worker.worker_id} sent what is no trace: {error}")
            case "left_out":
                self._miss(
                    f"node {self._nodes[agent_id]} left out {reply.left_out} bytes: this command read too slowly"
                )
            case _:
                pass

    def _miss(self, remark: str) -> None:
        if remark not in self.trace.remarks:
            self.trace.remarks.append(remark)
            self._complain(remark)
