"""Every code block of the manual runs, or says why it does not.

tests/docs/page_blocks.py lists the pages and the marks. All Python runs in one process, block after block; the jobs of
shell blocks run in test_page_commands.py. Words for bagua-launch and bagua-agent go through their parsers in every
block.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import click
import pytest
import yaml

from bagua_agent.service.config.agent_config import check
from bagua_agent.service.main import cli as agent_cli
from bagua_launch.main import cli as launch_cli
from tests.deploy.parsed import parsed
from tests.docs.block_context import DEFINITIONS, before
from tests.docs.page_blocks import (
    GIVEN,
    GUIDES,
    KINDS,
    LEFT_OUT,
    NOT_RUN,
    OTHERS,
    PAGES,
    PARSED,
    PART_OF,
    PRINTED_ABOVE,
    ROOT,
    RUN,
    RUN_BY,
    blocks,
    commands,
)
from tests.docs.printed_calls import calls, not_taken
from tests.docs.programs import parsed as parsed_by_program
from tests.docs.test_names import tracked

RUN_S = 300
TASK_PAGES = [*GUIDES, *(page for page in OTHERS if page.parent.name in ("docs", "trackers"))]
# answers, lists of pages, and what failures cost
WITHOUT_TASK = {"faq.md", "start.md", "index.md", "trackers.md", "what-happens.md"}

RUN_ALL = """
import sys, runpy, traceback
import bagua_core as bagua
failed = []
for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
        print("ran", path)
    except BaseException:
        failed.append(path)
        traceback.print_exc()
    bagua.shutdown()
