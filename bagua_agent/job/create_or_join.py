"""Joins the job of this id, creates it if it is absent, or replaces one that has ended."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from bagua_agent.base.errors import InfrastructureLost, JobIsOver, StoreFull, UserError
from bagua_agent.base.plain_text import in_utf8
from bagua_agent.base.signals import SignalsToInbox
from bagua_agent.base.sizes import ANY_SIZE, SizePolicy
from bagua_agent.cluster import cluster_records
from bagua_agent.config.job_config import JobConfig, workers_of_a_replica
from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.client import Compare, KeyValue, Put, Store, absent, mod_revision_is, none_below
from bagua_agent.etcd.keys import JobKeys, Removal
from bagua_agent.history import job_history
from bagua_agent.job.new_identity import make_identity
from bagua_agent.lost_store.recreation import nonce_of
from bagua_agent.node.script.script_mode import Mode
from bagua_agent.rpc.job_identity import JobIdentity
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import PROTOCOL_VERSION, read_message

FULL_STORE_RETRY_S = 1.0
OLD_AGENTS_LEAVE_S = 30.0  # they go within moments of the result; their leases bound it


@dataclass(frozen=True, slots=True)
class JobFound:
    """The job that this agent joins. nodes: how many agents there were. before: the result of the job of this id that
    this agent made room for."""

    spec: pb.JobSpec
    identity: JobIdentity
    nodes: int
    before: pb.Result | None = None


def find_job(
    store: Store, keys: JobKeys, config: JobConfig, node_name: str, mode: Mode, signals: SignalsToInbox
) -> JobFound | None:
    """Returns the job, found or written (`ensure_job`); None: a signal came first. An etcd that is full is waited for,
    as one that is away: up to join_timeout_s. The store reports it."""
    deadline_s = None if config.join_timeout_s is None else time.monotonic() + config.join_timeout_s
    while signals.first is None:
        try:
            return ensure_job(store, keys, config, node_name, mode)
        except StoreFull as error:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise StoreFull(
                    f"{error} (tried for {config.join_timeout_s:g} s; --rdzv-conf join_timeout=S changes that)"
                ) from error
        signals.wait(FULL_STORE_RETRY_S)
    return None


def ensure_job(
    store: Store, keys: JobKeys, config: JobConfig, node_name: str = "", mode: Mode = Mode.LIVE
) -> JobFound:
    """Returns the job; the first agent writes it. A job of this id that has ended is replaced.

    With `once`, a job that succeeded is not: the agent of a node that comes late would run it again, alone. Nor is a
    submission's job, however it ended: its units may start again before the scheduler has read the result. It begins
    with the numbers of nodes that its submission has now: they may have changed since the unit was made.

    mode: the initial mode of a job that is written here.

    Raises JobIsOver (the job has ended and is not replaced), UserError (another protocol, what can't be read, a job
    whose agents do not go, or that was removed), InfrastructureLost, StoreFull if etcd can't take the job now.
    """
    replica_size = workers_of_a_replica(config)
    if replica_size > 1:
        mode = Mode.LIVE  # parts of a model can't be started again one by one
    made: JobIdentity | None = None
    before: pb.Result | None = None
    removal = [cluster_keys.removal(config.submission)] if config.submission else []
    submission = [cluster_keys.submission(config.job_id)] if config.submission else []
    for _ in range(20):  # each round either succeeds or another agent made progress
        asked = [keys.result, keys.spec, keys.identity, *removal, *submission]
        found, nodes = store.get_and_count(asked, keys.agents)
        if any(key in found for key in removal):
            raise UserError(f"job {config.job_id!r} was removed from the cluster; submit it again")
        if keys.result in found:
            before = read_message(pb.Result, found[keys.result].value)  # None: it ended the job all the same
            if config.submission:
                raise _over(config.job_id, before)
            if config.once and before is not None and before.outcome == pb.Result.SUCCEEDED:
                raise _succeeded(config.job_id)
            _make_room(store, keys, found[keys.result])
            continue
        stands = found.get(keys.spec)
        spec = None if stands is None else _spec(keys, stands.value)
        if spec is not None and keys.identity in found:
            _check_replica_size(keys, max(1, spec.replica_size), replica_size)
            return JobFound(spec, _identity(keys, found[keys.identity].value), nodes, before)
        made = made or make_identity(keys.job_id)
        if stands is not None:
            # The key pair was removed. The present agents have the old one, so until they are gone the joiners
            # can't be probed, nor probe: their leases show whether they live.
            still = mod_revision_is(keys.spec, stands.mod_revision)
            try:
                store.transact([still, absent(keys.identity)], [Put(keys.identity, made.encode())])
            except StoreFull:
                raise
            except InfrastructureLost:
                pass  # the next round reads whether it was done
            continue
        spec = pb.JobSpec(
            protocol=PROTOCOL_VERSION,
            nonce=secrets.token_hex(8),
            max_restarts=config.max_restarts,
            script=in_utf8(config.command.target),
            mode=mode.value,
            size_policy=config.size_policy.record,
            replica_size=0 if replica_size == 1 else replica_size,
            autotune=autotune_of(config),
        )
        event = job_history.created(str(config.command))
        conditions = [absent(keys.spec), absent(keys.result), *map(absent, removal)]
        # `scale` writes the submission alone while there is no job
        conditions += [mod_revision_is(k, found[k].mod_revision if k in found else 0) for k in submission]
        desired = _desired(config, next((found[k] for k in submission if k in found), None))
        try:
            store.transact(
                conditions,
                [
                    Put(keys.spec, spec.SerializeToString()),
                    Put(keys.identity, made.encode()),
                    Put(keys.desired, desired.SerializeToString()),
                    Put(keys.event(event.name), event.encode(node_name, time.time())),
                ],
            )
        except StoreFull:
            raise  # certainly not done, nor would it be in the next round
        except InfrastructureLost:
            continue  # unknown whether it was done: the next round reads
    raise UserError(f"job {config.job_id!r} changes hands all the time; choose another --rdzv-id")


def _desired(config: JobConfig, submission: KeyValue | None) -> pb.Desired:
    """Returns the numbers of nodes for a new job. submission: the record under the job's name, which may be another
    one's; None: absent."""
    least, most = config.min_nodes, config.max_nodes
    if submission is not None:
        try:
            record = cluster_records.parse_submission(submission.value, config.job_id)
        except cluster_records.UnreadableRecord:
            record = None
        if record is not None and cluster_records.nonce_of(record) == config.submission:
            least, most = record.min_nodes, record.max_nodes
    return pb.Desired(min_nodes=least, max_nodes=most)


