"""The end of a step in a job of replicas, explored completely: who has reduced, who learns it, and who dies when.

The rules are those of docs/design/replicas.md ("Steps"). Rows and plans are the code's own. Each rule is needed:
without it some run breaks an invariant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations, product

import pytest

from bagua_contract.records import StateName
from bagua_core.elastic.heal import heal_plan
from bagua_core.elastic.membership.entry import Info, of_replica

SIZE = 2
STEP = 8
Workers = frozenset[int]


@dataclass(frozen=True)
class Rules:
    """votes: all workers do, behind their lanes' reductions. agrees: the shards of a replica do, behind the vote."""

    votes: bool = True
    agrees: bool = True


@dataclass(frozen=True)
class Run:
    """reduced: workers that know that their lane has reduced. committed: of the step. dead: None or a worker."""

    count: int
    reduced: Workers
    contributed: Workers
    committed: Workers
    dead: int | None

    @property
    def survivors(self) -> list[int]:
        """Replicas of which no worker is dead."""
        lost = None if self.dead is None else self.dead // SIZE
        return [r for r in range(self.count) if r != lost]

    def committed_shards(self, replica: int) -> int:
        return sum(w in self.committed for w in shards(replica))


def shards(replica: int) -> range:
    return range(replica * SIZE, (replica + 1) * SIZE)


def lane(worker: int, count: int) -> Workers:
    return frozenset(range(worker % SIZE, count * SIZE, SIZE))


def subsets(workers: Workers) -> Iterator[Workers]:
    ordered = sorted(workers)
    for chosen in chain.from_iterable(combinations(ordered, n) for n in range(len(ordered) + 1)):
        yield frozenset(chosen)


def completes(contributed: Workers, among: Workers, dead: int | None) -> list[Workers]:
    """Whom an allreduce may return to: to none unless all have come; else to any, for the others lose the outcome."""
    if not among <= contributed:
        return [frozenset()]
    return list(subsets(among - ({dead} if dead is not None else set())))


def runs(count: int, rules: Rules) -> Iterator[Run]:
    everyone = frozenset(range(count * SIZE))
    # the last one dies, before it gives its gradients, before its vote, or behind it; workers are alike by symmetry
    for dead, gives, votes in (
        (None, True, True),
        *((count * SIZE - 1, g, v) for g, v in ((0, 0), (1, 0), (1, 1))),
    ):
        brought = everyone if gives else everyone - {dead}
        lanes = [completes(brought, lane(s, count), dead if not votes else None) for s in range(SIZE)]
        for reduced in (frozenset(chain(*parts)) for parts in product(*lanes)):
            contributed = reduced if dead is None or votes else reduced - {dead}
            outcomes = completes(contributed, everyone, dead) if rules.votes else [reduced]
            for learned in outcomes:
                final = learned
                if rules.agrees:
                    final = frozenset(w for w in learned if all(m in learned for m in shards(w // SIZE)))
                yield Run(count, reduced, contributed, final, dead)


def broken(run: Run) -> set[str]:
    """The invariants that do not hold."""
    found = set()
    if run.committed and run.reduced != frozenset(range(run.count * SIZE)):
        found.add("S1")
    counts = [run.committed_shards(r) for r in run.survivors]
    if any(0 < n < SIZE for n in counts):
        found.add("S2")
    has_it = any(counts)
    if has_it and SIZE not in counts:
        found.add("S3")
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_the_invariants_hold_in_every_run(count: int) -> None:
    explored = list(runs(count, Rules()))
    assert len(explored) > 20 and any(run.committed for run in explored)
    assert {(run, name) for run in explored for name in broken(run)} == set()


@pytest.mark.parametrize(
    ("rules", "breaks"),
    [
        (Rules(votes=False), {"S1"}),
        (Rules(agrees=False), {"S2", "S3"}),
        (Rules(votes=False, agrees=False), {"S1", "S2", "S3"}),
    ],
)
def test_each_rule_is_needed(rules: Rules, breaks: set[str]) -> None:
    assert set().union(*(broken(run) for run in runs(2, rules))) == breaks


def test_all_shards_follow_a_plan_by_which_a_whole_replica_gives_the_step() -> None:
    for run in runs(3, Rules()):
        infos = []
        for replica in run.survivors:
            names = [StateName(3, STEP + (w in run.committed)) for w in shards(replica)]
            rows = [Info(name, False, {"epoch": 0, "batch": 0}) for name in names]
            infos.append(of_replica(rows, [1] * SIZE))
        plan = heal_plan.plan([i.name for i in infos], [False] * len(infos), [1] * len(infos))
        whole = [at for at, r in enumerate(run.survivors) if run.committed_shards(r) == SIZE]
        assert list(plan.holders) == (whole or list(range(len(infos))))
        assert plan.at_once == set(range(len(infos))) - set(plan.holders)
