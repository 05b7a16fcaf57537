"""Every code block of docs/guide/ runs, or says why it does not.

A block is Python, shell, YAML, or text (output of a program). Python runs in one process, page after page. Shell has a
mark: `<!-- run -->`, and it runs beside the files that the page names by `<!-- file: NAME -->` (with `--long`), or
`<!-- not run: REASON -->`. Words for bagua-launch and bagua-agent go through their parsers in both cases.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml

from bagua_agent.service.main import cli as agent_cli
from bagua_launch.main import cli as launch_cli
from tests.deploy.parsed import parsed

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/guide").glob("*.md"))
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
RUN_S = 300

ALL_PAGES = """
import sys, runpy, traceback
import bagua_core as bagua
for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        sys.exit(f"{path} failed")
    bagua.shutdown()
    print("ran", path)
"""


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    language: str
    mark: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = [Block(page, m["language"], m["mark"] or "", m["text"]) for m in BLOCK.finditer(text)]
    assert len(found) == text.count("\n```") / 2, f"{page.name}: a fence that is not understood"
    return found


def commands(block: Block) -> list[list[str]]:
    lines = block.text.replace("\\\n", " ").splitlines()
    split = [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
    return [words for words in split if words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("python", "sh", "text", "yaml"), block
        if block.language == "sh":
            assert block.mark == "run" or re.fullmatch(r"not run: .{10,}", block.mark), (
                f"unmarked: {block.text}"
            )
        if block.language == "yaml":
            assert yaml.safe_load(block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_words_of_commands_are_accepted(page: Path) -> None:
    for block in blocks(page):
        for words in commands(block) if block.language == "sh" else ():
            words = words[1:] if words[0] == "sudo" else words
            program = words[0].rpartition("/")[2]
            if program not in ("bagua-launch", "bagua-agent"):
                continue
            group = launch_cli if program == "bagua-launch" else agent_cli
            assert isinstance(group, click.Group)
            if words[1] in group.commands:
                group.commands[words[1]].make_context(words[1], words[2:])
            elif "--hosts" not in words:
                parsed(words[1:], {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_of_the_repository_that_commands_name_exist(page: Path) -> None:
    for block in blocks(page):
        for path in re.findall(r"(?:^|\s)((?:deploy|examples|scripts)/[\w./-]+)", block.text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_all_python_runs(tmp_path: Path) -> None:
    scripts = []
    for page in PAGES:
        code = "\n".join(block.text for block in blocks(page) if block.language == "python")
        if code:
            scripts.append(tmp_path / f"{page.stem}.py")
            scripts[-1].write_text(code)
    assert len(scripts) > 4
    done = subprocess.run(
        [sys.executable, "-c", ALL_PAGES, *map(str, scripts)],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ran ") == len(scripts)


@pytest.mark.long
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.mark == "run" for b in blocks(p))], ids=lambda p: p.name
)
def test_shell_that_is_marked_runs(page: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for block in blocks(page):
        if block.mark.startswith("file: "):
            (tmp_path / block.mark.removeprefix("file: ")).write_text(block.text)
        elif block.mark == "run":
            done = subprocess.run(
                ["sh", "-ec", block.text],
                cwd=tmp_path,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                timeout=RUN_S,
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            said = done.stdout + done.stderr
            assert "every worker has committed its last step" in said
            if "--failpoints" in block.text:
                assert "did not happen" in said and "ended: killed by SIGKILL" in said
