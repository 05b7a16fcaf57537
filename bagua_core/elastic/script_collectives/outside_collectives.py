"""Runs a script's own collectives, outside a step or in one.

Outside a step a collective is a commit of its own: run again among the members that are left until it succeeded, or
answered from the log of those that others returned. What can't be run again (a lost rank's part, a message between two,
a group's affairs) raises instead. In a step it is part of the step and fails with it. operations.py owns the log,
requests.py the collectives, member.py the changes of generation. Invariant: joiners take part in none before their
first step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from bagua_core.communication.arithmetic import divide
from bagua_core.communication.communicator import (
    CollectiveAborted,
    CollectiveFailed,
    Communicator,
    ReduceOp,
)
from bagua_core.elastic.membership.member import Member
from bagua_core.elastic.replica.own_replica import Outcome
from bagua_core.elastic.script_collectives.before_loop import BeforeLoop
from bagua_core.elastic.script_collectives.epoch_results import EpochResults
from bagua_core.elastic.script_collectives.members_changed import (
    JobClosing,
    MembersChanged,
    answered,
    check_present,
    left_out,
    placed,
)
from bagua_core.elastic.script_collectives.requests import (
    Allgather,
    Allreduce,
    Gather,
    Message,
    Reduce,
    Request,
    Result,
    Wait,
)
from bagua_core.elastic.script_collectives.steps import Steps
from bagua_core.elastic.script_collectives.worker_groups import WorkerGroup
from bagua_core.elastic.state.committed_state import CommittedState
from bagua_core.elastic.waiting import operations
from bagua_core.elastic.waiting.operation_trail import EPOCH_END, TRAINING_END
from bagua_core.errors import NotDeterministicError, UserError

_MOST_DIMENSIONS = 64  # of a tensor: torch's own limit


class SourceHasNoState(UserError, RuntimeError):
    """A worker in its first step, which is still copying the job's state, was to tell the others something."""


class CollectiveInRound(UserError, RuntimeError):
    """The script called a collective among the local steps of a round, in which each worker is at another place."""


