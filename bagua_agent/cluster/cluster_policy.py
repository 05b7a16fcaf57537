"""The numbers that service mode decides with, each with its reason. The only place of these defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class ClusterPolicy:
    # An upgraded daemon is back within seconds, one that its watchdog ends within ten; a job notices a dead node by
    # itself long before, so waiting costs only the replacement some seconds.
    node_lost_s: float = 15.0
    # After an election, and after the store lost its keys: daemons put back what they remember within a second of
    # their watch's news. Orders stand meanwhile, so nothing but new jobs waits.
    settle_s: float = 3.0
    # A unit that ends at once is started again soon the first time (a port in use), then ever later.
    unit_first_delay_s: float = 1.0
    unit_longest_delay_s: float = 60.0
    # With the delays above the node had fifteen seconds to mend; a missing account or a broken GPU does not.
    failures_before_left_out: int = 5
    # The person who repairs a node rarely tells the scheduler, so an excluded node gets another chance by itself.
    left_out_s: float = 600.0
    # A unit that ran so long works; when it ends after that, counting begins anew.
    unit_steady_s: float = 60.0
    # Beyond the job's own shutdown timeout: its agent ends workers within that, and then flushes its final writes.
    kill_grace_s: float = 30.0
    # Killed processes are gone within a second, unless the kernel holds them: then their slots stay
    # taken and people are informed.
    stuck_after_kill_s: float = 60.0
    # From a job's result until its units are asked to leave: they end by themselves, as soon as logs are written.
    wind_down_s: float = 30.0
    # A job that ended is removed once it is older than this, or once as many have ended since.
    ended_kept_s: float = 30 * DAY_S
    ended_kept_jobs: int = 200
    # A removal is kept for longer than any daemon that was out of touch puts removed keys back.
    removal_kept_s: float = 3 * DAY_S
    put_back_within_s: float = 2 * DAY_S
    # Empty orders of a node that is gone are kept as long, for a daemon that comes back with others in its memory.
    orders_kept_s: float = 3 * DAY_S
    # How often ended jobs are looked at: nothing waits for it.
    retention_every_s: float = 60.0
    # How often a node looks for logs of jobs that were removed while it was away; far more often than removal_kept_s,
    # for which a job must be unknown until then.
    logs_tidied_every_s: float = 3600.0
    # etcd keeps every value that a key ever had until it is compacted. A watcher that is away for less than
    # this receives the changes; after a longer outage it reads all keys again.
    compact_every_s: float = 300.0
    history_kept_s: float = 600.0

    def __post_init__(self) -> None:
        if self.failures_before_left_out < 1:
            raise ValueError(
                f"failures_before_left_out must be at least 1, not {self.failures_before_left_out}: "
                "a unit must be allowed to fail before its node is left out"
            )
        if self.ended_kept_jobs < 0:
            raise ValueError(f"ended_kept_jobs must not be negative, not {self.ended_kept_jobs}")
        if self.put_back_within_s > self.removal_kept_s:
            raise ValueError(
                "put_back_within_s must not exceed removal_kept_s: a removed job would come back"
            )
        if self.put_back_within_s > self.orders_kept_s:
            raise ValueError(
                "put_back_within_s must not exceed orders_kept_s: orders that were taken from a node would come back"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and value < 0:
                raise ValueError(f"{field.name} must not be negative, not {value}")
