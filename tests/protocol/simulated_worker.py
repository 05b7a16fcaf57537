"""A worker of a simulated job: what it holds, and its place in the job's generations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulated_store import Node

from bagua_contract.records import Generation, StateName
from bagua_core.elastic.heal.heal_plan import HealPlan
from bagua_core.elastic.state.commit_history import History

# What made a state: whose initial parameters, then every commit, ("step", generation, number) or
# ("end", generation).
Chain = tuple[tuple[str | int, ...], ...]


@dataclass
class Worker:
    """current: the generation it is in, or is about to be. token: counts what it began, and so marks
    late news of old things. round: collectives of `current` it contributed to. counted: its chain counts.
    """

    worker_id: str
    node: Node
    slot: int
    chain: Chain
    alive: bool = True
    revision: int = 0
    current: Generation | None = None
    broken: bool = False
    agreed: Generation | None = None
    built: Generation | None = None
    floor: int = 0
    token: int = 0
    round: int = 0
    waiting_for_news: bool = False
    in_collective: bool = False
    counted: bool = True
    history: History = field(default_factory=History)
    plan: HealPlan | None = None
    reported: int = 0
    suspected: int = 0
    suspicion: tuple[int, bool] | None = None  # the last one, which its agent keeps in the store
    ended: str = ""  # what its agent records: finished, departed or failures
    previous: Generation | None = None  # to fall back to while `current` is being entered
    taking_part: bool = False  # `current` is entered
    then: Callable[[dict[int, Any]], None] | None = None  # what the collective under way is for
    copied: bool = False  # the copy beside the step has arrived
    held: Callable[[], None] | None = None  # the step is reduced and waits for that copy
    swap_in: Callable[[Callable[[], None]], None] = lambda then: then()
    is_writing: bool = False
    dies_between_lines: bool = False  # it is killed when it next writes several lines, after the first
    confirmed: bool = False  # it completed the second collective of the end

    @property
    def name(self) -> StateName:
        commits = self.chain[1:]
        if not commits or not self.counted:
            return StateName()
        steps = [c for c in commits if c[0] == "step"]
        operations = 0
        while commits[-1 - operations][0] == "end":
            operations += 1
            if operations == len(commits):
                break
        return StateName(int(commits[-1][1]), len(steps), operations)