def autotune_of(config: JobConfig) -> pb.Autotune | None:
    """Returns the options of autotuning for the spec; None if it is off."""
    if not config.autotune_level:
        return None
    return pb.Autotune(
        level=config.autotune_level,
        max_samples=config.autotune_max_samples,
        confidence_s=config.autotune_confidence_s,
        warmup_s=config.autotune_warmup_s,
        algorithms=config.autotune_algorithms,
    )


def _check_replica_size(keys: JobKeys, of_job: int, of_node: int) -> None:
    """Checks the node's replica size, with which its workers start. Raises UserError if it is not the job's."""
    if of_job != of_node:
        has = f"has replicas of {of_job} workers" if of_job > 1 else "has no replicas of several workers"
        raise UserError(
            f"job {keys.job_id!r} {has}, and this node was started with --replica-size {of_node}; "
            f"start it with --replica-size {of_job}"
        )


def size_policy_of(spec: pb.JobSpec) -> SizePolicy:
    """Returns the job's policy of sizes. If what the spec has can't be read, it is as if the job had none; that is
    reported where the spec is followed."""
    try:
        return SizePolicy.of(spec.size_policy)
    except ValueError:
        return ANY_SIZE


def remove_unused_identity(store: Store, keys: JobKeys, *conditions: Compare) -> bool:
    """Removes the job's key pair unless a present agent uses it; a later agent makes another.

    The leader removes it with the result. This is for jobs that end without one. Raises InfrastructureLost, UserError.
    """
    unused = [*conditions, none_below(keys.agents)]
    return store.transact(unused, deletes=keys.removed(Removal.WITH_RESULT), repeatable=True).succeeded


