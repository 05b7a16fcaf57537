"""The numbers that membership is decided with, each with its reason.

The only place of these defaults: command line, file and environment override fields of this class.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from bagua_agent.membership.hang import HangLimits


@dataclass(frozen=True, slots=True)
class Policy:
    # From the last node that became complete, once there are enough: long enough that nodes started by one
    # command all get into generation 1, short enough that the wait is not noticed.
    last_call_s: float = 0.3
    # From a node's first ready worker to its last: imports of one host differ by about a second. A node
    # that comes in twice costs two changes; one stuck worker must not keep the others out.
    node_window_s: float = 2.0
    # No agent is left and there is no scheduler: the job is over. Not under a scheduler, which takes nodes away, gives
    # others, and reports itself when a job that was asked to stop has stopped.
    ends_when_all_leave: bool = True
    # An unreachable holder of the state comes back within a lease and a reboot of its switch, or not at
    # all. Longer keeps newcomers' machines idle for nothing.
    holder_timeout_s: float = 60.0
    # As torchrun: a script that raises is broken until the user says otherwise.
    max_restarts: int = 0
    # Without limit: a preempted node may come back in hours, and waiting costs only the machines.
    below_minimum_timeout_s: float | None = None
    # As torchrun's rendezvous. How long a job that never trained waits for another node in place of one whose worker
    # has ended with 0 before it joined. None: without limit.
    join_timeout_s: float | None = 600.0
    # A live agent answers in milliseconds. Half a second outlasts a garbage collection or a burst on the
    # network, and keeps the whole recovery from a silent host within a second.
    probe_window_s: float = 0.5
    # How long keys outlive the last renewal by their agent: two renewals may be lost on the way.
    lease_ttl_s: float = 3.0
    # For each member of a generation that breaks: about the time its report takes where thousands report at once. The
    # leader waits so long for further losses: negligible in a small job, under a second in one of thousands.
    gather_each_s: float = 0.0002
    # For each agent that is asked beside one known to be lost, likewise; never longer than the probe window.
    answer_each_s: float = 0.002
    # A confirmed death whose keys still exist: the removal failed, so ask again, about once a second.
    removal_retry_s: float = 1.0
    # A refused write is mostly explained by a newer record a moment later; without one, try again.
    write_retry_s: float = 0.2
    # A refusal that is not in the store yet: its write failed, so ask again, about once a second.
    refusal_retry_s: float = 1.0
    # A generation that did not work though all its members live is made again at once the first time (a connection was
    # reset), then ever later: a cut between two hosts would otherwise fill the store with generations.
    rebuild_first_delay_s: float = 0.2
    rebuild_longest_delay_s: float = 5.0
    # So many in a row without a commit are no accident: from then on a node is left out. With the delays above that is
    # after about two seconds of trying.
    rebuilds_before_leaving_out: int = 4
    # A node that was left out for that comes back after a while, since cables are plugged in again; each time it costs
    # the others some steps, so it waits twice as long.
    quarantine_first_s: float = 10.0
    quarantine_longest_s: float = 300.0
    # Signals don't draw on the budget, since they come from outside: an operator, a chaos test, another program's need
    # of memory. So many in a row in one slot, without a step in between, come from the script: it takes more memory
    # than the host has.
    most_kills_in_a_row: int = 10
    # From a failure that may end the job to the result: other workers fail within moments, and the first by the clock
    # may be one that only noticed first.
    blame_window_s: float = 0.3
    # So long after a failure that tells of another's end that other end may still explain it: a leader that was lost
    # with its host is missed within a lease, and its successor then asks who else is.
    cause_window_s: float = 10.0
    # First crash before a worker's first step: again at once (a port in use). Then doubling from this.
    respawn_first_delay_s: float = 0.5
    # A crash loop costs little at two starts a minute, and mends soon once its cause is gone.
    respawn_longest_delay_s: float = 30.0
    # With the delays above a slot was given seven seconds to mend by then; a broken GPU does not.
    crashes_before_quarantine: int = 5

    # Who keeps the others waiting is named after so long: most checkpoints and evaluations are shorter, and a person
    # who looks at a job that stands still has not despaired yet.
    hang_notice_s: float = 30.0
    # All wait and no connection is known to be cut: a sum over a slow network may take that long, a lost message
    # longer. It does not limit a copy of the state: a receiver's wait begins anew as long as bytes arrive.
    hang_renew_s: float = 60.0
    # Outlasts the slowest checkpoint that a worker should make while the others wait. None: no worker is ever replaced.
    hang_timeout_s: float | None = 600.0
    # A cut between two hosts: TCP has sent again three times by then, which is no accident on a busy network.
    hang_cut_s: float = 2.0
    # All wait and what they report can't be of one script run alike. That is certain at once; the time is for a worker
    # that ended with 0 a little before all others do.
    disagreement_s: float = 5.0
    # A long usual step has long patience.
    hang_usual_factor: float = 10.0
    # With the doubling from hang_renew_s that is half an hour of trying: the script's collectives do not match.
    hang_most_renewals: int = 4
    # Without a commit in between. One may be an accident of its host, and so may two.
    hang_most_replacements: int = 3
    # Agents save stacks within two seconds, unless a worker doesn't answer; nothing is ended before.
    stacks_first_s: float = 2.0

    @property
    def hang_limits(self) -> HangLimits:
        # who asks for a replacement after 5 s does not want to wait 30 s for its being named
        notice_s = min(self.hang_notice_s, self.hang_timeout_s or self.hang_notice_s)
        return HangLimits(
            usual_factor=self.hang_usual_factor,
            notice_s=notice_s,
            renew_s=self.hang_renew_s,
            cut_s=self.hang_cut_s,
            disagreement_s=self.disagreement_s,
            hang_timeout_s=self.hang_timeout_s,
            most_renewals=self.hang_most_renewals,
            most_replacements=self.hang_most_replacements,
        )

    @property
    def election_grace_s(self) -> float:
        """The time after an election in which members whose keys are missing may only be putting them again, since etcd
        was unavailable. Live agents have done so within one lease; a suspicion cuts the wait short, so it does not
        delay a loss that stops a member."""
        return self.lease_ttl_s

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, not {self.max_restarts}")
        if self.rebuilds_before_leaving_out < 1 or self.crashes_before_quarantine < 1:
            raise ValueError("one failure must be allowed before anybody is left out")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and value is not None and value < 0:
                raise ValueError(f"{field.name} must not be negative, not {value}")
