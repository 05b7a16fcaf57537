"""Thousands of invented histories: whatever joins, leaves, dies or is cut off, the invariants hold and, once
the trouble is over, the job goes on."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_job import POLICY, SimulatedJob
from simulated_workers import Node, Worker

from bagua_agent.base.sizes import SizePolicy
from bagua_agent.membership import events as ev
from bagua_agent.membership.actions import ResultOutcome
from bagua_agent.membership.formation.decision import decide
from bagua_contract.records import Generation

MOST_NODES = 5


def brief(record: Generation) -> str:
    members = ", ".join(
        f"{m.worker_id}@{m.agent_id} since {m.since_generation}{' holder' if m.holder else ''}"
        for m in record.members
    )
    return f"{record.number} {record.kind.name} base {record.base} [{members}] {record.reason}"


class Histories(RuleBasedStateMachine):
    @initialize(
        least=st.integers(1, 2),
        extra=st.integers(0, 3),
        slots=st.lists(st.integers(1, 2), min_size=2, max_size=3),
        running=st.sampled_from([True, True, True, False]),
        asks=st.booleans(),
        has_checkpoints=st.booleans(),
        sizes=st.sampled_from([(), (), (1, 2, 4), (1, 3), (2, 4)]),
        cooldown_s=st.sampled_from([0.0, 0.0, 2.0, 20.0]),
    )
    def start(
        self,
        least: int,
        extra: int,
        slots: list[int],
        running: bool,
        asks: bool,
        has_checkpoints: bool,
        sizes: tuple[int, ...],
        cooldown_s: float,
    ) -> None:
        policy = SizePolicy(sizes, cooldown_s=cooldown_s)
        most = sizes[-1] if sizes else least + extra
        least = sizes[0] if sizes else least
        self.job = SimulatedJob(least, most, asks=asks, has_checkpoints=has_checkpoints, sizes=policy)
        for count in slots:
            self.job.add_node(count)
        self.job.elect(self.job.nodes["a0"], fresh=False)
        for _ in range(8 if running else 0):
            self.job.settle()

    def node(self, data: st.DataObject) -> Node:
        return self.job.nodes[data.draw(st.sampled_from(sorted(self.job.nodes)))]

    def worker(self, data: st.DataObject) -> Worker | None:
        alive = [w.worker_id for w in self.job.workers.values() if w.alive]
        return self.job.workers[data.draw(st.sampled_from(alive))] if alive else None

    # -- what the job does
    @rule(looks=st.booleans(), commits=st.integers(0, 2), reports=st.booleans(), asks=st.booleans())
    def some_work(self, looks: bool, commits: int, reports: bool, asks: bool) -> None:
        """Most of the time most things work; what does not happen now is what makes a history."""
        job = self.job
        job.now_s += 0.5
        for node in list(job.nodes.values()):
            job.spawn(node)
            job.deliver(node)
        for worker in list(job.workers.values()):
            if looks:
                job.look(worker)
        for _ in range(commits):
            self.commit()
        for worker in list(job.workers.values()):
            if reports:
                job.report(worker)
            job.report_unbuilt(worker)
            job.suspect(worker, broken=True)
        for node in list(job.nodes.values()):
            job.deliver(node)
        while asks and job.probes:
            job.answer(0)

    @rule(data=st.data())
    def spawn(self, data: st.DataObject) -> None:
        self.job.spawn(self.node(data))

    @rule(data=st.data(), most=st.integers(1, 6))
    def deliver(self, data: st.DataObject, most: int) -> None:
        self.job.deliver(self.node(data), most)

    @rule()
    def deliver_all(self) -> None:
        for node in list(self.job.nodes.values()):
            self.job.deliver(node)

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        if worker := self.worker(data):
            self.job.look(worker)

    @rule()
    def everybody_looks_and_commits(self) -> None:
        for worker in list(self.job.workers.values()):
            self.job.look(worker)
        for record in list(self.job.records.values()):
            self.job.commit(record)

    @rule()
    def commit(self) -> None:
        for record in list(self.job.records.values()):
            self.job.commit(record)

    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        if worker := self.worker(data):
            self.job.report(worker)

    @rule(data=st.data(), broken=st.booleans())
    def suspect(self, data: st.DataObject, broken: bool) -> None:
        if worker := self.worker(data):
            self.job.suspect(worker, broken=broken)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.job.probes:
            self.job.answer(data.draw(st.integers(0, len(self.job.probes) - 1)))

    @rule(passed_s=st.sampled_from([0.1, 0.3, 1.0, 2.0]))
    def time_passes(self, passed_s: float) -> None:
        self.job.now_s += passed_s
        for node in list(self.job.nodes.values()):
            if node.alive:
                self.job.feed(node, ev.TimePassed(now_s=self.job.now_s))

    # -- what happens to it
    @precondition(lambda self: len(self.job.nodes) < MOST_NODES)
    @rule(slots=st.integers(1, 2))
    def join(self, slots: int) -> None:
        self.job.add_node(slots)

    @rule(data=st.data())
    def kill_worker(self, data: st.DataObject) -> None:
        if worker := self.worker(data):
            self.job.end(worker, well=False)

    @precondition(lambda self: sum(n.alive for n in self.job.nodes.values()) > 1)
    @rule(data=st.data())
    def kill_node(self, data: st.DataObject) -> None:
        self.job.kill_node(self.node(data))

    @rule(data=st.data(), silent=st.booleans(), storeless=st.booleans())
    def cut(self, data: st.DataObject, silent: bool, storeless: bool) -> None:
        node = self.node(data)
        node.silent, node.storeless = silent, storeless
        self.job.put_again(node)

    @rule(data=st.data(), mended=st.booleans())
    def cut_data_path(self, data: st.DataObject, mended: bool) -> None:
        """Between two nodes' workers, one way; their agents still answer and reach the store."""
        pair = (self.node(data).agent_id, self.node(data).agent_id)
        if mended:
            self.job.cuts.clear()
        elif pair[0] != pair[1]:
            self.job.cuts.add(pair)

    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        node = self.node(data)
        self.job.expire(node)
        self.job.put_again(node)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        node = self.node(data)
        if node.reaches_store and node.revision:
            node.leaving = True
            self.job.put_node(node)

    @rule(least=st.integers(1, 3), extra=st.integers(0, 2))
    def scale(self, least: int, extra: int) -> None:
        sizes = self.job.sizes
        if sizes:
            first = min(least, len(sizes)) - 1
            self.job.scale(sizes[first], sizes[min(first + extra, len(sizes) - 1)])
        else:
            self.job.scale(least, least + extra)

    @rule(data=st.data(), fresh=st.booleans())
    def leader_changes(self, data: st.DataObject, fresh: bool) -> None:
        node = self.node(data)
        if node.reaches_store:
            # the earlier leader may not know yet, and acts on
            self.job.leader = None
            self.job.elect(node, fresh=fresh)

    @invariant()
    def success_needs_an_end(self) -> None:
        result = self.job.result
        assert result is None or result.outcome is not ResultOutcome.SUCCEEDED

    def teardown(self) -> None:
        """The trouble is over: the job must go on, or have a reason not to."""
        if not hasattr(self, "job"):
            return
        job = self.job
        for node in job.nodes.values():
            node.silent = node.storeless = False
        job.cuts.clear()
        for _ in range(40):
            self.job.settle()
        job.now_s += POLICY.quarantine_longest_s  # a node that was left out may come back
        for _ in range(40):
            self.job.settle()
        enough = [n for n in job.nodes.values() if n.alive and not n.leaving]
        if job.result is not None:
            self.check_result(enough)
            return
        if len(enough) < job.min_nodes:
            return
        before = job.committed
        self.job.settle()
        if job.committed == before:
            # no holder is left: the leader waits for one, and says so
            assert not self.holder_lives(), self.story()
            return
        record = job.generation
        assert record is not None
        size = min(len(enough), job.max_nodes)
        assert record.node_count == max((s for s in job.sizes if s <= size), default=size), self.story()
        assert {m.agent_id for m in record.members} <= {n.agent_id for n in enough}

    def check_result(self, enough: list[Node]) -> None:
        result = self.job.result
        assert result is not None
        if result.outcome is ResultOutcome.STOPPED:
            assert not self.job.holders(), f"L1: stopped beside {self.job.holders()}\n{self.story()}"
        else:
            assert not self.holder_lives(), self.story()

    def holder_lives(self) -> bool:
        job = self.job
        if job.fresh_leader_under_empty:
            return False  # it may miss a holder; see job_condition.py
        return bool(job.holders())

    def story(self) -> str:
        job = self.job
        lines = [brief(g) for g in job.records.values()]
        lines += [
            f"{w.worker_id}@{w.agent_id} {'' if w.alive else 'dead '}in {w.current and w.current.number}"
            f" pending {w.pending and w.pending.number}: {w.steps} steps, name {w.name} ({w.reported})"
            for w in job.workers.values()
        ]
        lines += [
            f"{n.agent_id} alive={n.alive} silent={n.silent} storeless={n.storeless} leaving={n.leaving}"
            for n in job.nodes.values()
        ]
        if job.leader is not None:
            state = job.nodes[job.leader[0]].state
            lines.append(decide(state.view, state.evidence, job.now_s, POLICY).reason)
        return "\n".join([*lines, repr(job.result), f"committed {job.committed}"])


Histories.TestCase.settings = settings(
    max_examples=int(os.environ.get("BAGUA_HISTORIES", "60")),
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestHistories = Histories.TestCase
