"""Carries out the leader's orders about workers that are late: saves their stacks, then may kill them.

Acts on control/hang, which only the leader writes; membership/hang.py decides which workers are killed. If ranks
disagree, this node's workers get the difference once their stacks, which show where they wait, are saved. Saving takes
seconds at worst and happens in a thread of its own, so that the agent's loop goes on. Invariants: no worker is killed
before its stacks are saved or saving has failed, and none that has gone on or waits itself by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bagua_agent.base.background import Background, Failed, OperationEnd
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.membership.hang import HangOrder, HangOutcome
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.workers.stacks import SavedStacks, save_stacks

_TOPIC = "hang"


class HangOrders:
    """Carries out the leader's orders for this node's workers. on_disagreement(difference): called if they should raise
    it."""

    def __init__(
        self, job: JoinedJob, workers: NodeWorkers, on_disagreement: Callable[[str], None] = lambda what: None
    ) -> None:
        self._job = job
        self._on_disagreement = on_disagreement
        self._workers = workers
        self._savers = Background("bagua-stacks")
        self._taken = 0

    def take(self, order: HangOrder | None) -> None:
        """Carries out a new order. Called from the loop's thread."""
        if order is None:
            return
        self._job.terminal.tell_once(_TOPIC, order.reason)
        self._taken += 1
        targets = self._workers.stack_targets()
        name = f"stacks {self._taken}"

        def ended(end: OperationEnd[list[SavedStacks]]) -> None:
            # without stacks too: they are not worth more than going on with what was ordered
            saved = [] if isinstance(end, Failed) else end.value
            self._job.timers.set_from_thread(name, time.monotonic(), lambda now_s: self._saved(order, saved))

        self._savers.run("saving stacks", lambda: save_stacks(targets, order.reason), ended)

    def _saved(self, order: HangOrder, saved: list[SavedStacks]) -> None:
        for stacks in saved:
            where = f"in {stacks.path}" if stacks.path is not None else "are not saved"
            problem = f" ({stacks.problem})" if stacks.problem else ""
            self._job.terminal.tell(f"stacks of worker {stacks.worker_id} {where}{problem}")
        seen = self._job.seen
        if order.outcome is HangOutcome.DISAGREE and seen.view.hang_order == order:
            self._on_disagreement(order.reason)
        if order.outcome is not HangOutcome.REPLACE or seen.view.hang_order != order:
            return
        for worker_id in order.workers:
            if seen.waits.get(worker_id, -1) >= order.generation:
                continue
            self._workers.kill(worker_id, f"hung: {order.reason}")

    def stop(self) -> None:
        """Waits for a saving under way, which is bounded."""
        self._savers.stop()
