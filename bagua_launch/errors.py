"""Defines the user's mistakes: each is one line that names the value and the next move."""

from __future__ import annotations

from bagua_agent.base.errors import UserError
from bagua_launch.written_values import WrittenValue


class RequestError(UserError):
    """A request is impossible; str() is the whole line."""


ETCD_MISSING = (
    "--etcd is missing; use --etcd HOST:PORT, or set BAGUA_ETCD. No command reaches a job that shows `store private`: "
    "start it with --nnodes 1:2 on a private network, which shows the store, or with --dashboard for a page"
)


def refuse(written: WrittenValue, what: str, instead: str) -> RequestError:
    return RequestError(f"{written.where} {written.text!r}: {what}; use {instead}")
