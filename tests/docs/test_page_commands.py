"""Jobs of the manual's shell blocks run as they are printed, beside the files that their page names.

A block's mark says how its jobs end and which modules they need (tests/docs/page_blocks.py). Python blocks that need
several workers run in a job of so many.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.block_context import before
from tests.docs.page_blocks import PAGES, PRINTED_ABOVE, ROOT, Block, blocks, commands
from tests.docs.printed_lines import missing, parts
from tests.lab import zygote
from tests.lab.launched import launch

RUN_S = 300
# By the mark's word: exit code, and what the terminal shows. In restart mode scripts report no steps.
ENDS = {
    None: (0, "every worker has committed its last step"),
    "restarts": (0, "succeeded: every worker ended with 0"),
    "stopped": (143, "stopped: every worker left; the checkpoint of step"),
}


def pages_that_run() -> list[object]:
    """Each page with whether its long blocks run; pages of long blocks have the marker."""
    found: list[object] = []
    for page in PAGES:
        for long in sorted({block.long for block in blocks(page) if block.run}):
            name = f"{page.relative_to(ROOT)}{'-long' if long else ''}"
            found.append(pytest.param(page, long, id=name, marks=[pytest.mark.long] if long else []))
    return found


@pytest.mark.parametrize(("page", "long"), pages_that_run())
def test_shell_that_is_marked_runs(page: Path, long: bool, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    said: list[str] = []  # by the commands of the block above
    for block in blocks(page):
        if block.mark == PRINTED_ABOVE and said:
            check_printed(block, said)
        said = []
        if block.mark.startswith("file: "):
            (tmp_path / block.mark.removeprefix("file: ")).write_text(block.text)
        elif block.run is not None and block.long == long:
            if block.run["script"]:
                shutil.copyfile(ROOT / block.run["script"], tmp_path / "train.py")
            needs = (block.run["needs"] or "").split()
            for module in needs:
                if find_spec(module.partition(".")[0]) is None:
                    pytest.skip(f"{module} is not installed")
            for words in commands(block):
                said.append(launched(words, tmp_path, block.run["ends"], needs))
                if "--failpoints" in words:
                    assert "did not happen" in said[-1] and "ended: killed by SIGKILL" in said[-1]


def check_printed(block: Block, said: Sequence[str]) -> None:
    """The lines of a block appear in order; of several commands each prints one part of the block."""
    texts = parts(block.text)
    if len(said) == 1:
        texts = [[line for part in texts for line in part]]
    for part, text in zip(texts, said, strict=True):
        lacks = missing(part, text)
        assert not lacks, "\n".join([f"{block.page}:{block.line}: not printed:", *lacks, "---- of", text])


def launched(words: Sequence[str], folder: Path, ends: str | None, imports: Sequence[str]) -> str:
    """What this command prints, a launch of one node on this machine. imports: modules that its workers share."""
    assert words[0] == "bagua-launch", f"{words}: only jobs are run"
    shared = {zygote.IMPORTS_VARIABLE: ",".join(imports)} if imports else {}
    done = launch(*words[1:], limit_s=RUN_S, directory=folder, **shared)
    code, line = ENDS[ends]
    assert done.returncode == code, done.said
    assert line in done.said, done.said
    return done.said


def blocks_of_jobs() -> list[object]:
    found = [block for page in PAGES for block in blocks(page) if block.workers]
    return [pytest.param(block, id=f"{block.page.relative_to(ROOT)}-{block.line}") for block in found]


@pytest.mark.parametrize("block", blocks_of_jobs())
def test_python_of_several_workers_runs(block: Block, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(before(block.given) + block.text)
    launched(
        ["bagua-launch", "--nproc-per-node", str(block.workers), "train.py"], tmp_path, ends=None, imports=()
    )
