"""Compares the replicas after commits: parameters by digest, and how long each rank computed.

When a comparison is due is digest_check.py's decision, which rank is slow stragglers.py's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bagua_core.communication.communicator import CollectiveFailed, Pending
from bagua_core.elastic.checks.digest_check import DigestCheck
from bagua_core.elastic.checks.stragglers import ComputingTime, StragglerWatch
from bagua_core.elastic.membership.agent_reports import AgentReports
from bagua_core.elastic.membership.member import Member


class ReplicaChecks:
    """Compares the replicas and reports slow ranks. parameters: the live tensors, which must be equal on all ranks.
    wait: CurrentStep.wait. reports: None under plain `python`."""

    def __init__(
        self,
        every_steps: int,
        parameters: Callable[[], list[torch.Tensor]],
        wait: Callable[[Pending], None],
        reports: AgentReports | None,
    ) -> None:
        self._parameters = parameters
        self._wait = wait
        self._reports = reports
        self._digests = DigestCheck(every_steps)
        self._computing = ComputingTime()
        self._stragglers = StragglerWatch()

    def generation_entered(self) -> None:
        self._computing.forget()

    def state_replaced(self, step: int) -> None:
        """Notes that a copy brought the state after `step`."""
        self._digests.state_replaced(self._parameters, step)

    def step_timed(self, lasted_s: float, waited_s: float, shard_share: float | None) -> None:
        """Notes that a step was committed that lasted `lasted_s`, of which this rank waited `waited_s` in
        collectives. shard_share: see stragglers.shard_share()."""
        self._computing.step_done(lasted_s, waited_s, shard_share)

    def after_commit(self, member: Member, step: int) -> None:
        """Compares the replicas if it is due. A comparison that fails breaks the generation. Raises Diverged."""
        communicator = member.lane
        if communicator is None or communicator.world_size == 1:
            return
        if not self._digests.is_due(step):
            self._digests.step_done(self._parameters, step)
            return
        try:
            computing_us = self._digests.compare(
                communicator,
                [p.detach() for p in self._parameters()],
                step,
                self._wait,
                self._computing.take(),
            )
        except CollectiveFailed as error:
            member.break_generation(error)
            return
        found = self._stragglers.observe(_workers(member), computing_us)
        if self._reports is not None and (found.named or found.recovered):
            self._reports.stragglers(step, found)


def _workers(member: Member) -> list[str]:
    """Returns the worker ids of the member's lane, by rank in it."""
    lane, generation = member.lane, member.generation
    assert lane is not None and generation is not None
    ids = {placement.global_rank: placement.worker_id for placement in generation.members}
    return [ids[member.of_this_shard(rank)] for rank in range(lane.world_size)]
