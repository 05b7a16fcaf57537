"""Finds the code blocks of a document, and what the comment before a block says about running it.

Marks of Python blocks: none, or `given: NAME, NAME` (what the block uses and does not define; block_context.py has it),
or `long, given: ...` (needs a package of another project), or `workers: N, given: ...` (a job of N workers runs it), or
`not run: REASON`. `file: NAME` before a Python block names it for the shell blocks. `part of: EXAMPLE`: each paragraph
is also in this script of examples/, which a test runs.
Marks of shell blocks: `not run: REASON`; or `parsed: REASON`: the programs' own parsers take the words, and nothing
runs (programs.py); `; small form: TEST TEST` behind it names the tests that run the programs for a short time; or
`run`: its commands are jobs of one node. Before `run`, `long, ` says that it takes minutes or a package of another
project. Behind it, `, script: EXAMPLE` says which file is the reader's train.py, `, ends: WORD` how the jobs end
(test_page_commands.py lists the words), and `, needs: MODULE MODULE` which modules they import beside torch.
Of both, of every YAML and PromQL block, and of texts with commands behind a prompt: `run by: TEST TEST`: these tests
take all of the block's commands or its code from the page (printed.py). Before it, `long, ` says that some of it is
taken only by tests which run once a week (weekly.py). Of a text, `, lines of: FAULT` behind it: the test compares the
block with what a real job prints at that fault.
A text has one of these marks: that one; or `printed by the commands above`: test_page_commands.py compares it with what
the shell block above it prints; or `not run: REASON`.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs/guide").glob("*.md"))  # a page's Python is one script, that a reader can copy
OTHERS = [  # each Python block is by itself; the reader has the rest of the script
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page not in GUIDES),
    *sorted(page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"),
    *(ROOT / name for name in ("benchmarks/README.md", "deploy/README.md")),
]
PAGES = [*GUIDES, *OTHERS]
LEFT_OUT = {  # they describe an earlier tree, whose commands may have other words today
    "CHANGELOG.md": "the past",
    "benchmarks/results/": "dated results, each with the command and the commit that made it",
}
BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>[^\n]*?) -->\n)?^ *```(?P<language>[^\n]*)\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
INDENTED = re.compile(r"\n\n( {4,}\S[^\n]*)")  # by Markdown's rules code too, and none that BLOCK sees
NOT_RUN = re.compile(r"not run: .{10,}")
PARSED = re.compile(r"parsed: [^;]{10,}(?:; small form: (?P<small>tests/[\w./]+\.py( tests/[\w./]+\.py)*))?")
RUN = re.compile(
    r"(long, )?run(, script: (?P<script>[\w./]+))?(, ends: (?P<ends>\w+))?(, needs: (?P<needs>[\w.]+( [\w.]+)*))?"
)
PRINTED_ABOVE = "printed by the commands above"
RUN_BY = re.compile(
    r"(?:long, )?run by: (?P<tests>[\w./]+\.py( [\w./]+\.py)*)(, lines of: (?P<fault>[\w ]+))?"
)
PART_OF = re.compile(r"part of: (?P<example>examples/[\w./]+\.py)")
GIVEN = re.compile(r"(?P<long>long, )?(?:workers: (?P<workers>[1-9]\d*), )?given: (?P<names>\w+(?:, \w+)*)")
KINDS = ("python", "sh", "text", "yaml", "toml", "promql")
DIRECTIVES = ("{toctree}", "{eval-rst}", "mermaid")  # of the site; scripts/docs runs them


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    language: str
    mark: str
    text: str
    line: int  # of the page, at which the block begins

    @property
    def runs(self) -> bool:
        """Whether the block runs by itself, in one process."""
        mark = self.mark.removeprefix("long, ")
        return not self.workers and not mark.startswith(("not run: ", "run by: ", "part of: "))

    @property
    def long(self) -> bool:
        return self.mark.startswith("long, ")

    @property
    def run(self) -> re.Match[str] | None:
        """The parts of a shell block's mark, if its jobs run."""
        return RUN.fullmatch(self.mark) if self.language == "sh" else None

    @property
    def lines_of(self) -> str:
        """The fault whose lines of the terminal a text shows; empty for another block."""
        found = RUN_BY.fullmatch(self.mark)
        return (found["fault"] or "") if found else ""

    @property
    def workers(self) -> int:
        """Of the job that runs a Python block; 0: it needs none."""
        found = GIVEN.fullmatch(self.mark)
        return int(found["workers"] or 0) if found else 0

    @property
    def given(self) -> list[str]:
        found = GIVEN.fullmatch(self.mark)
        return found["names"].split(", ") if found else []


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = [
        Block(
            page,
            m["language"],
            m["mark"] or "",
            textwrap.dedent(m["text"]),
            text.count("\n", 0, m.start("text")) + 1,
        )
        for m in BLOCK.finditer(text)
    ]
    assert len(found) == len(re.findall(r"^ *```", text, re.MULTILINE)) / 2, (
        f"{page}: a fence is not understood"
    )
    indented = INDENTED.search(BLOCK.sub("", text))
    assert not indented, f"{page}: write a fence with a mark around {indented[1]}"
    return [block for block in found if block.language not in DIRECTIVES]


def commands(block: Block) -> list[list[str]]:
    """The words of a shell block's commands, and of those that a text shows behind a prompt."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language != "sh":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    split = [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
    return [words for words in split if words]
