"""One leader and its store, driven by a text: each line an event, below it what the leader does and why.

    1.5 ready b0 committed=1        at 1.5 s the key of worker b0 (agent b, slot 0) was put
      -> write 2 PLANNED base 1: a0* b0     the leader's action (* holds the state)
      because adds host-b

Lines: desired MIN MAX | sizes N,N [start=N] [cooldown=S] | replicas K (of K workers each) | assembled (all writes
of replicas so far succeeded) | mode live|restart (a job is live unless that is said) |
agent A [slots=N] [leaving] [startable] [runs=STATE:GENERATION] (all but leaving is kept when it is put again; the last
two are restart mode's, in which b.0.g2 is the worker of agent b in slot 0 of generation 2) |
agent-gone A | ready A0 [committed=N] [stage=assembling|waiting|preparing] | gone A0 |
stored (the write under way succeeded) | refused | broken A0 GENERATION [hosts] | went-on A0 |
stalled A0 GENERATION [hosts] [waited=S] [usual=S] | ordered (the hang order asked for stands) |
unbuilt A0 GENERATION (it can't be built there) | answers A alive|refused|unanswered [relayed] |
failed A0 [step=N] [signal] [early: before it was a member] [generation=N: of restart mode] |
departed A0 GENERATION WORLD_SIZE [step=N] [wrote=PART/PARTS] (its node left) | finished A0 |
closing GENERATION | time |
checkpoints (the job has some) | elected | elected-fresh [AGENT] (it knows only what is in the store; without a name its
own key is not there) | deposed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bagua_agent.base.sizes import SizePolicy
from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import (
    Action,
    ProbeAgents,
    RefuseMember,
    RemoveDeadAgent,
    WakeAt,
    WriteGeneration,
    WriteHangOrder,
    WriteReplicas,
    WriteResult,
)
from bagua_agent.membership.hang import HangOrder
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.state_machine.machine import Transition, new_state, step, step_all
from bagua_agent.membership.state_machine.restarting import worker_id_of
from bagua_agent.membership.view import (
    AgentView,
    DepartureView,
    FailureView,
    MemberView,
    ProbeVerdict,
    Run,
    SuspicionView,
)
from bagua_contract.records import Generation, Stage, StateName, SuspicionKind


class ScenarioJob:
    def __init__(self) -> None:
        self.policy = Policy(max_restarts=2)
        self.state = new_state("a")
        self.keys: dict[str, tuple[type[ev.Event], dict[str, Any]]] = {}
        self.revision = 0
        self.writing: Generation | None = None
        self.ordering: HangOrder | None = None
        self.replicas: list[WriteReplicas] = []
        self.sequence = 0
        self.reason = ""

    def run(self, line: str) -> list[str]:
        """The output lines that follow `line`."""
        at, command, *words = line.split()
        options = dict(w.split("=") for w in words if "=" in w)
        plain = [w for w in words if "=" not in w]
        self.revision += 1
        outcome = self._step(float(at), command, plain, options)
        self.state = outcome.state
        lines = [f"  -> {self._told(a)}" for a in outcome.actions if not isinstance(a, WakeAt)]
        if outcome.reason != self.reason:
            lines.append(f"  because {outcome.reason}")
        self.reason = outcome.reason
        return lines

    def _step(self, now_s: float, command: str, words: list[str], options: dict[str, str]) -> Transition:
        if command == "checkpoints":
            view = replace(self.state.view, has_checkpoints=True)
            self.state = replace(self.state, view=view)
            return step(self.state, ev.TimePassed(now_s=now_s), self.policy)
        if command == "assembled":
            assert self.replicas, "no write of replicas is under way"
            happened: list[ev.Event] = []
            for write in self.replicas:
                happened += [
                    self._put(
                        now_s, f"replicas/{r.replica_id}", ev.ReplicaSeen, replica=r, order=self.revision
                    )
                    for r in write.replicas
                ]
                happened += [
                    self._delete(now_s, f"replicas/{i}", ev.ReplicaGone, replica_id=i)
                    for i in write.forgotten
                ]
            self.replicas.clear()
            return step_all(self.state, happened, self.policy)
        if command == "elected-fresh":
            fresh = new_state(words[0] if words else "z", has_checkpoints=self.state.view.has_checkpoints)
            picture = [kind(now_s=now_s, **values) for kind, values in self.keys.values()]
            won = ev.LeadershipWon(now_s=now_s, revision=self.revision)
            return step_all(fresh, (*picture, won), self.policy)
        return step(self.state, self._event(now_s, command, words, options), self.policy)

    def _event(self, now_s: float, command: str, words: list[str], options: dict[str, str]) -> ev.Event:
        match command, words:
            case "desired", [least, most]:
                return self._put(
                    now_s, "desired", ev.DesiredChanged, min_nodes=int(least), max_nodes=int(most)
                )
            case "mode", [("live" | "restart") as mode]:
                return self._put(now_s, "spec", ev.ModeSeen, restarts=mode == "restart")
            case "replicas", [size]:
                return self._put(now_s, "spec", ev.ModeSeen, restarts=False, replica_size=int(size))
            case "sizes", [text]:
                policy = SizePolicy(
                    tuple(map(int, text.split(","))),
                    int(options.get("start", 0)),
                    float(options.get("cooldown", 0)),
                )
                return self._put(
                    now_s,
                    "spec",
                    ev.ModeSeen,
                    restarts=self.state.view.restarts,
                    size_policy=policy,
                    replica_size=self.state.view.replica_size,
                )
            case "agent", [name, *flags]:
                return self._agent(now_s, name, flags, options)
            case "agent-gone", [name]:
                return self._delete(now_s, f"agents/{name}", ev.AgentGone, agent_id=name)
            case "ready", [name]:
                stage = Stage[options.get("stage", "loop").upper()]
                return self._ready(now_s, name, int(options.get("committed", 0)), stage)
            case "gone", [name]:
                return self._delete(now_s, f"members/{name}", ev.MemberGone, worker_id=name)
            case "stored", []:
                assert self.writing is not None, "no write is under way"
                return self._put(now_s, "generation", ev.GenerationSeen, generation=self.writing)
            case "refused", []:
                assert self.writing is not None, "no write is under way"
                return ev.GenerationWriteRefused(
                    now_s=now_s, number=self.writing.number, why="we lead no longer"
                )
            case "broken" | "stalled" | "unbuilt", [name, generation, *hosts]:
                return self._put(
                    now_s,
                    f"suspicions/{name}",
                    ev.SuspicionRaised,
                    suspicion=SuspicionView(
                        worker_id=name,
                        generation=int(generation),
                        kind=SuspicionKind[command.upper()],
                        hosts=tuple(hosts),
                        sequence=self.revision,
                        waited_s=float(options.get("waited", 0.0)),
                        usual_step_s=float(options.get("usual", 0.0)),
                    ),
                )
            case "went-on", [name]:
                return self._delete(now_s, f"suspicions/{name}", ev.SuspicionCleared, worker_id=name)
            case "ordered", []:
                return self._put(now_s, "hang", ev.HangOrderSeen, order=self.ordering)
            case "answers", [name, verdict, *how]:
                return ev.ProbeAnswered(
                    now_s=now_s,
                    agent_id=name,
                    sequence=self.sequence,
                    verdict=ProbeVerdict[verdict.upper()],
                    relayed="relayed" in how,
                )
            case "failed", [name, *how]:
                signal = "signal" in how
                generation = int(options.get("generation", 0))
                worker_id = worker_id_of(name[0], int(name[1]), generation) if generation else name
                return self._put(
                    now_s,
                    f"failures/{worker_id}",
                    ev.FailureRecorded,
                    failure=FailureView(
                        worker_id=worker_id,
                        node_name=f"host-{name[0]}",
                        step=int(options.get("step", 0)),
                        in_step=not signal and "early" not in how and not generation,
                        was_member="early" not in how,
                        script_failure=not signal,
                        summary="killed by SIGKILL" if signal else "ValueError: bad sample",
                        order=self.revision,
                        generation=generation,
                    ),
                )
            case "departed", [name, generation, world_size]:
                part, _, parts = options.get("wrote", "0/0").partition("/")
                state = StateName(int(generation), int(options.get("step", 0)))
                departure = DepartureView(
                    worker_id=name,
                    node_name=f"host-{name[0]}",
                    generation=int(generation),
                    world_size=int(world_size),
                    state=state if state.step else StateName(),
                    part=int(part),
                    parts=int(parts),
                    written=int(parts) > 0,
                )
                return self._put(now_s, f"departed/{name}", ev.WorkerDeparted, departure=departure)
            case "finished", [name]:
                return self._put(
                    now_s, f"finished/{name}", ev.WorkerFinished, worker_id=name, agent_id=name[0]
                )
            case "closing", [generation]:
                return self._put(now_s, "closing", ev.ClosingSeen, generation=int(generation))
            case "time", []:
                return ev.TimePassed(now_s=now_s)
            case "elected", []:
                return ev.LeadershipWon(now_s=now_s, revision=self.revision)
            case "deposed", []:
                return ev.LeadershipLost(now_s=now_s)
            case _:
                raise ValueError(f"not a scenario line: {command} {' '.join(words)}")

    def _agent(self, now_s: float, name: str, flags: list[str], options: dict[str, str]) -> ev.Event:
        key = f"agents/{name}"
        known: AgentView | None = self.keys[key][1]["agent"] if key in self.keys else None
        run, run_generation = (known.run, known.run_generation) if known else (Run.NONE, 0)
        if "runs" in options:
            state, _, number = options["runs"].partition(":")
            run, run_generation = Run[state], int(number)
        return self._put(
            now_s,
            key,
            ev.AgentSeen,
            agent=AgentView(
                agent_id=name,
                node_name=f"host-{name}",
                slots=int(options.get("slots", known.slots if known else 1)),
                topology="",
                leaving="leaving" in flags,
                control_address=f"host-{name}:1",
                join_revision=known.join_revision if known else self.revision,
                ready="startable" in flags or (known is not None and known.ready),
                run_generation=run_generation,
                run=run,
            ),
        )

    def _ready(self, now_s: float, name: str, committed: int, stage: Stage) -> ev.Event:
        key = f"members/{name}"
        known: MemberView | None = self.keys[key][1]["member"] if key in self.keys else None
        return self._put(
            now_s,
            key,
            ev.MemberReady,
            member=MemberView(
                worker_id=name,
                agent_id=name[0],
                slot=int(name[1]),
                store_address=f"host-{name[0]}:2",
                fingerprint={"model": "m"},
                committed_generation=committed,
                join_revision=known.join_revision if known else self.revision,
                stage=stage,
            ),
        )

    def _put(self, now_s: float, key: str, kind: type[ev.Event], /, **values: Any) -> ev.Event:
        self.keys[key] = (kind, values)
        return kind(now_s=now_s, **values)

    def _delete(self, now_s: float, key: str, kind: type[ev.Event], /, **values: Any) -> ev.Event:
        self.keys.pop(key, None)
        return kind(now_s=now_s, **values)

    def _told(self, action: Action) -> str:
        match action:
            case WriteGeneration(g):
                self.writing = g
                members = " ".join(m.worker_id + ("*" if m.holder else "") for m in g.members)
                return f"write {g.number} {g.kind.name} base {g.base}: {members or 'no workers'}"
            case ProbeAgents(questions, sequence):
                self.sequence = sequence
                asked = (
                    q.agent_id + (f" (also through {q.relay_agent_id})" if q.relay_agent_id else "")
                    for q in questions
                )
                return f"ask {', '.join(asked)}"
            case WriteResult(outcome, code):
                return f"result {outcome.name} {code}"
            case RefuseMember(worker_id, difference):
                return f"refuse {worker_id}: {difference}"
            case WriteHangOrder(order):
                self.ordering = order
                if order is None:
                    return "no hang order any more"
                return (
                    f"order {order.outcome.name} in generation {order.generation}: {' '.join(order.workers)}"
                )
            case WriteReplicas(replicas, forgotten):
                self.replicas.append(action)
                told = [
                    f"{'+'.join(r.worker_ids)}" + (f" is over: {r.over}" if r.over else "") for r in replicas
                ]
                told += [f"{i} forgotten" for i in forgotten]
                return f"replicas: {'; '.join(told)}"
            case RemoveDeadAgent(agent_id):
                return f"remove the keys of {agent_id}"
            case _:
                raise AssertionError(action)
