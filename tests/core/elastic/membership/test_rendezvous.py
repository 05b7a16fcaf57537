"""The rendezvous of members: the parts that need no second worker."""

from __future__ import annotations

import subprocess
import sys

from tests.lab.wait import HANG_S

PROGRAM = """
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
from bagua_core.elastic.membership.rendezvous import MOST_DESCRIPTORS, allow_descriptors
allow_descriptors()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, MOST_DESCRIPTORS))
"""


def test_a_worker_may_open_as_many_files_as_the_system_allows() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert done.stdout.split() == ["True"]