def key_pair_is_current(store: Store, keys: JobKeys, nonce: str, identity: JobIdentity) -> bool:
    """Tells whether the job's key pair is still this agent's one; puts it again where it was removed meanwhile.

    To be asked whenever this agent's own key was written: before, the last agent that left may have seen no other key
    and removed the pair; from then on, no agent removes it. False: agents that came meanwhile made another pair. A job
    that has ended, or was replaced, is no concern of this function: True. Raises InfrastructureLost where it is to be
    asked again.
    """
    standing = store.get(keys.identity)
    if standing is not None and standing.value == identity.encode():
        return True
    spec = store.get(keys.spec)
    if spec is None or nonce_of(spec.value) != nonce or store.get(keys.result) is not None:
        return True
    if standing is not None:
        return False
    unchanged = [absent(keys.identity), absent(keys.result), mod_revision_is(keys.spec, spec.mod_revision)]
    if not store.transact(unchanged, [Put(keys.identity, identity.encode())]).succeeded:
        raise InfrastructureLost(f"{keys.identity} or {keys.spec} was written by others meanwhile")
    return True


def _over(job_id: str, result: pb.Result | None) -> JobIsOver:
    code = 1 if result is None else result.exit_code
    return JobIsOver(
        f"job {job_id!r} is over, so this node has no part in it; submit it under another name to run it again",
        code,
    )


def _succeeded(job_id: str) -> JobIsOver:
    return JobIsOver(
        f"job {job_id!r} has succeeded before this node came, so it is not run again (--once, BAGUA_ONCE); to run it "
        "again, choose another --rdzv-id or leave --once out",
        0,
    )


def _spec(keys: JobKeys, value: bytes) -> pb.JobSpec:
    try:
        spec: pb.JobSpec = pb.JobSpec.FromString(value)
    except DecodeError as error:
        raise _unreadable(keys, keys.spec, error) from error
    if spec.protocol != PROTOCOL_VERSION:
        raise UserError(
            f"job {keys.job_id!r} runs protocol {spec.protocol}, this bagua speaks "
            f"{PROTOCOL_VERSION}; install the job's version"
        )
    return spec


def _identity(keys: JobKeys, value: bytes) -> JobIdentity:
    try:
        return JobIdentity.decode(keys.job_id, value)
    except ValueError as error:
        raise _unreadable(keys, keys.identity, error) from error


def _unreadable(keys: JobKeys, key: str, error: Exception) -> UserError:
    return UserError(
        f"{key} can't be read ({error}); choose another --rdzv-id, or remove what is left of job {keys.job_id!r} "
        f"with `etcdctl del --prefix {keys.prefix}` and `etcdctl del {keys.identity}`"
    )


def make_live(store: Store, keys: JobKeys, nonce: str) -> None:
    """Makes the job live: a worker has opened a session, so the job's workers follow in process. Done twice it does no
    harm.

    Raises InfrastructureLost, also when the spec is gone or changes meanwhile: an agent that puts it again may not know
    of the session, so the caller retries.
    """
    found = store.get(keys.spec)
    if found is None:
        raise InfrastructureLost(f"{keys.spec} is gone, so job {keys.job_id!r} can't be made live")
    try:
        spec = pb.JobSpec.FromString(found.value)
    except DecodeError as error:  # it was overwritten; agents put it again
        raise InfrastructureLost(
            f"{keys.spec} can't be read ({error}), so job {keys.job_id!r} can't be made live"
        ) from error
    if spec.nonce != nonce or spec.mode != pb.JobSpec.RESTART:
        return
    spec.mode = pb.JobSpec.LIVE
    unchanged = [mod_revision_is(keys.spec, found.mod_revision)]
    if not store.transact(unchanged, [Put(keys.spec, spec.SerializeToString())]).succeeded:
        raise InfrastructureLost(f"{keys.spec} was written by others meanwhile")


def _make_room(store: Store, keys: JobKeys, ended: KeyValue) -> None:
    running, _ = store.get_prefix(keys.agents)
    if running:
        # Its agents go within moments of the result; their leases bound it.
        deadline_s = time.monotonic() + OLD_AGENTS_LEAVE_S
        while running and time.monotonic() < deadline_s:
            time.sleep(0.1)  # a rare wait at start-up, before there is any loop to wait in
            running, _ = store.get_prefix(keys.agents)
        if running:
            raise UserError(
                f"job {keys.job_id!r} has ended but {len(running)} agents are still in it; "
                "choose another --rdzv-id"
            )
    # One transaction makes room, of whichever agent is first.
    once = [mod_revision_is(keys.result, ended.mod_revision), none_below(keys.agents)]
    store.transact(once, delete_ranges=keys.ranges, repeatable=True)
