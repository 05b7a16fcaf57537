"""The tests that are long because others run the same."""

import ast
import subprocess
import sys
from pathlib import Path

from tests import long_tests
from tests.lab.wait import HANG_S

ROOT = Path(__file__).parent.parent


def test_each_listed_test_exists() -> None:
    ids = long_tests.listed()
    assert ids == sorted(set(ids)) and ids
    for one in ids:
        file, *classes, name = one.partition("[")[0].split("::")
        tree = ast.parse((ROOT / file).read_text())
        found = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        assert {*classes, name} <= set(found), one


def test_a_listed_test_runs_when_long_tests_do() -> None:
    one = long_tests.listed()[0]
    for selection, said in (("not long", "1 deselected"), ("long", "1 test collected")):
        collected = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", selection, one],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert said in collected.stdout
