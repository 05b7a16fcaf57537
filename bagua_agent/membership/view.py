"""The picture that the leader decides on: the store's content, and the answers to its probes.

Owns only the shape of that picture. Contains no etcd, no clock and no rule. All times are of the clock of the agent
that holds the picture; order between agents comes from revisions alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum

from bagua_agent.base.sizes import ANY_SIZE, AllowedSizes, SizePolicy
from bagua_agent.membership.hang import HangOrder
from bagua_contract import control_pb2
from bagua_contract import membership_pb2 as pb
from bagua_contract.collective_wait import CollectiveWait
from bagua_contract.records import Generation, Stage, StateName, SuspicionKind
from bagua_contract.replica import Replica
from bagua_contract.step_settings import AS_SCRIPTED, StepSettings


class Run(Enum):
    """The state of a node's workers of a RESTART generation."""

    NONE = pb.Agent.NONE
    RUNNING = pb.Agent.RUNNING
    ENDING = pb.Agent.ENDING
    FINISHED = pb.Agent.FINISHED
    FAILED = pb.Agent.FAILED


@dataclass(frozen=True, slots=True)
class AgentView:
    """The content of the key agents/<agent>. join_revision: create revision of the key, so the order in which nodes
    came. cut_off: agents whose hosts do not answer this one, of those that held parts of its replicas.

    The rest is for restart mode. ready: workers can be started at once. run: what it does for run_generation.
    ready_since_s, run_since_s: when this agent first saw that.
    """

    agent_id: str
    node_name: str
    slots: int
    topology: str
    leaving: bool
    control_address: str
    join_revision: int
    ready: bool = False
    ready_since_s: float = 0.0
    run_generation: int = 0
    run: Run = Run.NONE
    run_since_s: float = 0.0
    cut_off: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MemberView:
    """The content of the key members/<worker>. ready_since_s: when this agent first saw the key, or this stage of it.
    replica: its replica's workers in the order of their shards, once job_condition.py knows it; none in a job without
    replicas."""

    worker_id: str
    agent_id: str
    slot: int
    store_address: str
    fingerprint: Mapping[str, str]
    committed_generation: int
    join_revision: int
    ready_since_s: float = 0.0
    stage: Stage = Stage.LOOP
    replica: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """The content of the key replicas/<replica>. order: create revision of the key."""

    replica: Replica
    order: int


@dataclass(frozen=True, slots=True)
class SuspicionView:
    """The content of the key suspicions/<worker>.

    seen_since_s: when this agent first saw this sequence. broken_since_s: when it first saw that this generation is
    broken there, however often that is reported. waited_s: as reported. waiting_since_s: of a stall, since when the
    worker waits, by this agent's clock. usual_step_s: 0 is unknown. waits_in: what it waits in; None where that can't
    be compared with others.
    """

    worker_id: str
    generation: int
    kind: SuspicionKind
    hosts: tuple[str, ...]
    sequence: int
    seen_since_s: float = float("-inf")
    detail: str = ""
    broken_since_s: float = float("-inf")
    waited_s: float = 0.0
    waiting_since_s: float = float("-inf")
    usual_step_s: float = 0.0
    waits_in: CollectiveWait | None = None

    @property
    def broken(self) -> bool:
        """Whether the worker's communicator can't be used again."""
        return self.kind is SuspicionKind.BROKEN


@dataclass(frozen=True, slots=True)
class FailureView:
    """The content of the key failures/<worker>. order: create revision of the key; the least is the first of the job.

    was_member: it was in a generation, or this is unknown. generation: the one it was started for in restart mode, else
    0. global_rank: -1 if it had none. seen_since_s: when this agent first saw the key. kills_in_a_row: workers of its
    slot that a signal ended without progress, this one included; 0: no signal did. joining: it had no share of the
    step's batch, as it had committed none since it joined.
    """

    worker_id: str
    node_name: str
    step: int
    in_step: bool
    script_failure: bool
    summary: str
    order: int
    was_member: bool = True
    generation: int = 0
    exit_code: int = 0
    global_rank: int = -1
    log_path: str = ""
    traceback_tail: str = ""
    seen_since_s: float = float("-inf")
    kills_in_a_row: int = 0
    slot: int = 0
    joining: bool = False

    @staticmethod
    def of(failure: pb.Failure, order: int) -> FailureView:
        """Converts the message of a failure. order: create revision of its key."""
        return FailureView(
            worker_id=failure.worker_id,
            node_name=failure.node_name,
            step=failure.step,
            in_step=failure.in_step,
            script_failure=failure.script_failure,
            summary=failure.cause,
            order=order,
            was_member=failure.in_step or failure.global_rank >= 0,
            generation=failure.generation,
            exit_code=failure.exit_code,
            global_rank=failure.global_rank,
            log_path=failure.log_path,
            traceback_tail=failure.traceback_tail,
            kills_in_a_row=failure.kills_in_a_row,
            slot=failure.slot,
            joining=failure.joining,
        )


