"""A leader's picture of a two-worker job, built through the real path: key and value, StoreEvents, machine.

`Watcher.read` is what the agent's loop does with a changed key, without its IO: whatever the machine wants done is
turned into keys and values as FencedWrites does it, so that an id or a number that can't be written is found here.
"""

from __future__ import annotations

from functools import cache

from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.job_state.decode import StoreEvents
from bagua_agent.membership import actions as do
from bagua_agent.membership import events as ev
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.state_machine.machine import State, Transition, new_state, step_all
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import PROTOCOL_VERSION, Generation, GenerationKind, Placement

KEYS = JobKeys("job")
NONCE = "nonce"
AGENTS = ("a", "b")
POLICY = Policy()
BEGAN_S = 100.0
FIRST_REVISION = 30


def agent_value(agent_id: str) -> bytes:
    return pb.Agent(
        protocol=PROTOCOL_VERSION,
        agent_id=agent_id,
        node_name=f"host-{agent_id}",
        control_address="127.0.0.1:1",
        slots=1,
    ).SerializeToString()


def member_value(agent_id: str, committed_generation: int = 0) -> bytes:
    return pb.Member(
        protocol=PROTOCOL_VERSION,
        worker_id=f"{agent_id}.0.w",
        agent_id=agent_id,
        store_address="127.0.0.1:2",
        fingerprint={"model": "m"},
        committed_generation=committed_generation,
        nonce=NONCE,
    ).SerializeToString()


def generation_of(number: int) -> Generation:
    members = tuple(
        Placement(
            f"{agent_id}.0.w",
            agent_id,
            f"host-{agent_id}",
            0,
            place,
            place,
            0,
            "127.0.0.1:2",
            1,
            11 + place,
            number > 1,
        )
        for place, agent_id in enumerate(AGENTS)
    )
    return Generation(number, number - 1, GenerationKind.PLANNED, members, NONCE, "why", {"model": "m"})


def job_as_it_stands() -> list[tuple[str, bytes, int]]:
    """(key, value, create revision) of a job that has committed in generation 1."""
    return [
        (KEYS.spec, pb.JobSpec(protocol=PROTOCOL_VERSION, nonce=NONCE).SerializeToString(), 1),
        (KEYS.desired, pb.Desired(min_nodes=1, max_nodes=2).SerializeToString(), 1),
        (KEYS.leader, pb.Leader(agent_id="a", control_address="127.0.0.1:1").SerializeToString(), 2),
        *((KEYS.agent(a), agent_value(a), 3 + i) for i, a in enumerate(AGENTS)),
        *((KEYS.member(f"{a}.0.w"), member_value(a, 1), 11 + i) for i, a in enumerate(AGENTS)),
        (KEYS.generation, generation_of(1).encode(), 20),
    ]


@cache
def first_step() -> Transition:
    """The elected leader's. Taken once: a state is never changed, and thousands of examples begin with this one."""
    unreadable: list[str] = []
    events = StoreEvents(KEYS, lambda key, why: unreadable.append(key))
    read = [
        events.event_of(Change(key, value, FIRST_REVISION, revision), BEGAN_S)
        for key, value, revision in job_as_it_stands()
    ]
    assert not unreadable
    seen = [event for event in read if event is not None]
    elected = ev.LeadershipWon(now_s=BEGAN_S, revision=2)
    return step_all(new_state("a", NONCE), [*seen, elected], POLICY)


class Watcher:
    """The leading agent's mind."""

    def __init__(self) -> None:
        self.unreadable: list[tuple[str, str]] = []
        self.now_s = BEGAN_S
        self._events = StoreEvents(KEYS, lambda key, why: self.unreadable.append((key, why)))
        self._revision = FIRST_REVISION
        first = first_step()
        self.state: State = first.state
        self.performed: list[do.Action] = list(first.actions)
        assert not self.writes, "the job as it stands asks for nothing"

    @property
    def writes(self) -> list[do.Action]:
        """What would have changed the job."""
        return [a for a in self.performed if not isinstance(a, do.WakeAt | do.ProbeAgents)]

    def read(self, key: str, value: bytes | None) -> ev.Event | None:
        """As the agent's loop does when a key changed."""
        self._revision += 1
        event = self._event(key, value, self._revision)
        if event is not None:
            self._take(event)
        return event

    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds
        self._take(ev.TimePassed(now_s=self.now_s))

    def _event(self, key: str, value: bytes | None, create_revision: int) -> ev.Event | None:
        return self._events.event_of(Change(key, value, self._revision, create_revision), self.now_s)

    def _take(self, *happened: ev.Event) -> None:
        step = step_all(self.state, happened, POLICY)
        self.state = step.state
        for action in step.actions:
            self._perform(action)

    def _perform(self, action: do.Action) -> None:
        self.performed.append(action)
        match action:
            case do.WriteGeneration():
                action.generation.encode()
            case do.WriteResult():
                pb.Result(outcome=action.outcome.value, exit_code=action.exit_code, reason=action.reason)
                if action.failure is not None:
                    KEYS.failure(action.failure.worker_id)
            case do.RefuseMember():
                KEYS.refused(action.worker_id)
            case do.RemoveDeadAgent():
                KEYS.agent(action.agent_id)
                for member in self.state.view.members.values():
                    if member.agent_id == action.agent_id:
                        KEYS.member(member.worker_id)
                        KEYS.suspicion(member.worker_id)
