"""Says whether Linux can pass arguments and variables to a program, and if not, why. Pure.

Checked where a person gives them, and again where a node starts a job: a command that the kernel refuses once is
refused at every attempt.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

# Of one argument, or one NAME=VALUE, with the zero byte at its end (MAX_ARG_STRLEN).
MOST_BYTES_IN_ONE = 128 << 10
# Of all together: a quarter of the stack's limit, between these two; less the room for what the agent adds.
LEAST_LIMIT_IN_ALL, GREATEST_LIMIT_IN_ALL = 128 << 10, 6 << 20
ROOM_OF_THE_AGENT_BYTES = 64 << 10
USUAL_STACK_BYTES = 8 << 20
_POINTER_BYTES = 8


def why_not_passed(
    arguments: Sequence[str], environment: Mapping[str, str], stack_bytes: int = USUAL_STACK_BYTES
) -> str | None:
    """Returns the reason with the next move, naming the argument by its place or the variable; None if all can be
    passed.

    arguments: the program first. stack_bytes: the stack's limit where it will run, negative for none.
    """
    in_all = 0
    for place, argument in enumerate(arguments):
        what = f"argument {place}" if place else "the program's name"
        if (problem := _problem(argument)) is not None:
            return f"{what} {problem}"
        in_all += _size(argument)
    for name, value in environment.items():
        what = f"variable {name[:100]!r}"
        if not name or "=" in name:
            return f"{what} has no name that a variable can have; use another"
        if (problem := _problem(f"{name}={value}")) is not None:
            return f"{what} {problem}"
        in_all += _size(f"{name}={value}")
    most_bytes = most_bytes_in_all(stack_bytes)
    if in_all > most_bytes:
        return (
            f"arguments and variables have {in_all} bytes together, more than the {most_bytes} that"
            " can be passed to a program; put them in a file"
        )
    return None


def most_bytes_in_all(stack_bytes: int) -> int:
    """Returns how many bytes all arguments and variables may have together, with a pointer for each."""
    limit = stack_bytes // 4 if stack_bytes >= 0 else GREATEST_LIMIT_IN_ALL
    return min(max(limit, LEAST_LIMIT_IN_ALL), GREATEST_LIMIT_IN_ALL) - ROOM_OF_THE_AGENT_BYTES


def _problem(text: str) -> str | None:
    if "\0" in text:
        return "holds a zero byte, which can't be passed to a program; leave it out"
    try:
        size = len(os.fsencode(text)) + 1
    except UnicodeEncodeError:
        return "holds half a character, which can't be passed to a program; leave it out"
    if size > MOST_BYTES_IN_ONE:
        return f"has {size - 1} bytes, more than the {MOST_BYTES_IN_ONE - 1} that Linux passes in one; put it in a file"
    return None


def _size(text: str) -> int:
    return len(os.fsencode(text)) + 1 + _POINTER_BYTES
