"""The groups that account a process's memory, from what systems of each kind say in /proc/self."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from bagua_contract.memory_cgroup import MemoryCgroups, memory_cgroups

V1_LINES = "12:pids:/user.slice\n4:memory:/user.slice/job\n1:name=systemd:/user.slice/session-1\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
    "39 31 0:36 / /sys/fs/cgroup/pids rw,relatime shared:10 - cgroup cgroup rw,pids\n"
)
UNIFIED_BESIDE = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
V2_MOUNTS = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def groups(version: int, *folders: str) -> MemoryCgroups:
    return MemoryCgroups(version, tuple(PurePosixPath(folder) for folder in folders))


V1_GROUPS = groups(
    1, "/sys/fs/cgroup/memory/user.slice/job", "/sys/fs/cgroup/memory/user.slice", "/sys/fs/cgroup/memory"
)
CASES = {
    "version 1": (V1_LINES, V1_MOUNTS, V1_GROUPS),
    "hybrid, controller in version 1": (
        V1_LINES + "0::/user.slice/session-1\n",
        V1_MOUNTS + UNIFIED_BESIDE,
        V1_GROUPS,
    ),
    "hybrid, controller in version 2": (
        "12:pids:/x\n0::/job\n",
        V1_MOUNTS.replace("rw,memory", "rw,hugetlb") + UNIFIED_BESIDE,
        groups(2, "/sys/fs/cgroup/unified/job", "/sys/fs/cgroup/unified"),
    ),
    "version 2": ("0::/a/b\n", V2_MOUNTS, groups(2, *(f"/sys/fs/cgroup{p}" for p in ("/a/b", "/a", "")))),
    "version 2, own namespace": ("0::/\n", V2_MOUNTS, groups(2, "/sys/fs/cgroup")),
    "several controllers in one mount": (
        "5:hugetlb,memory:/job\n",
        "35 31 0:32 / /cgroup/all rw - cgroup none rw,hugetlb,memory\n",
        groups(1, "/cgroup/all/job", "/cgroup/all"),
    ),
    "a container without a namespace sees its group as the mount's top": (
        "4:memory:/docker/0123\n",
        "35 31 0:32 /docker/0123 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        groups(1, "/sys/fs/cgroup/memory"),
    ),
    "a container's mount shows another part of the hierarchy": (
        "0::/kubepods/pod1/init\n",
        "35 31 0:32 /kubepods/pod2 /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
        groups(2, "/sys/fs/cgroup"),
    ),
    "outside the root of the namespace": ("0::/../..\n", V2_MOUNTS, groups(2, "/sys/fs/cgroup")),
    "a later mount hides an earlier one": (
        "0::/job\n",
        V2_MOUNTS + "50 23 0:26 / /run/cg rw - cgroup2 none rw\n",
        groups(2, "/run/cg/job", "/run/cg"),
    ),
    "a path with a space": (
        "0::/a job\n",
        "29 23 0:26 / /mnt/c\\040g rw - cgroup2 none rw\n",
        groups(2, "/mnt/c g/a job", "/mnt/c g"),
    ),
    "version 1 whose controller is not mounted": (V1_LINES, "22 1 0:20 / /proc rw - proc proc rw\n", None),
    "no groups": ("", "22 1 0:20 / /proc rw - proc proc rw\n", None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_groups_of_a_process(case: str) -> None:
    lines, mounts, expected = CASES[case]
    assert memory_cgroups(lines, mounts) == expected
