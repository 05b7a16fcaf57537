"""Calls the agents of one job for people who look at it: their nodes, the output of workers, stacks, collectives.

Finds the agents and the job's key pair in etcd. Agents are called side by side, each call is bounded, and an agent that
does not answer is reported as silent, unless it refuses a call because it serves others. Connections are kept while the
agent's key stands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc

from bagua_agent.base.errors import InfrastructureLost, UserError
from bagua_agent.base.plain_text import shortened
from bagua_agent.etcd.client import KeyValue, Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.rpc.control_client import endpoint_of
from bagua_agent.rpc.job_identity import JobIdentity, open_channel
from bagua_agent.security.grpc_security import is_too_large
from bagua_contract import control_pb2, control_pb2_grpc
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import read_message

CALL_TIMEOUT_S = 3.0
STACKS_TIMEOUT_S = 15.0
MOST_CALLED = 64  # nodes that are asked, the first by name; of the others only the records in etcd are known
_SIDE_BY_SIDE = 8

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


class AgentBusy(InfrastructureLost):
    """The error of a call that an agent refused because it serves as many others as it can."""


@dataclass(frozen=True, slots=True)
class AgentSeen:
    """An agent's key in etcd, and its answer. node: None if it did not answer in time, was not asked, or is busy.
    asked: False beyond MOST_CALLED. busy: it refused the call, see AgentBusy."""

    agent_id: str
    node_name: str
    slots: int
    leaving: bool
    address: str
    node: control_pb2.ReadNodeReply | None
    asked: bool = True
    busy: bool = False

    @property
    def is_silent(self) -> bool:
        """Whether the agent was asked, and did not answer."""
        return self.asked and self.node is None and not self.busy


class JobAgents:
    """Calls the agents of one job. Threads may share it; `close` ends its connections."""

    def __init__(self, store: Store, job_id: str) -> None:
        self._store = store
        self._keys = JobKeys(job_id)
        self._lock = threading.Lock()
        self._identity: JobIdentity | None = None
        self._channels: dict[str, grpc.Channel] = {}
        self._pool = ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="bagua-look")

    def look(self, records: list[KeyValue]) -> tuple[AgentSeen, ...]:
        """Returns the agents by node name. records: the keys below `agents/`. Raises StoreUnavailable and UserError."""
        agents = [agent for kv in records if (agent := read_message(pb.Agent, kv.value)) is not None]
        agents.sort(key=lambda agent: (agent.node_name, agent.agent_id))
        if not agents:
            return ()
        self._keep({agent.control_address for agent in agents})
        seen = (
            AgentSeen(a.agent_id, a.node_name, a.slots, a.leaving, a.control_address, None) for a in agents
        )
        return self.ask_again(tuple(seen))

    def ask_again(self, agents: tuple[AgentSeen, ...]) -> tuple[AgentSeen, ...]:
        """Returns the agents with new answers, without a look into etcd."""
        request = control_pb2.ReadNodeRequest(job_id=self._keys.job_id)

        def ask(agent: AgentSeen) -> AgentSeen:
            try:
                reply: control_pb2.ReadNodeReply | None = self._ask(
                    agent.address, lambda stub: stub.ReadNode(request, timeout=CALL_TIMEOUT_S)
                )
            except AgentBusy:
                return replace(agent, node=None, asked=True, busy=True)
            # a port may have passed to another agent, and an agent that can't answer names no node
            its_own = reply if reply is not None and reply.agent_id == agent.agent_id else None
            return replace(agent, node=its_own, asked=True, busy=False)

        asked = tuple(self._pool.map(ask, agents[:MOST_CALLED]))
        left_out = (replace(agent, node=None, asked=False, busy=False) for agent in agents[MOST_CALLED:])
        return (*asked, *left_out)

    def output(
        self, agent: AgentSeen, slot: int, stream: control_pb2.ReadOutputRequest.Stream, position: int
    ) -> control_pb2.ReadOutputReply:
        """Reads the output of a slot from an agent. Raises InfrastructureLost if the agent does not answer, and
        AgentBusy."""
        request = control_pb2.ReadOutputRequest(
            job_id=self._keys.job_id, slot=slot, stream=stream, position=position
        )
        reply: control_pb2.ReadOutputReply | None = self._ask(
            agent.address, lambda stub: stub.ReadOutput(request, timeout=CALL_TIMEOUT_S)
        )
        if reply is None:
            raise _silent(agent)
        return reply

    def stacks(self, agent: AgentSeen, slot: int) -> control_pb2.ReadStacksReply:
        """Reads the stacks of a slot's worker from an agent. Raises InfrastructureLost if the agent does not answer,
        and AgentBusy."""
        request = control_pb2.ReadStacksRequest(job_id=self._keys.job_id, slot=slot)
        reply: control_pb2.ReadStacksReply | None = self._ask(
            agent.address, lambda stub: stub.ReadStacks(request, timeout=STACKS_TIMEOUT_S)
        )
        if reply is None:
            raise _silent(agent)
        return reply

    def collectives(self, agent: AgentSeen, slot: int) -> control_pb2.ReadCollectivesReply | None:
        """Reads the collectives of a slot's worker from an agent. Returns None if the agent does not answer, or does
        not know the call. Raises AgentBusy."""
        request = control_pb2.ReadCollectivesRequest(job_id=self._keys.job_id, slot=slot)
        reply: control_pb2.ReadCollectivesReply | None = self._ask(
            agent.address, lambda stub: stub.ReadCollectives(request, timeout=CALL_TIMEOUT_S)
        )
        return reply

    def side_by_side(self, ask: Callable[[_Asked], _Answer], asked: Iterable[_Asked]) -> Iterator[_Answer]:
        """Calls `ask` for each of `asked` side by side, and yields the answers in order."""
        return self._pool.map(ask, asked)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def _keep(self, addresses: set[str]) -> None:
        """Reads the key pair, and closes the channels that are not needed any more."""
        identity = self._read_identity()
        with self._lock:
            if identity != self._identity:  # the job began again
                addresses, self._identity = set(), identity
            for address in self._channels.keys() - addresses:
                self._channels.pop(address).close()

    def _read_identity(self) -> JobIdentity:
        job_id = self._keys.job_id
        found = self._store.get(self._keys.identity)
        if found is None:
            raise UserError(
                f"job {job_id!r} has no key pair in etcd, so its agents can't be asked; its last agent is leaving, or "
                "these etcd credentials may not read /bagua/secrets"
            )
        try:
            return JobIdentity.decode(job_id, found.value)
        except ValueError as error:
            raise UserError(
                f"{self._keys.identity} can't be read: {error}; its agents can't be asked"
            ) from error

    def _ask(self, address: str, call: Callable[[control_pb2_grpc.AgentControlStub], Any]) -> Any:
        if endpoint_of(address) is None:
            return None  # a record that no agent wrote
        with self._lock:
            if self._identity is None:
                return None
            if address not in self._channels:
                self._channels[address] = open_channel(address, self._identity)
            channel = self._channels[address]
        try:
            return call(control_pb2_grpc.AgentControlStub(channel))  # type: ignore[no-untyped-call]
        except ValueError:
            return None  # the channel was closed meanwhile
        except grpc.RpcError as error:
            is_refused = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            if is_refused and not is_too_large(error.details()):
                said = shortened(error.details() or "")
                raise AgentBusy(f"the agent at {address} refused the call: {said}") from error
            return None


def _silent(agent: AgentSeen) -> InfrastructureLost:
    return InfrastructureLost(
        f"the agent of {agent.node_name} at {agent.address} does not answer; is the node up, and reachable from here?"
    )
