"""etcd does not answer a submission, or answers late: it is submitted once, and its submitter gets no false answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bagua_agent.base.errors import InfrastructureLost, StoreUnavailable, UserError
from bagua_agent.cluster_client import cluster_requests
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import KeyValue, Store, Transaction
from bagua_agent.etcd.keys import JobKeys
from bagua_contract import cluster_pb2 as pb
from tests.agent.cluster_state.test_odd_records import submission
from tests.agent.service.meddled_store import Meddled, no_answer, with_long_timeouts
from tests.agent.service.test_job_retention import end

KEY = cluster_keys.submission("demo")
LOOK_FIRST = "it is not known whether job 'demo' was submitted, .*`bagua-launch list`"


class Late(Meddled):
    """The first transaction gets no answer, and is done behind the next read, or before the next transaction."""

    late: Callable[[], object] | None = None
    is_first = True

    def transact(self, *given: Any, **named: Any) -> Transaction:
        if self.is_first:
            self.is_first = False
            self.late = lambda: super(Late, self).transact(*given, **named)
            no_answer()
        self._arrive()
        return super().transact(*given, **named)

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        found = super().get(key, timeout_s)
        self._arrive()
        return found

    def _arrive(self) -> None:
        late, self.late = self.late, None
        if late is not None:
            late()


def at_first(*steps: Callable[[], object]) -> Callable[[], object]:
    """One of them each time, then nothing."""
    left = iter(steps)
    return lambda: next(left, lambda: None)()


def submit(store: Store) -> None:
    cluster_requests.submit(store, pb.Submission.FromString(submission("demo")))


def submitted(store: Store) -> Sequence[KeyValue]:
    return store.get_prefix(cluster_keys.SUBMISSIONS)[0]


def test_a_submission_that_never_came_is_sent_again(plain_store: Store) -> None:
    store = Meddled(with_long_timeouts(plain_store))
    store.before = at_first(no_answer)
    submit(store)
    assert [kv.key for kv in submitted(plain_store)] == [KEY]


def test_a_submission_that_came_late_is_done_once(plain_store: Store) -> None:
    submit(Late(with_long_timeouts(plain_store)))
    assert [(kv.key, kv.version) for kv in submitted(plain_store)] == [(KEY, 1)]


def test_a_submission_that_was_changed_before_its_answer_was_missed_is_its_own(plain_store: Store) -> None:
    store = Meddled(with_long_timeouts(plain_store))

    def scaled_then_lost() -> None:
        assert cluster_requests.scale_submitted(plain_store, "demo", 3, 4) is not None
        no_answer()

    store.after = at_first(scaled_then_lost)
    submit(store)
    (found,) = submitted(plain_store)
    assert pb.Submission.FromString(found.value).max_nodes == 4


def test_a_submission_that_has_ended_or_is_removed_already_is_its_own(plain_store: Store) -> None:
    for removed in (False, True):
        store = Meddled(with_long_timeouts(plain_store))

        def ended_then_lost(removed: bool = removed) -> None:
            end(plain_store, "demo")
            if removed:
                cluster_requests.delete(plain_store, "demo", 1.0)
            no_answer()

        store.after = at_first(ended_then_lost)
        submit(store)
        assert len(submitted(plain_store)) == (not removed)
        if not removed:
            cluster_requests.delete(plain_store, "demo", 1.0)


def test_a_job_of_others_is_still_refused(plain_store: Store) -> None:
    submit(plain_store)
    store = Meddled(with_long_timeouts(plain_store))
    store.before = at_first(no_answer)
    with pytest.raises(UserError, match="there is a job 'demo' already"):
        submit(store)
    assert [kv.version for kv in submitted(plain_store)] == [1]


def test_an_outcome_that_stays_unknown_is_reported_with_what_to_do(plain_store: Store) -> None:
    store = Meddled(with_long_timeouts(plain_store))
    store.before = no_answer
    with pytest.raises(InfrastructureLost, match=LOOK_FIRST):
        submit(store)
    assert store.transactions == 10


def test_an_etcd_that_goes_away_after_an_unknown_outcome_is_reported_so_too(plain_store: Store) -> None:
    def away() -> None:
        raise StoreUnavailable("it is away, as the test wants")

    store = Meddled(with_long_timeouts(plain_store))
    store.before = at_first(no_answer, away)
    with pytest.raises(InfrastructureLost, match=LOOK_FIRST + ".*it is away"):
        submit(store)
    store.before = at_first(away)
    with pytest.raises(StoreUnavailable, match=r"^it is away"):
        submit(store)


def test_a_removal_that_came_late_is_no_unknown_job(plain_store: Store) -> None:
    submit(plain_store)
    end(plain_store, "demo")
    store = Late(with_long_timeouts(plain_store))
    # the read behind the unknown outcome finds no removal yet
    assert "is removed" in cluster_requests.delete(store, "demo", 1.0)
    assert not submitted(plain_store) and plain_store.get(JobKeys("demo").spec) is None
