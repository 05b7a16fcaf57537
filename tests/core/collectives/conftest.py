"""Lets bagua's functions act for the worker of their thread."""

from __future__ import annotations

import threading

import pytest

from bagua_core.elastic.step import runtime
from tests.core.elastic.worlds_of_workers import Worker


@pytest.fixture(autouse=True)
def engine_of_thread(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    local = threading.local()
    monkeypatch.setattr(runtime, "engine", lambda: local.engine)
    monkeypatch.setattr(Worker, "thread", local, raising=False)
    return local
