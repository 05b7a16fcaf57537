"""Simulates the requests to etcd of one large job's agents: thousands of agents in one process.

Each agent requests what bagua_agent's own code requests (loop.py, large_jobs/) in the same order, takes its ranges from
large_jobs/scope.py and its place from the record. What differs: their requests share a few connections and their
watches a few streams, their addresses are loopback's, and what agents send one another is not sent: keepers read a
record from etcd as they do, and do not hand it on.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from google.protobuf.message import Message

from bagua_agent.etcd.key_range import KeyRange, encode_key, end_of_prefix
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.stubs import etcd3
from bagua_agent.history import job_history
from bagua_agent.large_jobs.limits import Limits
from bagua_agent.large_jobs.record_parts import Head, head_of, joined, unpacked
from bagua_agent.large_jobs.scope import Scope, ScopeSituation, ranges_of, scope_of
from bagua_agent.rpc.control_server import ControlServer
from bagua_agent.rpc.job_identity import JobIdentity
from bagua_contract import etcd_pb2
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import PROTOCOL_VERSION, Generation
from benchmarks.etcd_load import EtcdConnection

CONNECTIONS = 4
WATCHES_OF_A_STREAM = 512
# In one event loop thousands who begin together would all wait for one another's every answer.
JOINING_AT_ONCE = 160
# Of commits and suspicions, which all agents write at the same time. etcd refuses a write while 5,000 others are to be
# applied, and fails one that waited for 7 s. An agent repeats it; a simulated one does not.
WRITING_AT_ONCE = 512
RELAYS = 16  # answer as agents do, so that the leader can ask through them
LEASE_TTL_S = 3.0
DEADLINE_S = 60.0  # and longer in proportion for more agents than these:
_AGENTS_OF_DEADLINE = 1024
_rpc = etcd3.etcdrpc
T = TypeVar("T", bound=Message)


class NotFormed(Exception):
    """No generation of all that live within DEADLINE_S."""


@dataclass(slots=True)
class Counts:
    """Of all agents together. requests: answered by etcd. renewals: those of them that renewed a lease. events: told by
    watches. heard_bytes: of their values."""

    requests: int = 0
    events: int = 0
    heard_bytes: int = 0
    renewals: int = 0

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.requests - other.requests,
            self.events - other.events,
            self.heard_bytes - other.heard_bytes,
            self.renewals - other.renewals,
        )

    def copy(self) -> Counts:
        return replace(self)


@dataclass(slots=True, eq=False)
class Agent:
    number: int
    agent_id: str
    address: str
    lease_id: int = 0
    ttl_s: float = 0.0
    nonce: str = ""  # of the job that it is in
    alive: bool = True
    scope: Scope = Scope.WHOLE
    seen_agents: set[bytes] = field(default_factory=set)
    head: Head | None = None
    record: Generation | None = None  # if it read one whole
    heard_at_s: float = 0.0

    @property
    def worker_id(self) -> str:
        return f"{self.agent_id}.0.000000"

    @property
    def number_heard(self) -> int:
        if self.head is not None:
            return self.head.number
        return self.record.number if self.record is not None else 0


class SimulatedAgents:
    """Use it in one event loop, in the order of its methods."""

    def __init__(
        self, socket_path: str, identity: JobIdentity, count: int, seed: int, patience: float = 1.0
    ) -> None:
        """socket_path: of etcd's Unix socket. patience: leases last so many times longer than those of agents and are
        renewed as often: on a busy machine this process may be late, and none is to end."""
        self.counts = Counts()
        self.keys = JobKeys(identity.job_id)
        self.limits = Limits()
        self.least = max(1, count // 2)
        self._patience = patience
        self._random = random.Random(seed)
        self._relays = [
            ControlServer("127.0.0.1", identity, f"n{i:05d}", lambda: [])
            for i in range(min(RELAYS, count // 2))
        ]
        self.agents = [Agent(i, f"n{i:05d}", self._address(i)) for i in range(count)]
        self._lost = 0  # of these agents
        self._writing = asyncio.Semaphore(WRITING_AT_ONCE)
        self._socket = socket_path
        self._connections: list[EtcdConnection] = []
        self._renewing: list[Callable[[bytes], None]] = []
        self._streams: list[_WatchStream] = []
        self._renewals: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[object]] = set()
        self._heard = asyncio.Event()  # something that `formed` waits for may have come
        self._looked_at: set[int] = set()
        self._decoded: Generation | None = None  # the newest record that a keeper has read
        self._hearers: Counter[int] = Counter()  # living agents by the newest generation that they heard of

    def _address(self, number: int) -> str:
        if number < len(self._relays):
            return self._relays[number].address
        # Of its own, without a listener: a request to a lost agent is refused, as by a host whose process ended.
        return f"127.{1 + number // 62500}.{number // 250 % 250}.{1 + number % 250}:1"

    async def stop(self) -> None:
        for task in (*self._renewals, *self._background):
            task.cancel()
        await asyncio.gather(*self._renewals, *self._background, return_exceptions=True)
        for connection in self._connections:
            connection.close()
        for relay in self._relays:
            relay.stop()

    # -- joining

    async def join(self) -> None:
        """As fast as they are served. Returns when each has written its keys, ready workers included."""
        self._connections = [await EtcdConnection.connect(self._socket) for _ in range(CONNECTIONS)]
        self._renewing = [
            c.stream("/etcdserverpb.Lease/LeaseKeepAlive", self._renewed) for c in self._connections
        ]
        under_way = asyncio.Semaphore(JOINING_AT_ONCE)

        async def join_one(agent: Agent) -> None:
            async with under_way:
                await self._join(agent)

        await asyncio.gather(*map(join_one, self.agents))
        self._raise_what_failed()

    async def join_another(self) -> None:
        """A further agent comes. Returns when it has written its keys, those of a ready worker included."""
        number = len(self.agents)
        agent = Agent(number, f"n{number:05d}", self._address(number))
        self.agents.append(agent)
        await self._join(agent)

    async def _join(self, agent: Agent) -> None:
        job = _rpc.TxnRequest()
        for key in (self.keys.result, self.keys.spec, self.keys.identity):
            job.success.add().request_range.key = encode_key(key)
        folder, count = KeyRange.of_prefix(self.keys.agents), job.success.add().request_range
        count.key, count.range_end, count.count_only = folder.start, folder.end, True
        found = await self._ask(agent, "KV/Txn", job, _rpc.TxnResponse)
        nodes = found.responses[-1].response_range.count
        for spec in found.responses[1].response_range.kvs:  # begun by the first agent, a real one
            agent.nonce = pb.JobSpec.FromString(spec.value).nonce
        ttl_s = self.limits.lease_ttl_s(LEASE_TTL_S, max(nodes, self.least))
        lease = _rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s * self._patience))
        granted = await self._ask(agent, "Lease/LeaseGrant", lease, _rpc.LeaseGrantResponse)
        agent.lease_id, agent.ttl_s = granted.ID, granted.TTL / self._patience
        self._renewals.add(asyncio.create_task(self._renew(agent)))
        own = pb.Agent(
            protocol=PROTOCOL_VERSION,
            agent_id=agent.agent_id,
            node_name=agent.agent_id,
            control_address=agent.address,
            slots=1,
        )
        await self._put_leased(agent, self.keys.agent(agent.agent_id), own.SerializeToString())
        if nodes <= self.limits.whole_picture_nodes:
            self._later(self._write_event(agent))
        agent.scope, _ = scope_of(ScopeSituation(False, False, False, nodes, Scope.WHOLE), self.limits)
        await self._follow(agent)
        await self._put_member(agent, 0)

    async def _follow(self, agent: Agent) -> None:
        """What stands in the ranges of its scope, and then what changes there."""
        ranges = ranges_of(agent.scope, self.keys, agent.agent_id)
        request = _rpc.TxnRequest()
        for keys in ranges:
            read = request.success.add().request_range
            read.key, read.range_end = keys.start, keys.end
        answer = await self._ask(agent, "KV/Txn", request, _rpc.TxnResponse)
        for one in answer.responses:
            for kv in one.response_range.kvs:
                self._take(agent, kv.key, kv.value)
        for keys in ranges:
            self._watch(agent, keys, answer.header.revision + 1)

    async def _put_member(self, agent: Agent, committed_generation: int) -> None:
        member = pb.Member(
            protocol=PROTOCOL_VERSION,
            worker_id=agent.worker_id,
            agent_id=agent.agent_id,
            slot=0,
            store_address=agent.address,
            fingerprint={"parameters": "simulated"},
            committed_generation=committed_generation,
            nonce=agent.nonce,
        )
        await self._put_leased(agent, self.keys.member(agent.worker_id), member.SerializeToString())

    async def _put_leased(self, agent: Agent, key: str, value: bytes) -> None:
        """As leased_keys.py: a transaction, here without what it compares, which costs nothing."""
        request = _rpc.TxnRequest()
        put = request.success.add().request_put
        put.key, put.value, put.lease = encode_key(key), value, agent.lease_id
        async with self._writing:
            await self._ask(agent, "KV/Txn", request, _rpc.TxnResponse)

    async def _write_event(self, agent: Agent) -> None:
        event = job_history.node_joined(agent.agent_id, 1)
        request = _rpc.PutRequest(
            key=encode_key(self.keys.event(event.name)), value=event.encode(agent.agent_id, time.time())
        )
        await self._ask(agent, "KV/Put", request, _rpc.PutResponse)

    async def _renew(self, agent: Agent) -> None:
        while agent.alive:
            await asyncio.sleep(agent.ttl_s / 3 * self._random.uniform(0.8, 1.0))
            if agent.alive:
                request = _rpc.LeaseKeepAliveRequest(ID=agent.lease_id)
                self._renewing[agent.number % CONNECTIONS](request.SerializeToString())

    def _renewed(self, message: bytes) -> None:
        self.counts.requests += 1
        self.counts.renewals += 1

    # -- what happens in the job

    async def commit(self, number: int, agent_ids: Collection[str] | None = None) -> None:
        """Every worker says that it committed in that generation. agent_ids: only the workers of these agents."""
        members = [a for a in self.alive if agent_ids is None or a.agent_id in agent_ids]
        await asyncio.gather(*(self._put_member(a, number) for a in members))

    def lose(self, share: float) -> list[Agent]:
        """Some agents die without a word, none of those that the leader asks through; their keys stay."""
        candidates = [a for a in self.alive if a.number >= len(self._relays)]
        lost = self._random.sample(candidates, round(share * len(self.agents)))
        for agent in lost:
            agent.alive = False
            self._lost += 1
            self._hearers[agent.number_heard] -= 1
        return lost

    async def suspect(self, lost: list[Agent], generation: int) -> None:
        """Every survivor's collective has failed, and its transport names a peer."""
        await asyncio.gather(*(self._suspect(a, self._random.choice(lost), generation) for a in self.alive))

    async def _suspect(self, agent: Agent, peer: Agent, generation: int) -> None:
        suspicion = pb.Suspicion(
            worker_id=agent.worker_id,
            generation=generation,
            kind=pb.Suspicion.BROKEN,
            hosts=[peer.agent_id],
            detail="connection closed by peer",
            sequence=1,
        )
        await self._put_leased(agent, self.keys.suspicion(agent.worker_id), suspicion.SerializeToString())

    @property
    def alive(self) -> list[Agent]:
        return [a for a in self.agents if a.alive]

    # -- what they hear

    async def formed(self, after: int = 0) -> tuple[float, Generation]:
        """When the last living agent heard of a generation of all that live, and that generation; read by its keepers.

        On a slow machine the leader begins without the last agents. Its members commit, so that the next one adds the
        rest.
        """
        begun = after
        try:
            async with asyncio.timeout(DEADLINE_S * max(1.0, len(self.agents) / _AGENTS_OF_DEADLINE)):
                while True:
                    self._heard.clear()  # before the look, so that what is heard during a commit is looked at
                    record = self._known_to_all(after)
                    if record is not None and _agents_of(record) == {a.agent_id for a in self.alive}:
                        break
                    if record is not None and record.number > begun:
                        begun = record.number
                        await self.commit(begun, _agents_of(record))
                    await self._heard.wait()
        except TimeoutError:
            raise NotFormed(
                f"heard so far: {dict(self._hearers)} (agents by generation); {len(self.alive)} agents live"
            ) from None
        self._raise_what_failed()
        return max(a.heard_at_s for a in self.alive), record

    def _known_to_all(self, after: int) -> Generation | None:
        """The newest generation, if it is later than `after` and has reached all that live and its keepers."""
        newest = max(self._hearers, default=0)
        living = self.alive
        if newest <= after or self._hearers[newest] < len(living):
            return None
        keepers = [a for a in living if a.head is None or a.address in a.head.keepers]
        if any(a.record is None or a.record.number != newest for a in keepers):
            return None
        return keepers[0].record

    def _take(self, agent: Agent, key: bytes, value: bytes) -> None:
        if agent.scope is Scope.WHOLE and key.startswith(encode_key(self.keys.agents)):
            agent.seen_agents.add(key)
            self._look(agent)
        if key != encode_key(self.keys.generation):
            return
        before = agent.number_heard
        agent.head = head_of(value)
        agent.heard_at_s = time.monotonic()
        if agent.head is None:
            agent.record = Generation.decode(value)
            self._look_for_lost(agent.record)
        elif agent.address in agent.head.keepers:
            self._later(self._read_record(agent, agent.head))
        self._hearers.subtract((before,))
        self._hearers[agent.number_heard] += 1
        self._hearers += Counter()
        # not before: each look goes through all agents
        if self._hearers[agent.number_heard] >= len(self.agents) - self._lost:
            self._heard.set()

    def _look(self, agent: Agent) -> None:
        """A job that has become large is followed in part from then on."""
        now = ScopeSituation(False, False, False, len(agent.seen_agents), agent.scope)
        scope, _ = scope_of(now, self.limits)
        if scope is not agent.scope:
            agent.scope = scope
            self._later(self._refollow(agent))

    async def _refollow(self, agent: Agent) -> None:
        for stream in self._streams:
            stream.cancel(agent)
        await self._follow(agent)

    async def _read_record(self, agent: Agent, head: Head) -> None:
        folder = self.keys.record_folder(head.folder)
        request = _rpc.RangeRequest(key=encode_key(folder), range_end=end_of_prefix(folder))
        answer = await self._ask(agent, "KV/Range", request, _rpc.RangeResponse)
        self.counts.heard_bytes += sum(len(kv.value) for kv in answer.kvs)
        packed = joined([kv.value for kv in answer.kvs])
        value = None if packed is None else unpacked(head, packed)
        if value is None or agent.head is not head:
            return  # replaced meanwhile
        if self._decoded is None or self._decoded.number != head.number:
            # once: each node has a processor of its own for that
            self._decoded = Generation.decode(value)
        agent.record = self._decoded
        agent.heard_at_s = time.monotonic()
        self._look_for_lost(agent.record)
        self._heard.set()

    def _look_for_lost(self, record: Generation) -> None:
        """A generation that still lists a lost worker breaks again, when its communicator is built."""
        if record.number in self._looked_at:
            return
        self._looked_at.add(record.number)
        members = {m.agent_id for m in record.members}
        lost = [a for a in self.agents if not a.alive and a.agent_id in members]
        if lost:
            self._later(self.suspect(lost, record.number))

    # -- etcd

    async def _ask(self, agent: Agent, method: str, request: Message, answer: type[T]) -> T:
        self.counts.requests += 1
        connection = self._connections[agent.number % CONNECTIONS]
        return answer.FromString(await connection.ask(f"/etcdserverpb.{method}", request.SerializeToString()))

    def _watch(self, agent: Agent, keys: KeyRange, revision: int) -> None:
        if not self._streams or self._streams[-1].watches >= WATCHES_OF_A_STREAM:
            connection = self._connections[len(self._streams) % CONNECTIONS]
            self._streams.append(_WatchStream(connection, self._told))
        self._streams[-1].add(agent, keys, revision)

    def _told(self, agent: Agent, events: Iterable[etcd_pb2.Event]) -> None:
        for event in events:
            if agent.alive:
                self.counts.events += 1
                self.counts.heard_bytes += len(event.kv.key) + len(event.kv.value)
                self._take(agent, event.kv.key, event.kv.value)

    def _later(self, work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[object]) -> None:
        if task.cancelled() or task.exception() is None:
            self._background.discard(task)

    def _raise_what_failed(self) -> None:
        for task in (*self._background, *self._renewals):
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]


