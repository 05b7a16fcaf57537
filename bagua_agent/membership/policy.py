"""The numbers that membership is decided with, and why each is what it is.

The one home of these defaults: command line, file and environment override fields of this class.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Policy:
    # From the last node that became complete, once there are enough: long enough that nodes started by one
    # command all get into generation 1, short enough that nobody notices the wait.
    last_call_s: float = 0.3
    # From a node's first ready worker to its last: imports of one host differ by about a second. A node
    # that comes in twice costs two changes; one stuck worker must not keep the others out.
    node_window_s: float = 2.0
    # An unreachable holder of the state comes back within a lease and a reboot of its switch, or not at
    # all. Longer keeps newcomers' machines idle for nothing.
    holder_timeout_s: float = 60.0
    # As torchrun: a script that raises is broken until the user says otherwise.
    max_restarts: int = 0
    # Without limit: a preempted node may come back in hours, and waiting costs only the machines.
    below_minimum_timeout_s: float | None = None
    # A live agent answers in milliseconds. Half a second outlasts a garbage collection or a burst on the
    # network, and keeps the whole recovery from a silent host within a second.
    probe_window_s: float = 0.5
    # After an election members whose keys are missing may only be putting them again (etcd was away).
    # About one lease; a suspicion cuts it short, so a real loss that hurts anybody does not wait for it.
    election_grace_s: float = 2.0
    # A confirmed death whose keys still stand: the removal failed, so ask again, about once a second.
    removal_retry_s: float = 1.0
    # A refused write is mostly explained by a newer record a moment later; without one, try again.
    write_retry_s: float = 0.2
    # First crash before a worker's first step: again at once (a port in use). Then doubling from this.
    respawn_first_delay_s: float = 0.5
    # A crash loop costs little at two starts a minute, and mends soon once its cause is gone.
    respawn_longest_delay_s: float = 30.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, not {self.max_restarts}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and value is not None and value < 0:
                raise ValueError(f"{field.name} must not be negative, not {value}")
