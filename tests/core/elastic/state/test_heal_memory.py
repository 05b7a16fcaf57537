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


def system(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_the_tightest_bound_counts(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    system(tmp_path, {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable:   80 kB\n"})
    assert available_bytes(tmp_path) == 80 * 1024
    mounts = "29 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"
    system(tmp_path, {"proc/self/cgroup": "0::/jobs/one\n", "proc/self/mountinfo": mounts})
    system(tmp_path, {"sys/fs/cgroup/jobs/one/memory.max": "max\n"})
    assert available_bytes(tmp_path) == 80 * 1024
    system(
        tmp_path,
        {
            "sys/fs/cgroup/jobs/memory.max": "50000\n",
            "sys/fs/cgroup/jobs/memory.current": "30000\n",
            "sys/fs/cgroup/jobs/memory.stat": "anon 1\ninactive_file 10000\n",
        },
    )
    assert available_bytes(tmp_path) == 30000


@pytest.mark.parametrize("beside", ["", "0::/jobs\n"], ids=["version 1", "hybrid"])
def test_limits_of_version_1_count(tmp_path: Path, beside: str) -> None:
    mounts = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n" if beside else ""
    group = "sys/fs/cgroup/memory/jobs"
    unlimited = "9223372036854771712\n"
    system(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable:   80 kB\n",
            "proc/self/cgroup": f"4:memory:/jobs/one\n{beside}",
            "proc/self/mountinfo": f"35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n{mounts}",
            f"{group}/one/memory.limit_in_bytes": unlimited,
            f"{group}/one/memory.usage_in_bytes": "20000\n",
            f"{group}/memory.limit_in_bytes": "50000\n",
            f"{group}/memory.usage_in_bytes": "30000\n",
            f"{group}/memory.stat": "inactive_file 1\ntotal_inactive_file 10000\n",
        },
    )
    assert available_bytes(tmp_path) == 30000
    system(tmp_path, {f"{group}/memory.use_hierarchy": "0\n"})
    assert available_bytes(tmp_path) == 80 * 1024


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
