"""Runs simulated jobs in the order of the runtime's own queue (communication/reduction/operation_queue.py).

Which job goes on when decides how communication and compression overlap. That code is run here and not imitated: jobs
are generators as there, but what they yield moves a simulated clock instead of waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, cast

from bagua_core.communication.communicator import AbortFlag, Communicator, Pending
from bagua_core.communication.devices import device_order

# private: no program beside the simulator drives an operation queue without its thread
from bagua_core.communication.reduction.operation_queue import _Batch, _Ticket
from benchmarks.scaling.steps.timeline import Clock, Times

Job = Generator[Pending, None, None]


class Arrival(Pending):
    """An operation that is complete at `at`; following it moves the operation queue's clock there."""

    def __init__(self, clock: Clock, at: Times) -> None:
        self._clock = clock
        self._at = at

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        self._clock.wait(self._at)

    def is_done(self) -> bool:
        return True


class _Stub:
    """In place of a communicator: a ticket asks it for nothing but the flag."""

    def __init__(self) -> None:
        self.abort_flag = AbortFlag()


class SimulatedQueue:
    """clock: of the operation queue's thread."""

    def __init__(self, nodes: int) -> None:
        self.clock = Clock(nodes)
        self._batch = _Batch()
        self._communicator = cast(Communicator, _Stub())
        self._tickets: list[Any] = []

    def launch(self, at: Times, job: Job) -> None:
        """The script's threads launch `job` at these moments."""
        self.clock.wait(at)
        ticket = _Ticket(self._communicator, job, lambda: None, device_order.HOST, ())
        self._tickets.append(ticket)
        self._batch.begin(ticket)

    def flush(self, at: Times) -> Times:
        """The script's threads wait for all jobs from these moments on. Returns when they have ended.

        Raises what a job raised.
        """
        self.clock.wait(at)
        self._batch.run_to_the_end()
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wait()
        return self.clock.at
