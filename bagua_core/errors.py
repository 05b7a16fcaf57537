"""One tree of errors for the core, divided by who must act.

A message names the value and what to do next. A class that scripts may meet also derives from the error of Python's
that it is a kind of. Classes are defined beside the code that raises them; those of several modules are here.
"""

from __future__ import annotations


class BaguaError(Exception):
    """The root of the tree. What derives from it directly is caught within the core."""


class UserError(BaguaError):
    """The user's mistake: a script, an argument, a variable, a part that is not installed."""


class PeerViolation(BaguaError):
    """A peer sent, or a file holds, what the protocol or the format does not allow."""


class InfrastructureLost(BaguaError):
    """Something outside this process is away or failed: a peer, the network, a store, a disk."""


class InternalError(BaguaError):
    """A defect of Bagua. Carries what is needed to find it."""


class LateWorkerError(UserError, RuntimeError):
    """A worker came while the job trains, and its script needs what only the job's first workers have together."""


class TrainingOver(UserError, RuntimeError):
    """A loader, a wrapped model or the job itself was used after bagua.shutdown()."""


class NotDeterministicError(UserError, ValueError):
    """A deterministic job was asked for something whose bits would depend on the number of workers."""


class LeaveInterrupt(KeyboardInterrupt):
    """This worker has left the job at a step boundary because of a Ctrl-C.

    `except KeyboardInterrupt` and `finally` work as in a plain process. Not caught, it ends the worker with exit code
    130 and without a traceback: see run_script.py, which knows the attribute alone.
    """

    bagua_is_orderly = True
