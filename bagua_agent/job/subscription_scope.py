"""Keeps the subscription at the scope that the situation calls for, and holds back an election until the whole state
was read.

large_jobs/scope.py decides the scope. Called from the loop's thread only.
"""

from __future__ import annotations

from bagua_agent.job.membership_driver import JobMembership
from bagua_agent.job.messages import LeadershipReported, ScopeFollowed
from bagua_agent.job.subscription import JobSubscription
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.leadership.reports import Elected
from bagua_agent.lost_store.lost_keys import LostKeys
from bagua_agent.lost_store.recreation import nonce_of


class SubscriptionScope:
    def __init__(
        self, job: JoinedJob, subscription: JobSubscription, membership: JobMembership, lost_keys: LostKeys
    ) -> None:
        self._job = job
        self._subscription = subscription
        self._membership = membership
        self._lost_keys = lost_keys
        self._elected: Elected | None = None  # and the whole picture is yet to be seen
        job.seen.take_scope(whole=subscription.whole)

    def too_little_to_judge(self) -> bool:
        """Tells whether there is another job's spec, and the state of its workers is not read yet."""
        return not self._subscription.whole and self._strange_spec()

    def look_around(self) -> None:
        """Adapts the subscription: what this agent is to see may have changed."""
        seen = self._job.seen
        if seen.leader is not None and seen.leader.agent_id != self._job.agent_id:
            self._elected = None  # and lost again meanwhile
        self._subscription.look(
            leads=self._membership.leading or self._elected is not None,
            strange_spec=self._strange_spec(),
            nodes=len(seen.view.agents),
        )
        seen.take_scope(whole=self._subscription.whole)

    def reported(self, message: LeadershipReported, now_s: float) -> None:
        if isinstance(message.report, Elected) and not self._subscription.whole:
            self._elected = message.report
        else:
            self._membership.take(message.report, now_s)
        self.look_around()

    def followed(self, message: ScopeFollowed, now_s: float) -> None:
        """Takes over a scope that is followed now. Once the whole state was read, checks for lost keys and takes up an
        election that was held back. Raises JobReplaced."""
        self._subscription.followed(message)
        self._job.seen.take_scope(whole=self._subscription.whole)
        if not self._subscription.whole:
            return
        self._lost_keys.look(now_s)
        elected, self._elected = self._elected, None
        if elected is not None:
            self._membership.take(elected, now_s)

    def _strange_spec(self) -> bool:
        stands = self._subscription.value(self._job.keys.spec)
        return stands is not None and nonce_of(stands) != self._job.seen.spec.nonce
