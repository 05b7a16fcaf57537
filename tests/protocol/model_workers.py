"""The events of one worker in the explored protocol: contribute, complete, commit, copy, enter, end."""

from __future__ import annotations

from collections.abc import Iterator

from model_parts import ModelParts
from model_state import (
    CONTRIBUTED,
    DEAD,
    DIRTY,
    DONE,
    ENDED,
    FAILED,
    FAILOVER,
    GONE,
    LEFT,
    NAMES,
    READY,
    WAIT,
    Gen,
    Lines,
    State,
    Violation,
    Worker,
    _histories,
    _intern,
    _intern_history,
    _name_of,
    _steps,
    step_after,
)

from bagua_core.elastic.heal import heal_plan
from bagua_core.elastic.membership import switch_pair
from bagua_core.elastic.state.commit_history import Entry, Line
from bagua_core.elastic.step.step_states import Event, Phase


class WorkerEvents(ModelParts):
    """What a worker does next, each way it can go."""

    def worker_events(self, s: State, w: int) -> Iterator[tuple[str, State]]:
        worker, newest, me = s.workers[w], s.gens[-1], NAMES[w]
        if worker.phase in GONE:
            return
        number = newest.number
        listed = w in newest.members
        overtaken = newest.kind == FAILOVER and number > worker.gen
        gen = self.gen_of(s, worker.gen) if worker.gen else None

        if worker.phase == READY and gen is not None and not overtaken:
            pending = number if number > worker.gen else None
            concerned = listed or s.leaving >> w & 1
            reachable = all(s.workers[m].phase != DEAD for m in self.newcomers(newest))
            if pending and worker.built < number and concerned and reachable:
                yield f"{me} builds {number}", self._set(s, w, worker._replace(built=number))
            index = gen.members.index(w)
            if not (self.must_copy(gen, w, worker) and index in self.plan_of(gen).at_once):
                v = switch_pair.contribution(worker.built or None, worker.gen, worker.built > worker.gen)
                after = self._contribute(s, w, worker.gen, v)
                yield (
                    f"{me} contributes to round {worker.round} of {worker.gen}",
                    self._set(after, w, worker._replace(phase=CONTRIBUTED)),
                )

        if worker.phase == CONTRIBUTED and gen is not None and min(gen.counts) > worker.round:
            yield from self._complete(s, w, worker, gen)

        if (
            gen is not None
            and worker.phase in (READY, CONTRIBUTED, DONE)
            and worker.round == 1
            and not overtaken
            and self.must_copy(gen, w, worker)
        ):
            beside = gen.members.index(w) in self.plan_of(gen).beside
            if beside == (worker.phase != READY):
                yield from self._copy(s, w, worker, gen)

        if worker.phase == DONE and gen is not None:
            own_copy_missing = self.must_copy(gen, w, worker)
            others_copied = not any(
                s.workers[m].gen == gen.number and self.must_copy(gen, m, s.workers[m]) for m in gen.members
            )
            if not own_copy_missing and (others_copied or overtaken or self.is_broken(s, gen)):
                if not others_copied:
                    self.coverage["holder went on while a copy broke"] += 1
                yield from self._commit(s, w, worker, gen, f"{me} commits")

        if (
            worker.phase in (CONTRIBUTED, DONE)
            and gen is not None
            and not overtaken
            and self.is_broken(s, gen)
            and (worker.phase == CONTRIBUTED or self.must_copy(gen, w, worker))
            # Where a loss is coming anyway, entering it says the same.
            and not (listed and any(s.workers[m].phase == DEAD for m in newest.members))
        ):
            if any(c > worker.round + 1 for c in gen.counts) or any(
                s.workers[m].gen > gen.number for m in gen.members
            ):
                self.coverage["failed what others completed"] += 1
            step = self.step_of(s, w, worker)
            if step is not Phase.BETWEEN:
                assert step_after(step, Event.FAIL) is Phase.FAILED
            yield f"{me} fails in {gen.number}", self._set(s, w, worker._replace(phase=FAILED))

        if listed and number > worker.gen and (worker.phase != DONE or overtaken):
            since = newest.since[newest.members.index(w)]
            waits_for_commit = worker.phase == DONE and gen is not None and not self.must_copy(gen, w, worker)
            if (newest.kind == FAILOVER or since == number) and not waits_for_commit:
                if worker.phase == DONE:
                    self.coverage["reduced, but the copy broke"] += 1
                yield f"{me} enters {number}", self._enter(s, w, worker, newest)

        if s.leaving >> w & 1 and not listed and (newest.kind == FAILOVER or worker.phase == FAILED):
            self.coverage["leaver gone without its last step"] += 1
            yield f"{me} leaves", self._set(s, w, Worker(LEFT))

    def _complete(self, s: State, w: int, worker: Worker, gen: Gen) -> Iterator[tuple[str, State]]:
        me = NAMES[w]
        label = f"{me} completes round {worker.round} of {gen.number}"
        if worker.round == 0:
            plan = self.plan_of(gen)
            if self._known_chain(gen, plan)[0] == DIRTY:
                raise Violation(f"I6: a forgotten state becomes the job's: {label}")
            if plan.initial:
                self.coverage["copied initial parameters"] += 1
            due = self.due_when_entered(worker.history, w, gen)
            for text, after, alive in self._write(s, w, due, label):
                ready = worker._replace(phase=READY, round=1, copied=False)
                yield text, self._set(after, w, ready if alive else Worker(DEAD))
            return

        lacking = self.must_copy(gen, w, worker)
        reference = self._known_chain(gen, self.plan_of(gen)) if lacking else worker.chain
        name = _name_of(reference)
        if name.step < self.setup.steps:
            healing = self.healing_now(gen, worker.round)
            history, due = self._released(worker.history, name.step, healing, w, gen)
            for text, after, alive in self._write(s, w, due, label):
                if not alive:
                    yield text, self._set(after, w, Worker(DEAD))
                elif healing:
                    yield text, self._set(after, w, worker._replace(phase=DONE, history=history))
                else:
                    yield from self._commit(after, w, worker._replace(history=history), gen, text)
        elif name.operations == 0:
            history, due = self._released(worker.history, name.step, frozenset(), w, gen)
            for text, after, alive in self._write(s, w, due, label + " (first of the end)"):
                chain = (*worker.chain, -gen.number)
                ready = worker._replace(phase=READY, round=worker.round + 1, chain=chain, history=history)
                if not self.rules.second_end_collective:
                    ready = Worker(ENDED, chain=chain)
                yield text, self._set(after, w, ready if alive else Worker(DEAD))
        else:
            self._check_nothing_lost(s, worker.chain, label)
            self.coverage["a rank confirmed the end"] += 1
            yield label + " (second of the end)", self._set(s, w, Worker(ENDED, chain=worker.chain))

    def _released(
        self, before: int, step: int, healing: frozenset[int], w: int, gen: Gen
    ) -> tuple[int, Lines]:
        key = (before, step, healing, w, gen.members)
        found = self._completed.get(key)
        if found is None:
            history, due = self.rules.collective_completed(
                _histories[before], step + 1, healing, NAMES[w], self.roster(gen)
            )
            found = self._completed[key] = (_intern_history(history), due)
        return found

    def _committed(self, before: int, step: int, healing: frozenset[int], gen: Gen) -> tuple[int, int]:
        """Places of the step's entry, and of the history with it."""
        key = (before, step, healing, gen.number, gen.members)
        found = self._commits.get(key)
        if found is None:
            entry = Entry(
                generation=gen.number,
                step=step + 1,
                position=(("batch", step),),
                workers=tuple(NAMES[m] for m in gen.members),
                healing=healing,
            )
            history = self.rules.trim(_histories[before].committed(entry))
            found = self._commits[key] = (_intern(entry), _intern_history(history))
        return found

    def _commit(self, s: State, w: int, worker: Worker, gen: Gen, label: str) -> Iterator[tuple[str, State]]:
        name = _name_of(worker.chain)
        healing = self.healing_now(gen, worker.round)
        step_id, history = self._committed(worker.history, name.step, healing, gen)
        before = self.step_of(s, w, worker)
        events = (Event.COMMIT,) if before is Phase.FINAL else (Event.REDUCE, Event.COMMIT)
        assert step_after(before, *events) is Phase.BETWEEN
        committed = worker._replace(phase=WAIT, chain=(*worker.chain, step_id), history=history)
        if self.rules.own_line_at_commit:
            step = _steps[step_id]
            own = (Line(step, step.workers.index(NAMES[w])),)
            s = list(self._write(s, w, own, label))[-1][1]
        agreed = None
        if not any(c > worker.round + 1 for c in gen.counts):
            agreed = self.rules.agreed((sum(gen.vs), sum(v * v for v in gen.vs)), len(gen.members))
        own_v = gen.vs[gen.members.index(w)]
        if agreed is not None and own_v:
            target = self.gen_of(s, gen.number + int(own_v))
            if any(s.workers[m].phase == DEAD for m in gen.members):
                self.coverage["switched although a member died"] += 1
            if s.gens[-1].number > target.number:
                self.coverage["switched to a superseded generation"] += 1
            if w not in target.members:
                self.coverage["left with the switch"] += 1
                yield label + ", leaves", self._set(s, w, Worker(LEFT))
            else:
                yield label + f", switches to {target.number}", self._enter(s, w, committed, target)
            return
        ready = committed._replace(phase=READY, round=worker.round + 1, copied=False)
        yield label, self._set(s, w, ready)

    def _copy(self, s: State, w: int, worker: Worker, gen: Gen) -> Iterator[tuple[str, State]]:
        plan = self.plan_of(gen)
        source = gen.known[plan.holders[0]]
        assert source is not None
        if any(s.workers[gen.members[h]].phase == DEAD for h in plan.holders):
            self.coverage["last bytes of a source that died"] += 1
        chain = source[0] if source[2] else (DIRTY,)
        history, due = self.rules.copied(_histories[source[1]], NAMES[w], self.roster(gen))
        for text, after, alive in self._write(s, w, due, f"{NAMES[w]} has copied in {gen.number}"):
            self.coverage["copied"] += 1
            copied = worker._replace(chain=chain, history=_intern_history(history), copied=True)
            yield text, self._set(after, w, copied if alive else Worker(DEAD))

    def _enter(self, s: State, w: int, worker: Worker, gen: Gen) -> State:
        step = self.step_of(s, w, worker)
        if step is Phase.RUNNING:
            step = step_after(step, Event.FAIL)  # a loss ends a step that no reduction has made final
        if step is not Phase.BETWEEN:
            assert step_after(step, Event.ROLL_BACK) is Phase.BETWEEN
        since = gen.since[gen.members.index(w)]
        if worker.chain[0] == DIRTY or (
            self.rules.forget_when_dropped
            and len(worker.chain) > 1
            and heal_plan.counted_name(_name_of(worker.chain), since).is_none
        ):
            # Named none from here on, but the parameters are still what they became.
            if len(worker.chain) > 1 or worker.phase != WAIT:
                self.coverage["forgot what the job may have undone"] += 1
            worker = worker._replace(chain=(DIRTY,), history=0)
        known = (worker.chain, worker.history, worker.chain[0] != DIRTY)
        after = self._contribute(s, w, gen.number, 0.0, known)
        return self._set(after, w, Worker(CONTRIBUTED, gen.number, 0, worker.chain, worker.history, 0, False))
