"""What a worker prints to a terminal that was closed leads nowhere; descriptors that lead elsewhere are left alone."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest

from bagua_core.worker import closed_terminal


def test_only_what_still_leads_to_the_terminal_is_replaced() -> None:
    primary, kept = pty.openpty()
    replaced, closed = os.dup(kept), os.dup(kept)
    terminals = {fd: os.fstat(fd) for fd in (kept, replaced, closed)}
    reader, writer = os.pipe()
    os.dup2(writer, replaced)
    os.close(closed)
    os.close(reader)  # reported for its writers, as the hangup is
    os.close(primary)
    closed_terminal._wait(dict(terminals))
    try:
        os.write(kept, b"nowhere")
        assert os.path.samestat(os.fstat(kept), Path(os.devnull).stat())
        assert os.path.sameopenfile(replaced, writer)
        with pytest.raises(OSError):
            os.fstat(closed)
    finally:
        for fd in (kept, replaced, writer):
            os.close(fd)
