"""Keeps this worker in the job's current generation, and takes it to the next one.

Owns the session, the communicators and the way through following.py's decisions: build, exchange names, step out,
end. Knows nothing of steps, data or ledgers: the engine hears of a new generation through `Host`.
Everything runs in the script's thread except `_on_news`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NoReturn

from bagua_contract import membership_pb2
from bagua_contract.collective_wait import CollectiveWait
from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import Generation, Stage, SuspicionKind
from bagua_core import tracing
from bagua_core.communication.communicator import CollectiveAborted, CollectiveFailed, Communicator
from bagua_core.communication.transport_choice import check_setting
from bagua_core.communication.transports import retired_groups
from bagua_core.communication.transports.gpu_transport import TRANSPORTS
from bagua_core.elastic.checks.step_timing import WaitMonitor
from bagua_core.elastic.membership import entry, switch_pair
from bagua_core.elastic.membership.following import FollowingSituation, Move, decide, is_superseded
from bagua_core.elastic.membership.host import Host
from bagua_core.elastic.membership.next_communicator import NextCommunicator
from bagua_core.elastic.membership.rendezvous import Rendezvous, TransportRefused
from bagua_core.elastic.membership.session import AgentMessages, Session
from bagua_core.elastic.membership.shard_member import ShardMember
from bagua_core.elastic.membership.stall_reports import StallReports
from bagua_core.elastic.waiting.operation_trail import FIRST_BOUNDARY
from bagua_core.errors import LeaveInterrupt, UserError

RECORDS_KEPT = 8
LOOK_AGAIN_S = 1.0  # for members of the newest record that answer
JOINT_AGAIN_S = 0.02  # for news that another shard of the replica has


class JoinRefused(UserError, RuntimeError):
    """The job does not take this worker: its fingerprint differs."""


class Member(ShardMember):
    def __init__(self, environment: WorkerEnvironment, host: Host) -> None:
        super().__init__()
        self._environment = environment
        self._host = host
        self.broken = False
        self.agreed: int | None = None
        self._floor = 0
        self._records: dict[int, Generation] = {}  # the last few: what was agreed may be superseded by now
        self._ready_said = False
        self._loop_wait: tuple[float, WaitMonitor] | None = None  # at the first boundary, for the others
        self.at_boundary = False  # the script's thread is in `follow`
        self._sides: dict[str, Communicator] = {}
        self._left: list[Communicator] = []
        self._broken_in: CollectiveWait | None = None  # what the generation's break ended
        self._left_out_by: Generation | None = (
            None  # the record with which the job went on without this worker
        )
        self._stepped_out_of = 0  # number of the last generation in force here
        self.rendezvous = Rendezvous(
            environment.worker_id,
            environment.bind_host,
            self.changed,
            self._building_failed,
            check_setting(environment.transport, TRANSPORTS),
        )
        self.session = Session(environment.session_socket, environment.worker_id, self.changed)
        self.stalls = StallReports(self.session, self._records.get, RECORDS_KEPT)
        self._next = NextCommunicator(self.rendezvous, self.changed, self.stalls.begins_to_build)
        self.session.on_news(self._on_news)

    @property
    def number(self) -> int:
        return self.generation.number if self.generation else 0

    @property
    def is_closed(self) -> bool:
        return self.session.news.close

    @property
    def place_left_out(self) -> tuple[int, int] | None:
        """The rank behind the job's last worker, so that this worker does no rank-0 work.

        As (replica rank, number of replicas), if the job went on without this worker; None otherwise.
        """
        record = self._left_out_by
        if record is None or self.generation is not None:
            return None
        listed = record.placement_of(self._environment.worker_id) is not None
        others = record.world_size // record.replica_size - listed
        return others, others + 1

    # -- planned switches

    def switch_value(self) -> float:
        """Returns v of the switch pair. It is read once per reduction; the session's thread may change it meanwhile."""
        newest = self.session.news.generation
        if self.generation is None or newest is None or newest.number <= self.generation.number:
            return 0.0
        listed = newest.placement_of(self._environment.worker_id) is not None
        built = not listed or self._next.is_built_for(newest.number)
        world_size = len(self.generation.members)
        return switch_pair.contribution(newest.number, self.generation.number, built, world_size)

    def pair_reduced(self, pair: tuple[float, float]) -> None:
        """Remembers what all members agreed on by the step's switch pair, if they did."""
        if self.generation is not None and self.communicator is not None:
            agreed = switch_pair.agreed(pair, self.communicator.world_size)
            self.agreed = None if agreed is None else self.generation.number + agreed

    @property
    def is_to_step_aside(self) -> bool:
        """Whether all members agreed on an empty generation: at a boundary they step aside."""
        agreed = self._agreed_record()
        return agreed is not None and not agreed.members

    def _agreed_record(self) -> Generation | None:
        return None if self.agreed is None else self._records.get(self.agreed)

    def _in_force(self) -> list[Communicator]:
        """Returns the communicators of the generation in force."""
        return [c for c in (self.communicator, *self._sides.values()) if c is not None]

    # -- following

    def follow(self, outside: bool = False, given_up: Callable[[], bool] = lambda: False) -> None:
        """Returns once this worker is in a generation in force. SystemExit(0) when the node leaves or the job is over;
        LeaveInterrupt when it leaves after Ctrl-C; MismatchedCollective when ranks disagree. outside: in a collective
        outside a step; then being left out ends the wait too. An empty generation leaves no worker out."""
        self.at_boundary = True
        try:
            while True:
                seen = self.session.news
                self._follow(outside, given_up)
                if given_up() or self.generation is None:
                    return
                if self._is_joint(self.number, lambda: given_up() or self.is_to_move):
                    return
                self._wait_for_news(seen, given_up, 0.0 if self.is_to_move else JOINT_AGAIN_S)
        finally:
            self.at_boundary = False

    @property
    def is_to_move(self) -> bool:
        """Whether there is a change of membership to follow, or the generation in force broke."""
        return decide(self._situation(self.session.news)).move is not Move.STAY

    @property
    def is_over(self) -> bool:
        """Whether the generation in force broke and none follows it, because the job is closing."""
        news = self.session.news
        ends = decide(self._situation(news)).move is Move.END
        return self.broken and news.close and not news.leave and ends

    def _follow(self, outside: bool, given_up: Callable[[], bool]) -> None:
        while True:
            news = self.session.news  # before the question, so that nothing newer than it is overlooked
            self._check_agreed()
            if given_up():
                return
            if news.refused:
                raise JoinRefused(f"this worker does not fit the job: {news.refused}")
            decision = decide(self._situation(news))
            if decision.move is Move.STAY:
                return
            if decision.move is Move.ENTER:
                assert decision.generation is not None
                if outside and self._is_overtaken(decision.generation):
                    self._left_out_by = decision.generation
                    return
                if self._enter(decision.generation, given_up):
                    return
            elif decision.move is Move.STEP_OUT:
                assert decision.generation is not None
                self._step_out(decision.generation)
                if outside and decision.generation.members:
                    return
            elif decision.move is Move.REPORT_MISSED:
                assert decision.generation is not None
                # The leader finds all members alive and makes the generation anew, at once and with this worker.
                self._suspect_break(decision.generation.base, decision.reason)
                self._wait_for_news(news, given_up)
            elif decision.move is Move.END:
                self._end(
                    news, self.number, decision.reason, self._host.before_leaving() if news.leave else None
                )
            else:
                if self.generation is None or (self.generation.is_gathering and not outside):
                    self._say_ready()
                if self.generation is not None and self.generation.is_gathering:
                    self._await_first_steps(news, self.generation.number, outside=outside)
                    continue
                self._wait_for_news(news, given_up)
                if self.broken and self.generation is not None and not given_up():
                    # Whatever became of the first report: as long as nothing follows, the break remains.
                    self._suspect_break(self.number, "still without its peers", waits_in=self._broken_in)

    def _end(
        self, news: AgentMessages, number: int, reason: str, last: membership_pb2.LastCheckpoint | None
    ) -> NoReturn:
        print(f"bagua: worker ends: {reason}", file=sys.stderr, flush=True)
        self.session.left(number, last)
        raise LeaveInterrupt if news.leave and news.interrupted else SystemExit(0)

    def _situation(self, news: AgentMessages) -> FollowingSituation:
        return FollowingSituation(
            worker_id=self._environment.worker_id,
            current=self.generation,
            broken=self.broken,
            agreed=self._agreed_record(),
            newest=news.generation,
            floor=self._floor,
            leaving=news.leave,
            closed=news.close,
        )

    def _say_ready(self) -> None:
        if not self._ready_said:
            self._ready_said = True
            kept = self._host.info().name.generation
            self.session.ready(self.rendezvous.address, self._host.fingerprint(), kept)

    # -- before the loop

    def gather(self, trains: Callable[[Generation], bool]) -> bool:
        """Waits for a part in the job before the loop. Returns True in a gathering; False if the job trains already,
        and this worker joins at its first step boundary. trains(record): whether members of `record` are there.

        SystemExit(0) when the node leaves or the job is over; LeaveInterrupt when it leaves after Ctrl-C.
        """
        self.assemble(self._environment, self.rendezvous.address)
        self.session.ready(self.rendezvous.address, {}, stage=Stage.WAITING)
        while True:
            news = self.session.news
            self._check_agreed()
            record = news.generation
            if news.close or news.leave:
                self._end(news, 0, "before its first step", None)
            if record is not None and not record.is_gathering and trains(record):
                if self.session.news.generation is not record:
                    continue  # asking took a while: the job may begin again by now
                self.session.ready(self.rendezvous.address, {}, stage=Stage.PREPARING)
                return False
            listed = record is not None and record.placement_of(self._environment.worker_id) is not None
            if record is not None and record.is_gathering and listed and record.number > self._floor:
                if self._enter(record, lambda: False):
                    self.session.ready(
                        self.rendezvous.address, {}, stage=Stage.PREPARING, gathering=record.number
                    )
                    return True
                continue
            self._wait_for_news(news, lambda: False, LOOK_AGAIN_S)

    def _await_first_steps(self, seen: AgentMessages, number: int, *, outside: bool) -> None:
        """Waits until the agent says anything new, or for a moment. At the first step boundary the wait is reported as
        any other is, so that the leader sees which workers keep the others waiting."""
        if outside:  # a collective broke, and that is reported already
            self._wait_for_news(seen, lambda: False, LOOK_AGAIN_S)
            return
        if self._loop_wait is None:
            self._loop_wait = (time.monotonic(), self.stalls.wait_begins(WaitMonitor()))
        began_s, waits = self._loop_wait
        self.trail.wait_begins(FIRST_BOUNDARY)
        self._wait_for_news(seen, lambda: False, waits.threshold_s)
        waited_s = time.monotonic() - began_s
        if waited_s >= waits.threshold_s:
            self.stalls.lasts(number, waited_s, waits, self.trail.waits_in)

    def _step_out(self, generation: Generation) -> None:
        if self.generation is not None and not self.generation.is_gathering:
            self._host.reach("switch.before")
        self._moves_to(generation.number)
        left, together = self.generation, generation.number == self.agreed
        assert left is not None
        self._retire(f"generation {generation.number} leaves this worker out")
        self.generation = self.agreed = None
        self.broken = self._ready_said = False
        self._left_out_by = generation if generation.members else None
        self._stepped_out_of = left.number
        # A generation without any workers ends no worker's history: too few nodes are left, and the state waits.
        self._host.stepped_out(left, keeps_state=not generation.members, together=together)

    def _is_overtaken(self, generation: Generation) -> bool:
        """Tells whether the job went on without this worker while it stepped aside. It joins at a boundary then, since
        the others are not in the collective any more."""
        placement = generation.placement_of(self._environment.worker_id)
        return (
            self.generation is None
            and placement is not None
            and placement.since_generation > self._stepped_out_of
        )

    def first_commit_done(self) -> None:
        """Closes the communicators that are left: every member has come over from the generation before."""
        for communicator in self._left:
            communicator.close()
        self._left.clear()
        # by now nothing here waits in a generation that was lost
        retired_groups.let_go()

    def _retire(self, reason: str) -> None:
        for communicator in self._in_force():
            communicator.abort(reason)
        self.communicator, self._sides = None, {}

    # -- entering

    def _enter(self, generation: Generation, given_up: Callable[[], bool]) -> bool:
        """Builds the communicator, exchanges names and takes part. Returns False if the generation was superseded or
        failed: decide again."""
        if not generation.is_gathering:
            self._host.reach("switch.before")
        newcomer = self.generation is None

        def superseded() -> bool:
            return given_up() or is_superseded(generation, self.session.news.generation, newcomer=newcomer)

        building = self._next.of(generation, newcomer=newcomer)
        if building is None:
            return False
        self._moves_to(generation.number)
        if not self._is_drained_for(generation, superseded):
            building.abandon("superseded")
            return False
        self.settle_device()
        building.drained()
        with tracing.span("build communicator", generation.number):
            is_built = self._wait_until(lambda: building.done, superseded, generation, report=not newcomer)
        if not is_built:
            building.abandon("superseded")
            return False
        communicator = building.communicator
        if isinstance(building.error, TransportRefused):
            raise building.error  # making the generation anew would not help
        if communicator is None:
            self._entry_failed(generation, CollectiveFailed(f"no communicator: {building.error}"))
            return False
        if not generation.is_gathering:
            self._host.reach("entry.built")
        self.trail.entering()
        previous = self.generation
        with self.changed:
            if generation.number == self.agreed and self.communicator is not None:
                # All members switched after a whole step, so nothing runs in it any more. It is closed once
                # the first commit here shows that they all have left it too.
                self._left += self._in_force()
                self._sides = {}
            else:
                self._retire(f"generation {generation.number} takes effect")
            self.communicator, self.generation = communicator, generation
            self._next.forget(generation.number)
        if superseded():  # a record that `_on_news` saw before the lines above
            communicator.abort("superseded")
        try:
            size = 1 if self.replica is None else self.replica.size
            with tracing.span("exchange names", generation.number):
                info = self._host.info()
                plan, infos = entry.exchange(communicator, generation, info, self.wait_unlearned, size)
            if not self._is_joint(generation.number, superseded):
                raise CollectiveAborted("another shard of this replica could not enter it")
            if not generation.is_gathering:
                self._host.reach("entry.exchanged")
            self._host.take_part(generation, plan, infos)
        except CollectiveFailed as error:
            # A joiner is still none; a member still holds its state and waits for a loss.
            self._retire("entering failed")
            self.generation = previous
            self._entry_failed(generation, error)
            return False
        self.broken = False
        self.agreed = None
        self._floor = max(self._floor, generation.number - 1)
        return True

    def _is_drained_for(self, generation: Generation, superseded: Callable[[], bool]) -> bool:
        """Waits until no kernel of the generation in force runs here any more, so that NCCL may join `generation`.
        Returns False if the generation in force broke meanwhile. A loss aborts it, and joining waits for the abort
        (nccl_end.py)."""
        if generation.number != self.agreed:
            return True
        try:
            self.drain()
        except CollectiveFailed as error:
            self._check_agreed()
            if not superseded():
                self.break_generation(error)
            return False
        return True

    def drain(self) -> None:
        """Waits for all that the device was given of the generation in force. Raises CollectiveFailed."""
        waits = self.stalls.wait_begins(WaitMonitor())
        for pending in [each for communicator in self._in_force() for each in communicator.drain()]:
            pending.wait(lambda waited_s: self.stalls.lasts(self.number, waited_s, waits), waits.threshold_s)
            self.stalls.went_on()

    def _entry_failed(self, generation: Generation, error: CollectiveFailed) -> None:
        self._floor = max(self._floor, generation.number)
        self.broken = self.generation is not None
        self._broken_in = None
        with self.changed:
            self._next.forget(generation.number)
        # A planned record beside it ends nothing: it waits for a commit that can't come, so the leader must know.
        if not is_superseded(generation, self.session.news.generation, newcomer=self.generation is None):
            self._suspect_break(generation.number, f"entering failed: {error}", error.hosts)

    def _building_failed(self, number: int, error: Exception) -> None:
        """Tells the agent why no other generation comes. Runs in the builder's thread. It is no break: the generation
        in force goes on."""
        detail = f"generation {number} can't be built here: {error}"
        self.session.suspect(number, SuspicionKind.UNBUILT, hosts=(), detail=detail)

    def _on_news(self, news: AgentMessages) -> None:
        """Releases what a newer generation ended, and builds the new one meanwhile. Runs in the session's thread."""
        if news.disagreement:
            with self.changed:
                ended = self._in_force()
            for each in ended:
                each.abort(news.disagreement)
            return
        newest = news.generation
        if newest is None:
            return
        with self.changed:
            self._records[newest.number] = newest
            if len(self._records) > RECORDS_KEPT:
                del self._records[min(self._records)]
            in_force, communicators = self.generation, self._in_force()
            newcomer = in_force is None
            # A member that has not agreed to the pending one follows a newer one freely.
            self._next.supersede(newest, lambda number: newcomer or self.agreed != number)
        if in_force is not None and is_superseded(in_force, newest, newcomer=False):
            for communicator in communicators:
                communicator.abort(f"generation {newest.number}: {newest.reason}")
        with self.changed:  # after the abort, for whose end the new communicators wait
            listed = newest.placement_of(self._environment.worker_id) is not None
            if listed and newest.number > max(self._floor, self.number):
                self._next.start(newest)

    # -- a group without joiners

    def side_communicator(self, members: tuple[int, ...], name: str = "outside") -> Communicator:
        """Returns the communicator of `members` (global ranks) of the generation in force. name: one for each such
        group of a generation. Raises CollectiveFailed."""
        if name in self._sides:
            return self._sides[name]
        main, generation = self.communicator, self.generation
        assert main is not None and generation is not None
        self.drain()
        self.settle_device()
        building = self.rendezvous.start(generation, members, name)
        main.abort_flag.add_waiter(lambda: building.abandon("the generation ended"))
        if not self._wait_until(lambda: building.done, main.abort_flag.is_set, generation, report=True):
            raise CollectiveAborted(main.abort_flag.reason or "aborted")
        if building.communicator is None:
            raise CollectiveFailed(f"building the group for a collective failed: {building.error}")
        self._sides = {**self._sides, name: building.communicator}
        return building.communicator

    def wait_closed(self) -> None:
        """Waits until the agent says that the job is closing; SystemExit(0) or another generation may come first."""
        while not self.is_closed:
            seen = self.session.news
            self.follow(given_up=lambda: self.is_closed)
            self._wait_for_news(seen, lambda: self.is_closed)

    def break_generation(self, error: Exception) -> None:
        """Gives up the generation in force, whose communicator is of no use any more. Reports that unless a newer
        generation said it first."""
        if self.generation is None:
            return
        self.broken = True
        self._broken_in = self.trail.waits_in()
        for communicator in self._in_force():
            communicator.abort(str(error))
        newest = self.session.news.generation
        if newest is None or not is_superseded(self.generation, newest, newcomer=False):
            hosts = error.hosts if isinstance(error, CollectiveFailed) else ()
            self._suspect_break(self.number, str(error), hosts, self._broken_in)

    def _suspect_break(
        self, number: int, detail: str, hosts: tuple[str, ...] = (), waits_in: CollectiveWait | None = None
    ) -> None:
        self.session.suspect(number, SuspicionKind.BROKEN, hosts=hosts, detail=detail, waits_in=waits_in)