@dataclass(frozen=True, slots=True)
class EndedBeforeJoining:
    """A worker that ended with 0 before it asked to join. seen_since_s: by this agent's clock."""

    agent_id: str
    node_name: str
    seen_since_s: float


@dataclass(frozen=True, slots=True)
class DepartureView:
    """The content of the key departed/<worker>: its agent saw it end after its node was asked to leave.

    generation: the newest that listed it, 0 if none did; world_size: of that generation. state: what it held when it
    stepped aside; none if it reported nothing. part, parts: of the last checkpoint; parts 0: none is its own. replica:
    whose parts make that one whole, if replicas' states differ. problem: why its part is not written. holds_nothing: it
    reported that it had no state of the job.
    """

    worker_id: str
    node_name: str
    generation: int
    world_size: int
    state: StateName = field(default_factory=StateName)
    part: int = 0
    parts: int = 0
    written: bool = False
    problem: str = ""
    holds_nothing: bool = False
    replica: str = ""


@dataclass(frozen=True, slots=True)
class Attempts:
    """Counts the generations that did not work. count: generations in a row that replaced one that did not work though
    all lived, and in which no worker is known to have committed. newest_since_s: when this agent first saw the newest
    record."""

    count: int = 0
    newest_since_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Desired:
    """The numbers of nodes that the job wants, from the least to the most."""

    min_nodes: int
    max_nodes: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"nodes must be 1 <= least <= most, not {self.min_nodes}:{self.max_nodes}")


@dataclass(frozen=True, slots=True)
class JobView:
    """One job as its keys describe it.

    nonce: the job's, from its spec. earlier: records older than `generation` that this agent saw and that may
    still be in force, or that list the holders which an empty record no longer lists; empty at an agent that
    came later.
    committed_generation: the newest that any member, still there or not, reported a commit in.
    closing_generation: the generation that confirmed the end; None while training goes on.
    finished: workers that ended with 0. finished_steps: the steps they had committed by their last report.
    finished_agents: the agents of those workers.
    finished_restarted: workers of restart mode that ended with 0 in their generations; they are in no other field.
    ended_before_joining: those of them that never asked to join; they get no successors.
    departures: workers that ended because their nodes left. refused: workers that may not join.
    restarts: workers follow a new generation by being started again (restarting.py), else in process (decision.py).
    replaced_number: of the newest record of restart mode, in a job that has become live.
    size_policy: the job's, from its spec. resized_since_s: when this agent first saw the newest record whose number of
    nodes differs from the one before it.
    hang_order: the leader's current order about a hang, since hang_order_since_s. went_on: workers whose last wait in
    this generation was reported and ended, with the time. replacements: workers that were to be replaced since the last
    generation that worked.
    gone: agents of the newest record whose keys went, as they stood last; before the first record, agents with a worker
    that ended with 0. Empty at an agent that came later.
    replica_size: workers that hold one copy of the model together, from the spec. replicas: their records, by id.
    pinned_settings: of steps, as people fixed them. tuned_settings: as the tuner wants them, where people fixed none.
    forgets: see SettingsPinned.
    has_checkpoints: if no worker holds the state any more, the job can begin again from its newest checkpoint.
    """

    nonce: str = ""
    generation: Generation | None = None
    earlier: tuple[Generation, ...] = ()
    committed_generation: int = 0
    agents: Mapping[str, AgentView] = field(default_factory=dict)
    members: Mapping[str, MemberView] = field(default_factory=dict)
    suspicions: Mapping[str, SuspicionView] = field(default_factory=dict)
    failures: Mapping[str, FailureView] = field(default_factory=dict)
    desired: Desired | None = None
    closing_generation: int | None = None
    finished: Set[str] = frozenset()
    departures: Mapping[str, DepartureView] = field(default_factory=dict)
    finished_steps: Mapping[str, int] = field(default_factory=dict)
    finished_agents: Mapping[str, str] = field(default_factory=dict)
    finished_restarted: Set[str] = frozenset()
    ended_before_joining: Mapping[str, EndedBeforeJoining] = field(default_factory=dict)
    refused: Set[str] = frozenset()
    attempts: Attempts = Attempts()
    hang_order: HangOrder | None = None
    hang_order_since_s: float = float("-inf")
    went_on: Mapping[str, float] = field(default_factory=dict)
    replacements: int = 0
    gone: Mapping[str, AgentView] = field(default_factory=dict)
    has_checkpoints: bool = False
    restarts: bool = False
    replaced_number: int = 0
    size_policy: SizePolicy = ANY_SIZE
    resized_since_s: float = float("-inf")
    replica_size: int = 1
    replicas: Mapping[str, ReplicaView] = field(default_factory=dict)
    pinned_settings: StepSettings = AS_SCRIPTED
    tuned_settings: StepSettings = AS_SCRIPTED
    forgets: int = 0

    @property
    def settings(self) -> StepSettings:
        """The settings of steps that the next generation has."""
        return self.pinned_settings.over(self.tuned_settings)

    @property
    def wanted(self) -> Desired | None:
        """The desired numbers of nodes, their ends moved inwards to allowed sizes; None if `desired` is."""
        if self.desired is None:
            return None
        return Desired(*self.size_policy.bounds(self.desired.min_nodes, self.desired.max_nodes))

    def room(self, desired: Desired) -> AllowedSizes:
        """Returns the sizes that the next generation may have."""
        return self.size_policy.room(desired.min_nodes, desired.max_nodes)

    @property
    def cooldown_until_s(self) -> float:
        """The time until which no voluntary change of the number of nodes is made."""
        return self.resized_since_s + self.size_policy.cooldown_s

    @property
    def closing(self) -> bool:
        return self.closing_generation is not None

    @property
    def generation_number(self) -> int:
        """The number of the record in the store; 0: there is none."""
        return self.replaced_number if self.generation is None else self.generation.number

    @property
    def has_trained(self) -> bool:
        """Whether a step is known to have been committed."""
        return self.committed_generation > 0 or (self.generation is not None and self.generation.base > 0)

    def known_agent(self, agent_id: str) -> AgentView:
        """Returns the agent of that id, whether it is there or gone."""
        return self.agents[agent_id] if agent_id in self.agents else self.gone[agent_id]

    def record(self, number: int) -> Generation | None:
        """Returns the record of that number, if this agent still has it, else None."""
        if self.generation is not None and self.generation.number == number:
            return self.generation
        return next((g for g in self.earlier if g.number == number), None)