sys.exit(f"failed: {failed}" if failed else 0)
"""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_page_of_the_repository_has_its_blocks_read() -> None:
    known = {name_of(page) for page in PAGES}
    others = {path for path in tracked() if path.endswith(".md")} - known
    assert [path for path in others if not path.startswith(tuple(LEFT_OUT))] == []


@pytest.mark.parametrize("page", [page for page in TASK_PAGES if page.name not in WITHOUT_TASK], ids=name_of)
def test_a_task_page_begins_with_a_block_that_runs(page: Path) -> None:
    first = blocks(page)[0]
    is_whole_script = first.language == "python" and first.runs and not first.given
    ran = first.run or RUN_BY.fullmatch(first.mark) or is_whole_script
    assert ran, f"{page}:{first.line}: {first.language}, {first.mark}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_known_kind(page: Path) -> None:
    for block in blocks(page):
        place = f"{page}:{block.line}"
        assert block.language in KINDS, f"{place}: ```{block.language}"
        if block.language == "sh":
            assert any(mark.fullmatch(block.mark) for mark in (RUN, RUN_BY, PARSED, NOT_RUN)), (
                f"{place}: no mark says how it runs"
            )
        elif block.language == "python":
            compile(block.text, place, "exec")
            named = page in GUIDES and block.mark.startswith("file: ")
            known = any(mark.fullmatch(block.mark) for mark in (GIVEN, PART_OF, RUN_BY, NOT_RUN))
            assert not block.mark or named or known, f"{place}: an unknown mark: {block.mark}"
        elif block.language == "text":
            shown = block.mark == PRINTED_ABOVE or (NOT_RUN.fullmatch(block.mark) and not commands(block))
            assert RUN_BY.fullmatch(block.mark) or shown, (
                f"{place}: no test compares it with what a job prints"
            )
        elif block.language == "yaml":
            assert yaml.safe_load(block.text)
        elif block.language == "toml":
            assert tomllib.loads(block.text)
        if block.language in ("yaml", "promql"):
            assert RUN_BY.fullmatch(block.mark), f"{place}: no mark says which test uses it"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_commands_print_is_below_their_block(page: Path) -> None:
    for above, block in pairwise([None, *blocks(page)]):
        if block is not None and block.mark == PRINTED_ABOVE:
            assert above is not None and above.run, f"{page}:{block.line}: no commands run above it"


def test_the_daemon_accepts_the_configurations_that_pages_show() -> None:
    shown = [tomllib.loads(b.text) for page in PAGES for b in blocks(page) if b.language == "toml"]
    (whole,) = (content for content in shown if "etcd" in content)
    check(whole, "docs/cluster.md", "h1")
    for part in shown:  # what is added to that
        check({name: whole.get(name, {}) | part.get(name, {}) for name in {*whole, *part}}, "a part", "h1")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_words_of_commands_are_accepted(page: Path) -> None:
    for block in blocks(page):
        for words in commands(block):
            words = words[1:] if words[0] == "sudo" else words
            program = words[0].rpartition("/")[2]
            if program not in ("bagua-launch", "bagua-agent"):
                continue
            words = words[: words.index(">")] if ">" in words else [w for w in words if w != "&"]
            group = launch_cli if program == "bagua-launch" else agent_cli
            assert isinstance(group, click.Group)
            if words[1] in group.commands:
                group.commands[words[1]].make_context(words[1], words[2:])
            elif "--hosts" not in words:
                parsed(words[1:], {})


def test_programs_take_the_words_of_blocks_that_are_only_parsed() -> None:
    taken = [
        parsed_by_program(words)
        for page in PAGES
        for block in blocks(page)
        if PARSED.fullmatch(block.mark)
        for words in commands(block)
    ]
    assert sum(values is not None for values in taken) > 50


def test_small_forms_of_programs_are_run_by_the_tests_that_marks_name() -> None:
    named = 0
    for page in PAGES:
        for block in blocks(page):
            found = PARSED.fullmatch(block.mark)
            if found is None or not found["small"]:
                continue
            code = "\n".join((ROOT / test).read_text() for test in found["small"].split())
            for words in commands(block):
                name = words[2].rpartition(".")[2].removesuffix("s")  # faults has its trials in fault_trials
                imported = re.search(rf"benchmarks(\.| import .*\b){name}", code)
                assert imported, f"{page}:{block.line}: {found['small']} has no {name}"
                named += 1
    assert named > 10


def test_each_benchmark_that_needs_no_gpu_has_a_small_form() -> None:
    without = [
        f"{block.page}:{block.line}"
        for page in PAGES
        for block in blocks(page)
        if (found := PARSED.fullmatch(block.mark)) and not found["small"]
        if "needs a GPU" not in block.mark
        and any("benchmarks." in word for w in commands(block) for word in w)
    ]
    assert without == []


def test_words_that_a_program_refuses_are_found() -> None:
    for line in (
        "python -m benchmarks.chaos --no-such",
        "python -m benchmarks.tradeoff --algorithm no-such",
        "python -m benchmarks.faults --repeat many",
        "scripts/test --no-such",
    ):
        with pytest.raises(AssertionError, match=r"refused|has no"):
            parsed_by_program(line.split())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_of_the_repository_that_blocks_and_marks_name_exist(page: Path) -> None:
    for block in blocks(page):
        for path in re.findall(
            r"(?:^|\s)((?:deploy|examples|scripts|tests)/[\w./-]*\w)", block.mark + "\n" + block.text
        ):
            assert (ROOT / path).exists(), f"{page}:{block.line}: {path}"


def test_a_test_that_a_mark_names_has_the_example_of_the_block() -> None:
    named = 0
    for page in PAGES:
        for block in blocks(page):
            examples = set(re.findall(r"examples/(?:\w+/)*(\w+\.(?:py|ipynb))", block.mark + block.text))
            for test in re.findall(r"(?:^|\s)(tests/[\w./-]*\w)", block.mark):
                files = [ROOT / test] if test.endswith(".py") else (ROOT / test).rglob("*.py")
                code = "\n".join(file.read_text() for file in files)
                missing = {example for example in examples if example not in code}
                assert not missing, f"{page}:{block.line}: {test} does not name {missing}"
                named += len(examples)
    assert named


def test_tests_that_run_a_block_take_it_from_its_page() -> None:
    checked = 0
    for page in PAGES:
        for block in blocks(page):
            found = RUN_BY.fullmatch(block.mark)
            taken = {test: calls(ROOT / test) for test in found["tests"].split()} if found else {}
            place = f"{page}:{block.line}"
            for test, own in taken.items():
                assert len(not_taken(block, own)) < len(not_taken(block, [])), (
                    f"{place}: {test} takes nothing of it"
                )
            if found:
                missing = not_taken(block, [call for own in taken.values() for call in own])
                assert not missing, f"{place}: {found['tests']} does not take {missing}"
                checked += 1
    assert checked


def test_parts_of_examples_stand_in_them_and_tests_run_them() -> None:
    tests = "".join(test.read_text() for test in (ROOT / "tests").rglob("test_*.py"))
    checked = 0
    for page in PAGES:
        for block in blocks(page):
            found = PART_OF.fullmatch(block.mark)
            if not found:
                continue
            example = ROOT / found["example"]
            whole = without_comments(example.read_text())
            for paragraph in block.text.split("\n\n"):
                assert f"\n{without_comments(paragraph)}\n" in f"\n{whole}\n", (
                    f"{page}:{block.line}: {example.name} has no\n{paragraph}"
                )
            assert example.name in tests, f"{page}:{block.line}: no test runs {example.name}"
            checked += 1
    assert checked


def without_comments(code: str) -> str:
    """Its lines without comments, empty lines and indentation."""
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in code.splitlines()]
    return "\n".join(line for line in lines if line)


def scripts_of(folder: Path, long: bool) -> list[str]:
    """Writes what runs into `folder`: a guide's Python as one script, each block of other pages as its own. A page's
    first block gets no definitions but the names of its mark: it is a script that a reader may copy."""
    written = []
    for page in PAGES:
        all_blocks = blocks(page)
        python = [b for b in all_blocks if b.language == "python" and b.runs and b.long == long]
        is_whole = {b.line: page in TASK_PAGES and b is all_blocks[0] and not b.given for b in python}
        texts = {
            f"{page.stem}-{b.line}": ("" if is_whole[b.line] else before(b.given)) + b.text for b in python
        }
        if page in GUIDES:
            texts = {page.stem: "\n".join(b.text for b in python)} if python else {}
        for name, text in texts.items():
            path = folder / f"{name}.py"
            path.write_text(text)
            written.append(str(path))
    return written


def run_all(scripts: list[str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *scripts],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-12000:]
    assert done.stdout.count("ran ") == len(scripts)


def test_all_python_runs(tmp_path: Path) -> None:
    scripts = scripts_of(tmp_path, long=False)
    assert len(scripts) > 20
    run_all(scripts, tmp_path)


@pytest.mark.long
def test_python_that_needs_other_packages_runs(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[huggingface]'")
    scripts = scripts_of(tmp_path, long=True)
    assert scripts
    run_all(scripts, tmp_path)


def test_no_name_is_given_without_use() -> None:
    used = {name for page in OTHERS for block in blocks(page) for name in block.given}
    needed = {name for needs, _ in DEFINITIONS.values() for name in needs}
    assert set(DEFINITIONS) <= used | needed