def _agents_of(record: Generation) -> set[str]:
    return {m.agent_id for m in record.members}


class _WatchStream:
    """Watches of several agents on one call."""

    def __init__(
        self, connection: EtcdConnection, told: Callable[[Agent, Iterable[etcd_pb2.Event]], None]
    ) -> None:
        self._told = told
        self._agents: list[Agent] = []  # by watch id, which etcd counts up from 0
        self._cancelled: set[int] = set()
        self._send = connection.stream("/etcdserverpb.Watch/Watch", self._take)

    @property
    def watches(self) -> int:
        return len(self._agents)

    def add(self, agent: Agent, keys: KeyRange, revision: int) -> None:
        self._agents.append(agent)
        create = etcd_pb2.WatchCreateRequest(key=keys.start, range_end=keys.end, start_revision=revision)
        self._send(etcd_pb2.WatchRequest(create_request=create).SerializeToString())

    def cancel(self, agent: Agent) -> None:
        for watch_id, one in enumerate(self._agents):
            if one is agent and watch_id not in self._cancelled:
                self._cancelled.add(watch_id)
                cancel = etcd_pb2.WatchCancelRequest(watch_id=watch_id)
                self._send(etcd_pb2.WatchRequest(cancel_request=cancel).SerializeToString())

    def _take(self, message: bytes) -> None:
        response = etcd_pb2.WatchResponse.FromString(message)
        if response.events and response.watch_id not in self._cancelled:
            self._told(self._agents[response.watch_id], response.events)
