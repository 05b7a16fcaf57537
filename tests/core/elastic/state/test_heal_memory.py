"""Whether there is memory for a copy beside the state: by given numbers, and by a system's report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bagua_contract.environment import WorkerEnvironmentError
from bagua_core.elastic.state.heal_memory import (
    MARGIN_BYTES,
    available_bytes,
    decide,
    is_out_of_memory,
    limit_bytes_from,
)


@pytest.mark.parametrize(
    ("needed", "available", "limit", "stages"),
    [
        (1000, None, None, True),
        (1000, MARGIN_BYTES + 1000, None, True),
        (1001, MARGIN_BYTES + 1000, None, False),
        (1000, 10 * MARGIN_BYTES, 1000, True),
        (1001, 10 * MARGIN_BYTES, 1000, False),
        (1, None, 0, False),
        (0, 0, 0, False),
    ],
)
def test_the_decision(needed: int, available: int | None, limit: int | None, stages: bool) -> None:
    decision = decide(needed, available, limit)
    assert decision.stages is stages and str(needed) in decision.reason


def test_the_limit_is_read_and_checked() -> None:
    assert limit_bytes_from({}) is None
    assert limit_bytes_from({"BAGUA_STAGING_BYTES": "0"}) == 0
    with pytest.raises(WorkerEnvironmentError, match="BAGUA_STAGING_BYTES='1GB'"):
        limit_bytes_from({"BAGUA_STAGING_BYTES": "1GB"})


def test_the_tightest_bound_counts(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert available_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal: 100 kB\nMemAvailable:   80 kB\n")
    assert available_bytes(tmp_path) == 80 * 1024
    write("proc/self/cgroup", "0::/jobs/one\n")
    write("sys/fs/cgroup/jobs/one/memory.max", "max\n")
    assert available_bytes(tmp_path) == 80 * 1024
    write("sys/fs/cgroup/jobs/memory.max", "50000\n")
    write("sys/fs/cgroup/jobs/memory.current", "30000\n")
    write("sys/fs/cgroup/jobs/memory.stat", "anon 1\ninactive_file 10000\n")
    assert available_bytes(tmp_path) == 30000


def test_this_system_says_something() -> None:
    found = available_bytes()
    assert found is not None and found > 0


def test_failed_allocations_are_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_out_of_memory(RuntimeError("shape '[3]' is invalid"))
    assert not is_out_of_memory(OSError("out of memory"))