class OutsideCollectives:
    def __init__(self, steps: Steps, state: CommittedState, member: Member, before_loop: BeforeLoop) -> None:
        self._steps = steps
        self._state = state
        self._member = member
        self._before_loop = before_loop
        self._epoch_results = EpochResults(member)
        self.answered_in_step = 0  # collectives within steps that succeeded, with other workers

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Returns the reduction of `tensor` over all that take part. See bagua_core.allreduce. Raises TypeError for
        what has no average."""
        return self.request(Allreduce(tensor, op))[0]

    def epoch_begins(self, epoch: int) -> None:
        """Notes that the loader yields `epoch` to the script. See StepEngine."""
        self._epoch_results.begins(epoch)

    def epoch_ends(self) -> None:
        """Notes that the script has left the loop over an epoch. See StepEngine."""
        self._epoch_results.ends()

    def boundary(self) -> None:
        """Publishes what workers that come later need of the collectives before this boundary."""
        self._before_loop.boundary()
        self._epoch_results.boundary(self.is_alone)

    def request(self, request: Request, group: WorkerGroup | None = None) -> Result:
        """Does what a script asks for, among all that take part or those of `group`.

        Raises ValueError, TypeError (before any peer is asked), MembersChanged, PeerLostError, JobClosing,
        SourceHasNoState, MismatchedCollective, NotDeterministicError.
        """
        self._before_loop.join()
        if request.across_replicas and self._member.replica is None:  # each worker is one
            request = replace(request, across_replicas=False)
        if self._steps.in_step and self._steps.virtual_shards:
            raise NotDeterministicError(
                f"{request.asked(request.root)} in the loop of a deterministic job: the body of the loop "
                "runs once a shard, and so more often on a worker with more shards; call it between two epochs"
            )
        if self._before_loop.is_late:
            if group is not None or isinstance(request, Message):
                raise self._before_loop.refuse(request.asked(request.root))
            return self._before_loop.answer(request)
        if group is None and self._epoch_results.is_open and self.is_alone:
            result = self._of_members(request)
            if result is not None:
                return result
        if self.is_alone or (group is not None and group.workers is None):
            rank, size = self._place_alone(request.across_replicas)
            if group is not None:
                rank, size = group.rank or 0, group.size
            request.check(rank, size)
            return request.own(rank, size, request.root or 0)
        workers = self._workers(request.across_replicas)
        if group is not None:
            return self._among(group, request, workers)
        request.check(workers.index(self._own_id), len(workers))
        if self._steps.in_step:
            return self._in_step(request, workers, None)
        if isinstance(request, Message):
            return self._send_or_receive(request, workers)
        result = self._operate(request, workers)
        if self._member.generation is not None:
            self._epoch_results.completed(request, result)
        return result

    def _of_members(self, request: Request) -> Result | None:
        """Returns the result that the members had of a joiner's request at the top of its epoch; None if this worker is
        left with its own input."""
        member = self._member
        while self.is_alone and (generation := member.generation) and (communicator := member.communicator):
            absent = self._workers_in(self._steps.newcomers)
            addresses = [m.store_address for r, m in enumerate(generation.members) if r not in absent]
            try:
                return self._epoch_results.answer(request, addresses, communicator.abort_flag)
            except CollectiveAborted as error:
                member.break_generation(error)
                self._follow(request)
        return None

    def group(self, ranks: Sequence[int] | None) -> WorkerGroup:
        """Returns the group of `ranks`. See bagua_core.new_group. Raises ValueError, LateWorkerError."""
        self._before_loop.join()
        if self._before_loop.is_late:
            raise self._before_loop.refuse("a group before the loop")
        if self.is_alone:
            rank, size = self._place_alone(across_replicas=False)
            absent = [f"rank {r} of a job that went on" for r in range(size)]
            made = WorkerGroup.of(absent, absent[rank], ranks)
            if self._member.place_left_out is not None or made.rank is None:
                return made
            return replace(made, workers=None)
        return WorkerGroup.of(self._workers(), self._own_id, ranks)

    # -- who takes part

    @property
    def is_alone(self) -> bool:
        """Whether this worker takes part in nothing, as before its first step."""
        communicator, steps = self._member.communicator, self._steps
        newcomers = self._workers_in(steps.newcomers)
        return communicator is None or (not steps.in_step and communicator.global_rank in newcomers)

    def _place_alone(self, across_replicas: bool) -> tuple[int, int]:
        """Returns the rank and the world size that a worker without peers has in its script."""
        replica = self._member.replica
        replica_rank, replicas = self._steps.replica_place()
        if across_replicas or replica is None:
            return replica_rank, replicas
        return replica_rank * replica.size + replica.shard_rank, replicas * replica.size

    def _workers_in(self, replicas: frozenset[int]) -> frozenset[int]:
        """Returns the global ranks of the workers in `replicas`."""
        replica = self._member.replica
        size = 1 if replica is None else replica.size
        return frozenset(r * size + shard for r in replicas for shard in range(size))

    def _takes_part(self, across_replicas: bool = False) -> tuple[int, ...]:
        """Returns the global ranks that take part, ascending; outside steps without joiners. across_replicas: those
        with this worker's shard."""
        member, steps = self._member, self._steps
        communicator, generation, replica = member.communicator, member.generation, member.replica
        if communicator is None:
            return ()
        absent = frozenset() if steps.in_step else self._workers_in(steps.newcomers)
        present = tuple(r for r in range(communicator.world_size) if r not in absent)
        if not across_replicas or replica is None or generation is None:
            return present
        return tuple(r for r in present if generation.members[r].shard_rank == replica.shard_rank)

    def _workers(self, across_replicas: bool = False) -> tuple[str, ...]:
        """Returns the worker ids of those that take part, by the rank that the script knows."""
        generation, ranks = self._member.generation, self._takes_part(across_replicas)
        return tuple(generation.members[r].worker_id for r in ranks) if generation else ()

    @property
    def _own_id(self) -> str:
        communicator, generation = self._member.communicator, self._member.generation
        if communicator is None or generation is None:
            return ""
        return generation.members[communicator.global_rank].worker_id

    # -- in a step

    def _in_step(self, request: Request, workers: Sequence[str], group: WorkerGroup | None) -> Result:
        """Runs a collective as part of the step, before its reduction and behind it: the step fails with it, and then
        the rank's own value comes back. The script may do anything with what it gets, so no rank may commit with a
        value of its own."""
        steps, member = self._steps, self._member
        if steps.rounds is not None:
            raise CollectiveInRound(
                f"{request.asked(request.root)} among the local steps of a round: workers take different numbers of "
                'them, so others would never come to it. Call it between epochs, or use the algorithm with unit="step"'
            )
        rank, world_size, root = workers.index(self._own_id), len(workers), request.root
        if member.broken and not steps.step_failed:
            steps.reduction_failed(CollectiveAborted("the generation broke before"))
        by_some = group is not None or isinstance(request, Message)
        if steps.step_failed:
            if not by_some:
                member.agree(Outcome.FAILED)
            return request.own(rank, world_size, root or 0)
        heals = self._workers_in(steps.plan.healing)
        healing = frozenset(w for r, w in enumerate(self._workers()) if r in heals)
        if root is not None and request.comes_from_root and workers[root] in healing:
            raise SourceHasNoState(
                f"{request.asked(root)}: rank {root} is in its first step and still copies the job's state. In "
                "a step let data come from rank 0, which always has it"
            )
        holder = next((r for r, w in enumerate(workers) if w not in healing), None)
        own_heals, some_heal = workers[rank] in healing, bool(healing.intersection(workers))
        asked = request
        communicator, trail = member.communicator, member.trail
        try:
            with (
                nullcontext() if by_some else member.jointly(),
                trail.aside() if by_some else trail.operation(f"in {request.asked_of_all_shards(root)}"),
            ):
                if group is not None:
                    communicator = group.communicator(member, steps.wait)
                elif request.across_replicas:
                    self._agree_across_shards(communicator, 0, request, root, steps.wait)
                    communicator = member.lane
                assert communicator is not None
                if some_heal and holder is not None and request.has_one_shape:
                    asked = self._in_holders_shape(communicator, request, root, holder, own_heals)
                if not isinstance(request, Message):
                    # Gloo would match it with whatever reduction a peer is in, and end the process or mix their data.
                    operations.check_agreement(
                        communicator, 0, asked.operation(root), asked.asked_of(), steps.wait
                    )
                sums, divides = asked.to_average() if some_heal else (asked, False)
                result = (sums.without_state() if own_heals else sums).run(
                    communicator, root or 0, steps.wait
                )
        except CollectiveFailed as error:
            steps.reduction_failed(error)
            return request.own(rank, world_size, root or 0)
        if asked.tensor.shape != request.tensor.shape:
            return request.own(rank, world_size, root or 0)
        self.answered_in_step += 1
        if some_heal and not own_heals:
            steps.joiner_left_out()
        if divides:
            count = sum(1 for w in workers if w not in healing)
            for tensor in result:
                divide(tensor, max(1, count))
        return result

    def _in_holders_shape(
        self, communicator: Communicator, request: Request, root: int | None, holder: int, heals: bool
    ) -> Request:
        """Returns the request in a holder's shape, in a step in which some copy the state: what these compute is
        fillers, whose number differs from a share's. They bring as much of nothing as the others bring of something.
        holder: a rank that has the state."""
        wait = self._steps.wait
        operations.check_agreement(communicator, 0, request.operation(root), "", wait)
        row = torch.zeros(1 + _MOST_DIMENSIONS, dtype=torch.int64, device="cpu")
        shape = request.tensor.shape
        row[: 1 + len(shape)] = torch.tensor([len(shape), *shape], dtype=torch.int64, device="cpu")
        wait(communicator.broadcast(row, holder))
        count, *sizes = row.tolist()
        return request.in_shape(sizes[:count]) if heals and sizes[:count] != list(shape) else request

    # -- outside steps, by all

    def operate(
        self, tensor: torch.Tensor, op: ReduceOp, finishing: bool = False, across_replicas: bool = False
    ) -> torch.Tensor:
        """Runs one reduction of the log until it succeeded among the members that are left."""
        request = Allreduce(tensor, op, across_replicas=across_replicas and self._member.replica is not None)
        return self._operate(request, self._workers(request.across_replicas), finishing)[0]

    def gather_at_end(self, row: torch.Tensor) -> torch.Tensor:
        """Returns, at the end of the training, the row of each member that takes part, by rank."""
        return self._operate(Allgather(row), self._workers(), finishing=True)[0]

    def confirm(self, is_owed: Callable[[], bool]) -> None:
        """Returns once all members have come here, after any losses, or when this worker owes it no more: it was left
        out meanwhile and joins the job anew. May raise SystemExit."""
        self._operate(
            Allreduce(torch.zeros(1, dtype=torch.float32, device="cpu"), ReduceOp.SUM),
            self._workers(),
            is_owed=is_owed,
        )

    def _operate(
        self,
        request: Request,
        workers: Sequence[str],
        finishing: bool = False,
        is_owed: Callable[[], bool] | None = None,
    ) -> Result:
        """Runs a collective until it succeeded, or answers it from the log. is_owed: without a generation wait for the
        next one, as long as it says so."""
        member, log = self._member, self._state.operations
        index, own_id = log.next_index, self._own_id
        unconfirmed: list[Result] = []
        log.is_running = True
        try:
            while True:
                recorded = log.recorded(index)
                if recorded is not None:
                    log.returned()
                    return answered(request, recorded, unconfirmed)
                if member.generation is None and is_owed is not None:
                    member.follow()
                    if not is_owed():
                        return []
                    continue
                if member.generation is None or (finishing and member.is_closed):
                    log.returned()
                    if isinstance(request, (Gather, Reduce)):
                        return []  # as on a rank that is no root: it is behind the others now
                    return request.own(
                        workers.index(own_id) if own_id in workers else 0,
                        max(1, len(workers)),
                        request.root or 0,
                    )
                try:
                    what = TRAINING_END if finishing else EPOCH_END if is_owed is not None else None
                    with member.jointly():
                        result = self._attempt(index, request, workers, unconfirmed, what)
                except CollectiveFailed as error:
                    if not member.broken:
                        member.break_generation(error)
                    if finishing or is_owed is not None:
                        member.follow(outside=True, given_up=lambda: finishing and member.is_closed)
                    else:
                        self._follow(request)
                    continue
                if member.generation is not None and member.generation.is_gathering:
                    # No commit, and nothing to run again: a loss from here on starts all first workers again.
                    log.returned()
                    present = self._workers(request.across_replicas)
                    self._before_loop.completed(request, placed(request, workers, present), result)
                    return result
                # at the end of a training they could be a whole model
                log.record(result[0] if request.is_common else operations.DONE, only=finishing)
                log.returned()
                self._steps.operation_done(index)
                return result
        finally:
            log.is_running = False

    def _follow(self, request: Request) -> None:
        """Enters the next generation after a request of the script failed. Raises JobClosing if none comes: the
        training is over, and the script may still save what it has. May raise SystemExit."""
        member = self._member
        member.follow(outside=True, given_up=lambda: member.is_over)
        if member.is_over:
            raise JobClosing(
                f"{request.asked(request.root)}: a worker is lost after the end of the training, and the workers that "
                "are left can't repeat it: the job is closing. Call it before the loop over loader.epochs() ends"
            )
        if member.generation is None:
            print(left_out(request), file=sys.stderr, flush=True)

    def _attempt(
        self,
        index: int,
        request: Request,
        workers: Sequence[str],
        unconfirmed: list[Result],
        what: str | None,
    ) -> Result:
        """Runs a collective once. unconfirmed: gets what this rank has before it knows that all ranks have theirs.
        what: the name of an operation that the runtime asks for."""
        member, newcomers, across = self._member, self._steps.newcomers, request.across_replicas
        unconfirmed.clear()
        if member.broken:
            raise CollectiveAborted("the generation broke before")
        communicator = member.communicator
        root = placed(request, workers, self._workers(across))
        everyone, members = self._takes_part(), self._takes_part(across)
        if len(everyone) == 1:
            return request.own(0, 1, 0)
        wait = member.wait_unlearned
        with member.trail.operation(what or f"in {request.asked_of_all_shards(root)}"):
            if newcomers:
                communicator = member.side_communicator(everyone)
            if across:
                self._agree_across_shards(communicator, index, request, root, wait)
                if len(members) == 1:
                    return request.own(0, 1, 0)
                name = f"outside/shard-{members[0]}"
                communicator = member.side_communicator(members, name) if newcomers else member.lane
            assert communicator is not None
            operations.check_agreement(communicator, index, request.operation(root), request.asked_of(), wait)
            result = request.run(communicator, root or 0, wait)
            if not request.is_common:
                unconfirmed.append(result)
                wait(communicator.barrier())
        return result

    @staticmethod
    def _agree_across_shards(
        everyone: Communicator | None, index: int, request: Request, root: int | None, wait: Wait
    ) -> None:
        """Checks, among the workers with each shard, what they ask for. Without this, one shard could wait in another
        collective than its mates, which wait for its outcome."""
        assert everyone is not None
        operations.check_agreement(everyone, index, request.asked_of_all_shards(root), "", wait)

    # -- outside steps, by some: no other worker knows of it, so there is no log, and it is not run again

    def _send_or_receive(self, request: Request, workers: Sequence[str]) -> Result:
        communicator, place = self._member.communicator, request.root
        assert communicator is not None and place is not None
        peer, wait = self._takes_part()[place], self._member.wait_unlearned
        return self._once(request, workers, (workers[place],), lambda: request.run(communicator, peer, wait))

    def _among(self, group: WorkerGroup, request: Request, present: Sequence[str]) -> Result:
        workers = group.workers
        assert workers is not None
        if group.rank is None:
            raise ValueError(
                f"{request.asked(request.root)}: this worker is not in the group {list(group.ranks)}"
            )
        request.check(group.rank, len(workers))
        check_present(request, workers, workers, present)
        if len(workers) == 1:
            return request.own(0, 1, 0)
        if self._steps.in_step:
            return self._in_step(request, workers, group)
        wait = self._member.wait_unlearned

        def run() -> Result:
            communicator = group.communicator(self._member, wait)
            if not isinstance(request, Message):
                operations.check_agreement(
                    communicator, 0, request.operation(request.root), request.asked_of(), wait
                )
            return request.run(communicator, request.root or 0, wait)

        return self._once(request, workers, workers, run)

    def _once(
        self, request: Request, workers: Sequence[str], needed: Sequence[str], run: Callable[[], Result]
    ) -> Result:
        member, log = self._member, self._state.operations
        log.is_running = True
        try:
            if member.broken:
                raise CollectiveAborted("the generation broke before")
            with member.trail.aside():
                return run()
        except CollectiveFailed as error:
            if not member.broken:
                member.break_generation(error)
            self._follow(request)
            check_present(request, workers, needed, self._workers())
            raise MembersChanged(
                f"{request.asked(request.root)}: members of the job changed meanwhile, so it may have happened on "
                "one side and not on the other. All that it needs are still there: begin the exchange anew"
            ) from error
        finally:
            log.is_running = False
