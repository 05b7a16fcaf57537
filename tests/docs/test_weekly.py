"""A block or an example that only long tests run says on its page that this is once a week."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.docs.page_blocks import PAGES, ROOT, RUN_BY, Block, blocks
from tests.docs.printed_calls import call_of, parts_of
from tests.docs.test_examples import scripts
from tests.docs.weekly import distribution, functions_that_use, is_weekly, packages_of_long_runs

EXAMPLES_PAGE = ROOT / "docs/guide/examples.md"
WEEKLY = re.compile(r"Tests run these once a week, and all others on every change: (.+)\.$", re.MULTILINE)
ONLY_NAMED = (
    "tests/docs/",
    "tests/benchmarks/",
)  # most of their tests name examples and run none, but these do:
RUN_THERE = {
    "test_char_lm_learns",
    "test_spot_nodes_go_on_where_they_were_preempted",
    "test_replicas_over_slow_links_end_as_one",
    "test_the_notebook_runs_cell_after_cell",
}

WEEKLY_PAGES = {  # why some of their blocks do not run on every change; the others' do
    "README.md": "installs everything into a new environment; trains the language model of the quickstart to its end",
    "benchmarks/README.md": "keeps killing workers for minutes",
    "deploy/README.md": "builds the image of a container",
    "docs/cached-dataset.md": "trains beside a server of Redis",
    "docs/collectives.md": "collects the tests for GPUs, and skips them without one",
    "docs/guide/kubernetes.md": "builds the image of a container",
    "docs/huggingface.md": "imports transformers for each job",
    "docs/lightning.md": "imports Lightning for each job",
    "docs/scaling.md": "calibrates a model of training on lab hosts",
    "docs/trackers/mlflow.md": "needs MLflow",
    "docs/trackers/tensorboard.md": "trains with a tracker that another block of the page has trained with",
    "docs/trackers/wandb.md": "needs Weights & Biases",
}


def takes_weekly(block: Block, words: list[str], tests: list[Path]) -> list[bool]:
    """Of each test function that takes this part of the block, whether it is weekly."""

    def takes(node: ast.AST) -> bool:
        call = call_of(node, block.mark)
        return call is not None and call.takes(block, words)

    return [is_weekly(test, name) for test in tests for name in functions_that_use(test, takes)]


def test_a_block_that_only_long_tests_take_says_so() -> None:
    checked = 0
    for page in PAGES:
        for block in blocks(page):
            found = RUN_BY.fullmatch(block.mark)
            tests = [ROOT / test for test in found["tests"].split()] if found else []
            if not tests or not all(test.name.startswith("test_") for test in tests):
                continue  # a program that tests start
            of_parts = [takes_weekly(block, words, tests) for words in parts_of(block)]
            assert all(of_parts), f"{page}:{block.line}: no test function takes a part of it"
            weekly = any(all(of_part) for of_part in of_parts)
            assert block.long == weekly, f"{page}:{block.line}: {'write' if weekly else 'remove'} `long, `"
            checked += 1
    assert checked > 60


def test_each_page_with_a_weekly_block_has_a_reason() -> None:
    pages = {str(page.relative_to(ROOT)) for page in PAGES if any(block.long for block in blocks(page))}
    assert pages == WEEKLY_PAGES.keys()


def imports(example: Path) -> set[str]:
    """The packages of the modules that it imports."""
    nodes = list(ast.walk(ast.parse(example.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return set(map(distribution, names))


@cache
def code_of_tests() -> dict[Path, str]:
    return {test: test.read_text() for test in (ROOT / "tests").rglob("test_*.py")}


def is_run_weekly(example: Path) -> bool:
    """Whether no test of the default suite runs the example, with the packages that are installed for it."""
    if imports(example) & packages_of_long_runs():
        return True
    shown = [block for page in PAGES if example.name in page.read_text() for block in blocks(page)]
    shown = [block for block in shown if example.name in block.text]
    if any(block.run and not block.long for block in shown):
        return False

    def names(node: ast.AST) -> bool:
        value = node.value if isinstance(node, ast.Constant) else None
        return isinstance(value, str) and value.rpartition("/")[2] == example.name

    tests = [test for test, code in code_of_tests().items() if example.name in code]
    found = [
        is_weekly(test, name, of=names)
        for test in tests
        for name in functions_that_use(test, names)
        if name in RUN_THERE or not str(test.relative_to(ROOT)).startswith(ONLY_NAMED)
    ]
    assert found, f"no test runs {example}"
    return all(found)


def test_the_page_says_which_examples_run_once_a_week() -> None:
    said = WEEKLY.search(EXAMPLES_PAGE.read_text())
    assert said is not None, "the page has no sentence about it"
    weekly = sorted(example.name for example in scripts() if is_run_weekly(example))
    assert sorted(re.findall(r"`([\w.]+)`", said[1])) == weekly