class ProbeVerdict(Enum):
    """The answer of an agent to a probe."""

    ALIVE = control_pb2.ProbeReply.ALIVE
    REFUSED = control_pb2.ProbeReply.REFUSED
    UNANSWERED = control_pb2.ProbeReply.UNANSWERED


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe under way. relay_agent_id: the agent that probes on the leader's behalf; empty for none."""

    agent_id: str
    join_revision: int
    sequence: int
    asked_at_s: float
    relay_agent_id: str
    direct: ProbeVerdict | None = None
    relayed: ProbeVerdict | None = None


@dataclass(frozen=True, slots=True)
class DeadAgent:
    """A confirmed death. It counts for the key of that join_revision only: put anew, the agent lives."""

    agent_id: str
    join_revision: int
    at_s: float
    how: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A node that the job excludes for a while. times: how often in a row it was left out."""

    until_s: float
    times: int
    why: str


class Waiting(Enum):
    """Waits that may end the job when they last too long."""

    MINIMUM = "too few nodes"
    HOLDER = "no worker holds the state"
    ENDING = "a worker has yet to end"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Holds what this leader knows in addition to the store; the next leader starts without it.

    alive_agents: agent to the time at which the question it answered was asked. dead_workers: their agent lives and
    reported their end, while it could not write it to the store. quarantines: nodes that this leader left out, by
    agent. doubted_agents: restart mode: agent to the time since which it should be probed.
    """

    observer_agent_id: str
    elected_at_s: float = float("-inf")
    dead_agents: Mapping[str, DeadAgent] = field(default_factory=dict)
    alive_agents: Mapping[str, float] = field(default_factory=dict)
    dead_workers: frozenset[str] = frozenset()
    probes: Mapping[str, Probe] = field(default_factory=dict)
    quarantines: Mapping[str, Quarantine] = field(default_factory=dict)
    doubted_agents: Mapping[str, float] = field(default_factory=dict)
    waiting: Waiting | None = None
    waiting_since_s: float = 0.0

    def sees_itself(self, view: JobView) -> bool:
        """Tells whether the leader's own agent is in the picture. It is not while it puts its key again, after its
        lease ended; until then what all agents in the picture do or lack says nothing of the job."""
        return self.observer_agent_id in view.agents

    def is_dead(self, agent: AgentView) -> bool:
        dead = self.dead_agents.get(agent.agent_id)
        return dead is not None and dead.join_revision == agent.join_revision

    def is_quarantined(self, agent_id: str, now_s: float) -> bool:
        return agent_id in self.quarantines and now_s < self.quarantines[agent_id].until_s

    def waited_since_s(self, waiting: Waiting, now_s: float) -> float:
        return self.waiting_since_s if self.waiting is waiting else now_s
