"""The exception that ends a script whose node leaves after Ctrl-C."""

from __future__ import annotations


class LeaveInterrupt(KeyboardInterrupt):
    """This worker has left the job at a step boundary because of a Ctrl-C.

    `except KeyboardInterrupt` and `finally` work as in a plain process. Not caught, it ends the worker with exit code
    130 and without a traceback: see run_script.py, which knows the attribute alone.
    """

    bagua_is_orderly = True
