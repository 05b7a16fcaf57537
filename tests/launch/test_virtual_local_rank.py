"""Under --virtual-local-rank a script that follows docs/gpu.md asks for a device that it can see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.launched import launch

ROOT = Path(__file__).parents[2]
WORKERS = 2
LIMIT_S = 120

SCRIPT = """
import os
from pathlib import Path
import bagua_core as bagua
import bagua_core.torch_api as original

bagua.init_process_group()
found = [bagua.get_local_rank(), original.get_local_rank(), os.environ["LOCAL_RANK"]]
found.append(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
Path(__file__).with_name("slot-" + os.environ["BAGUA_SLOT"]).write_text(" ".join(map(str, found)))
"""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--virtual-local-rank"], {"slot-0": "0 0 0 4", "slot-1": "0 0 0 7"}),
        ([], {"slot-0": "0 0 0 4,7", "slot-1": "1 1 1 4,7"}),
    ],
    ids=["virtual", "usual"],
)
def test_the_local_rank_is_a_device_that_the_worker_sees(
    flags: list[str], expected: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["--standalone", "--nproc-per-node", str(WORKERS), *flags, str(script)]
    ended = launch(*words, limit_s=LIMIT_S, CUDA_VISIBLE_DEVICES="4,7")
    assert ended.returncode == 0, ended.said
    assert {path.name: path.read_text() for path in tmp_path.glob("slot-*")} == expected
