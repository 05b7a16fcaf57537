"""Names of several agents of a job on one host."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack

import pytest

from bagua_agent.node import node_name
from bagua_agent.node.node_name import hold_name


def test_each_agent_of_a_job_has_a_name_of_its_own_and_frees_it() -> None:
    job, other = secrets.token_hex(4), secrets.token_hex(4)
    with ExitStack() as held:
        names = []
        for _ in range(3):
            name, holder = hold_name("h1", job)
            assert holder is not None
            names.append(name)
            held.enter_context(holder)
        assert names == ["h1", "h1-2", "h1-3"]
        name, holder = hold_name("h1", other)
        assert name == "h1" and holder is not None
        holder.close()
    name, holder = hold_name("h1", job)
    assert name == "h1" and holder is not None
    holder.close()


def test_beyond_the_most_names_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_name, "MOST_AGENTS", 1)
    job = secrets.token_hex(4)
    _, first = hold_name("h1", job)
    assert first is not None
    with first:
        assert hold_name("h1", job) == ("h1", None)


def test_where_such_sockets_can_not_be_made_the_host_s_name_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "socket", Refused)
    assert hold_name("h1", "job") == ("h1", None)
