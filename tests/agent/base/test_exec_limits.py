"""The check of arguments agrees with Linux: Linux passes what it accepts, and refuses what it refuses one by one."""

from __future__ import annotations

import resource
import subprocess

import pytest

from bagua_agent.base.exec_limits import (
    MOST_BYTES_IN_ONE,
    ROOM_OF_THE_AGENT_BYTES,
    most_bytes_in_all,
    why_not_passed,
)
from tests.lab.wait import HANG_S

TRUE = "/bin/true"


def is_executed(arguments: list[str], environment: dict[str, str]) -> bool:
    try:
        return subprocess.run(arguments, env=environment, check=False, timeout=HANG_S).returncode == 0
    except (OSError, ValueError):
        return False


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        ([TRUE, "x" * (MOST_BYTES_IN_ONE - 1)], {}, None),
        ([TRUE, "a", "x" * MOST_BYTES_IN_ONE], {}, "argument 2 has 131072 bytes, more than the 131071"),
        ([TRUE, "ä" * (MOST_BYTES_IN_ONE // 2)], {}, "argument 1 has 131072 bytes"),
        ([TRUE], {"N": "x" * (MOST_BYTES_IN_ONE - 3)}, None),
        ([TRUE], {"N": "x" * (MOST_BYTES_IN_ONE - 2)}, "variable 'N' has 131072 bytes"),
        ([TRUE, "a\0b"], {}, "argument 1 holds a zero byte"),
        ([TRUE + "\0"], {}, "the program's name holds a zero byte"),
        ([TRUE], {"N": "\0"}, "variable 'N' holds a zero byte"),
        ([TRUE], {"N\0": ""}, r"variable 'N\\x00' holds a zero byte"),
        ([TRUE], {"N=M": ""}, "variable 'N=M' has no name"),
        ([TRUE, "\udcff"], {}, None),
        ([TRUE, ""], {"N": ""}, None),
    ],
)
def test_as_the_kernel_has_it(arguments: list[str], environment: dict[str, str], reason: str | None) -> None:
    found = why_not_passed(arguments, environment)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert reason.replace("\\\\", "\\") in found
    assert is_executed(arguments, environment) == (reason is None)


def test_half_a_character_and_no_name() -> None:
    assert "holds half a character" in (why_not_passed([TRUE, "\ud800"], {}) or "")
    assert "has no name" in (why_not_passed([TRUE], {"": "x"}) or "")


def test_all_together() -> None:
    """With the limit of this process, as the agent asks it."""
    stack_bytes = resource.getrlimit(resource.RLIMIT_STACK)[0]
    size = 100_000
    count = most_bytes_in_all(stack_bytes) // (size + 9)
    fits = [TRUE, *["x" * size] * (count - 1)]
    assert why_not_passed(fits, {}, stack_bytes) is None and is_executed(fits, {})
    more = [TRUE, *["x" * size] * (count + 1)]
    assert "bytes together, more than the" in (why_not_passed(more, {}, stack_bytes) or "")
    beyond = [TRUE, *["x" * size] * (count + 2 + ROOM_OF_THE_AGENT_BYTES // size)]
    assert not is_executed(beyond, {}), "else the check would refuse what can be"


@pytest.mark.parametrize(
    ("stack_bytes", "most_bytes"), [(8 << 20, 2 << 20), (-1, 6 << 20), (1 << 40, 6 << 20), (0, 128 << 10)]
)
def test_the_limit_follows_the_stacks(stack_bytes: int, most_bytes: int) -> None:
    assert most_bytes_in_all(stack_bytes) == most_bytes - ROOM_OF_THE_AGENT_BYTES
