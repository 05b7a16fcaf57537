"""Runs the scheduler: every daemon stands for election, and the winner decides and writes.

One thread: it waits until the key is free; once it owns the key, it mirrors the cluster, plans after every change
(cluster/scheduling.py), and writes the plan in transactions that compare its key and each order as read. A refused
transaction was overtaken by a change: the next picture gives the next plan. A store that lost its keys has lost ours
too, so an ordinary election follows, and the plan's settling time begins anew. A scheduler whose store was set back to
a backup, or that is overtaken again and again, reads the cluster anew. A scheduler without permission, or with a bug,
gives the key up and stands again later, since another one may succeed. So does one whose loop is stuck, by the watch
over it (job/loop_watch.py): its lease is renewed by another thread. It also removes old jobs (job_retention.py).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

from bagua_agent.base.background import Failed, OperationEnd, background_thread, describe
from bagua_agent.base.errors import BaguaError, InfrastructureLost, OutcomeUnknown, StoreFull
from bagua_agent.base.failpoints import Failpoints
from bagua_agent.base.plain_text import shortened
from bagua_agent.cluster.cluster_plan import Plan
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.cluster.cluster_records import write_orders, write_outcome
from bagua_agent.cluster.cluster_view import OrderView
from bagua_agent.cluster.scheduling import plan
from bagua_agent.cluster_state.cluster_picture import ClusterPicture
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Compare, Put, Store, absent, create_revision_is, mod_revision_is
from bagua_agent.etcd.keys import SECRETS_PREFIX, JobKeys
from bagua_agent.etcd.leased_keys import LeasedKeys
from bagua_agent.etcd.mirror import Change, PrefixMirror
from bagua_agent.job.create_or_join import remove_unused_identity
from bagua_agent.job.loop_watch import STUCK_AFTER_S, TICK_S, LoopWatch
from bagua_agent.service.scheduling.job_retention import JobRetention
from bagua_agent.service.scheduling.queue_account import QueueAccount
from bagua_contract import cluster_pb2 as pb

log = logging.getLogger(__name__)

NODES_IN_A_WRITE = 100  # etcd takes 128 operations, and each comparison counts
STAND_TIMEOUT_S = 2.0
TRY_AGAIN_S = 1.0
REFUSED_AGAIN_S = 10.0  # the others stand meanwhile
MOST_OVERTAKEN = 5  # in a row; by then the picture is not late, it is wrong

_Message = tuple[Change, ...] | None


class Scheduler:
    """A daemon's scheduler thread, which runs from `start` to `stop`. say: a line for the daemon's log."""

    def __init__(
        self,
        store: Store,
        leased: LeasedKeys,
        node_name: str,
        say: Callable[[str], None],
        policy: ClusterPolicy | None = None,
    ) -> None:
        self._store = store
        self._leased = leased
        self._value = pb.Scheduler(node_name=node_name).SerializeToString()
        self._say = say
        self._policy = policy or ClusterPolicy()
        self._failpoints = Failpoints.from_environment()
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._holder: int | None = None  # create revision of the key, as the mirror last told
        self._holders_lease_id = 0  # that the key is on
        self._won: int | None = None  # as we last won it
        self._bug = ""  # the last one that was reported
        self._outage = ""
        self._mirror = PrefixMirror(store, cluster_keys.SCHEDULER, self._key_changed)
        self._watch = LoopWatch()  # of the newest leadership
        self._stopping = threading.Event()
        self._thread = background_thread("bagua-scheduler", self._run, self._ended)
        self.account = QueueAccount()
        self.leads = False

    def start(self) -> None:
        """Starts the thread. Raises StoreUnavailable."""
        self._mirror.start()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(STAND_TIMEOUT_S + 5.0)
        self._mirror.stop()

    def _key_changed(self, changes: tuple[Change, ...]) -> None:
        for change in changes:
            if change.key == cluster_keys.SCHEDULER:
                self._holders_lease_id = change.lease_id
                self._holder = None if change.value is None else change.create_revision
        self._inbox.put(None)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                won = self._stand()
                if won is not None:
                    self._lead(won)
            except InfrastructureLost as error:
                if str(error) != self._outage:  # each attempt of a long outage says the same
                    self._outage = str(error)
                    log.info("scheduler: %s; trying again", error)
                self._stopping.wait(TRY_AGAIN_S)
            except BaguaError as error:  # a right that was withdrawn, a request that etcd does not take
                self._say(f"this node can't schedule, so another may: {error}")
                self._give_up()
                self._stopping.wait(REFUSED_AGAIN_S)
            except Exception as error:  # our bug may depend on the store's content, which changes
                bug = describe(error)
                if bug != self._bug:
                    self._bug = bug
                    log.exception("bug: scheduling raised")
                    self._say(
                        f"this node can't schedule: a bug ({shortened(bug)}); another may, and it tries again"
                    )
                self._give_up()
                self._stopping.wait(REFUSED_AGAIN_S)

    def _ended(self, end: OperationEnd[None]) -> None:
        if isinstance(end, Failed):
            self._say(f"this node schedules no more, so another may: {end.reason}; restart the daemon")
            self._give_up()

    def _give_up(self) -> None:
        """Gives the scheduler's key up. Our lease is kept for the node's other keys, so without this the key would stay
        without a scheduler."""
        self._won = None
        self._leased.remove(cluster_keys.SCHEDULER)

    def _stand(self) -> int | None:
        """Stands for election, and returns the create revision of the key that we hold; None once there is reason to
        look again."""
        if self._is_anothers(self._holder):
            self._inbox.get()  # until the key changes, or we stop
            if self._holder is not None:
                return None
        if self._stopping.is_set():
            return None
        # Ours already after an outage that ended our decisions but not our lease: then we go on.
        won = self._leased.put_if_absent(cluster_keys.SCHEDULER, self._value, STAND_TIMEOUT_S)
        self._won = won
        if won is None and not self._is_anothers(self._holder):
            self._stopping.wait(TRY_AGAIN_S)  # our mirror has yet to hear of the winner
        return won

    def _is_anothers(self, holder: int | None) -> bool:
        """Tells whether another daemon has the key. A key on our lease is ours, even if our election got no answer."""
        if holder is None or holder == self._won:
            return False
        return self._holders_lease_id != self._leased.lease_id

    # -- the scheduler itself

    def _lead(self, won: int) -> None:
        self._say("this node schedules the cluster's jobs")
        self._outage = ""
        self.leads = True
        self._watch = LoopWatch()
        self.account.begin()
        picture = ClusterPicture(time.monotonic(), self._say)
        tidied: frozenset[tuple[str, int]] = frozenset()
        news: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        inbox, self._inbox = self._inbox, news  # the key's mirror and the cluster's wake the same loop
        mirror = PrefixMirror(self._store, cluster_keys.EVERYTHING, news.put)
        try:
            mirror.start()  # may take longer than a turn of the loop
            self._watch.start(
                self._is_stuck,
                lambda failed: self._say(f"the watch over the scheduler's loop failed: {failed.reason}"),
            )
            fence = create_revision_is(cluster_keys.SCHEDULER, won)
            retention = JobRetention(
                self._store, picture, mirror, fence, self._policy, self._say, self._watch.turned
            )
            again_s: float | None = 0.0
            overtaken, is_full = 0, False
            while not self._stopping.is_set():
                due_s = retention.due_s if again_s is None else min(again_s, retention.due_s)
                changed = self._hear(news, picture, due_s)
                if self._stopping.is_set():
                    return
                if picture.scheduler_revision != won:
                    self._say("another node schedules now")
                    return
                if picture.was_set_back:  # our key may be in the backup, so no election follows
                    self._say("etcd was set back to an earlier state; the cluster is read anew")
                    return
                retention.tidy(time.monotonic())
                if changed or (again_s is not None and time.monotonic() >= again_s):
                    try:
                        written, again_s = self._decide(picture, won)
                        tidied = self._remove_key_pairs(picture, won, tidied)
                    except StoreFull as error:
                        # Not the end of this scheduler: its successor would not be elected, and would know no
                        # revision that is old enough to compact to.
                        if not is_full:
                            self._say(f"{error}; jobs stay as they are until it has room")
                        is_full, again_s = True, time.monotonic() + TRY_AGAIN_S
                        continue
                    is_full = False
                    overtaken = 0 if written else overtaken + 1
                    if overtaken == MOST_OVERTAKEN:
                        self._say(f"orders were refused {overtaken} times in a row; the cluster is read anew")
                        return
        finally:
            self._watch.stop()
            self.leads = False
            self.account.begin()
            self._inbox = inbox
            mirror.stop()

    def _is_stuck(self, is_first: bool) -> None:
        """Gives the scheduler's key up, from the watch's thread. The loop finds the key gone once it goes on, and each
        of its writes compares the key."""
        if is_first:
            self._leased.remove(cluster_keys.SCHEDULER)
            self.leads = False
            self._say(
                f"the scheduler's loop has waited for {STUCK_AFTER_S:g} s or more, as for a disk that does not answer; "
                "another node may schedule"
            )

    def _remove_key_pairs(
        self, picture: ClusterPicture, won: int, tidied: frozenset[tuple[str, int]]
    ) -> frozenset[tuple[str, int]]:
        """Removes the key pairs of jobs that have ended and were left since `tidied`; returns the jobs that are tidy
        now.

        An agent that is killed, or lost with its node, removes nothing; and one that was starting when its job was
        stopped may have written the pair after the outcome.
        """
        left = picture.left_jobs()
        if left - tidied:
            there = {kv.key for kv in self._store.get_prefix(SECRETS_PREFIX)[0]}
            for job_id, _ in sorted(left - tidied):
                self._watch.turned()
                keys = JobKeys(job_id)
                if keys.identity in there:
                    fence = create_revision_is(cluster_keys.SCHEDULER, won)
                    remove_unused_identity(self._store, keys, fence)
        return left

    def _hear(
        self, news: queue.SimpleQueue[_Message], picture: ClusterPicture, again_s: float | None
    ) -> bool:
        """Waits for news, for the time or for a tick of the watch, and returns whether anything that matters was
        heard."""
        changed = False
        self._watch.turned()
        left_s = TICK_S if again_s is None else again_s - time.monotonic()
        try:
            message = news.get(timeout=min(TICK_S, max(0.0, left_s)))
            while True:
                if message:
                    changed |= picture.take(message, time.monotonic())
                message = news.get_nowait()
        except queue.Empty:
            return changed

    def _decide(self, picture: ClusterPicture, won: int) -> tuple[bool, float | None]:
        """Plans and writes. Returns whether all was written, and when to look again without news."""
        now_s = time.monotonic()
        view = picture.view()
        made = plan(view, now_s, self._policy)
        try:
            nonces = {job.job_id: job.nonce for job in view.submissions}
            written = self._write(made, nonces, picture, won)
        except OutcomeUnknown as error:
            log.info("scheduler: %s", error)
            written = False
        if not written:
            return False, now_s + TRY_AGAIN_S  # the echo of whatever overtook us is on its way
        self.account.decided(view, made, time.time())
        for name, node in view.nodes.items():
            gone = not node.present and now_s >= node.absent_since_s + self._policy.node_lost_s
            if gone and not view.orders.get(name):
                picture.forget_node(name)
        return True, made.again_at_s

    def _write(self, made: Plan, nonces: Mapping[str, str], picture: ClusterPicture, won: int) -> bool:
        """Writes the plan's outcomes and orders, and returns whether all were written. nonces: of submissions, by
        job."""
        fence = create_revision_is(cluster_keys.SCHEDULER, won)
        for job_id, outcome in made.outcomes.items():
            key = cluster_keys.outcome(job_id)
            nonce, now_unix_s = nonces.get(job_id, ""), time.time()
            value = write_outcome(outcome, now_unix_s, nonce)
            unwritten = [fence, absent(key), *([absent(cluster_keys.removal(nonce))] if nonce else [])]
            self._watch.turned()
            if not self._store.transact(unwritten, [Put(key, value)]).succeeded:
                return False
            picture.took_outcome(job_id, replace(outcome, ended_unix_s=now_unix_s))
            self.account.ended(outcome.end)
            self._say(f"job {job_id} {outcome.end.name.lower()}: {outcome.reason}")
        for number, chunk in enumerate(_chunks(made.orders, NODES_IN_A_WRITE)):
            self._failpoints.reach("orders.before", number)
            conditions: list[Compare] = [fence]
            writes: list[Put] = []
            for node_name, orders in chunk.items():
                key = cluster_keys.orders(node_name)
                conditions.append(mod_revision_is(key, picture.order_revision(node_name)))
                writes.append(Put(key, write_orders(orders)))
            self._watch.turned()
            answer = self._store.transact(conditions, writes)
            self._failpoints.reach("orders.after", number)
            if not answer.succeeded:
                return False
            for node_name, orders in chunk.items():
                picture.took_order(node_name, orders, answer.revision)
        return True


def _chunks(
    orders: Mapping[str, tuple[OrderView, ...]], size: int
) -> Iterator[dict[str, tuple[OrderView, ...]]]:
    left = iter(sorted(orders.items()))
    while chunk := dict(islice(left, size)):
        yield chunk
