"""Resolves the variables of `--env`: NAME takes this terminal's value, NAME=VALUE the given one. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bagua_launch.errors import refuse
from bagua_launch.written_values import WrittenValue

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_environment(said: WrittenValue | None, environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for part in said.text.split(",") if said else ():
        name, equals, value = part.partition("=")
        assert said is not None
        if not _VARIABLE.fullmatch(name):
            raise refuse(
                said, f"{name!r} is no name of a variable", "NAME or NAME=VALUE, separated by commas"
            )
        if not equals and name not in environ:
            raise refuse(said, f"{name} is not set here", f"{name}=VALUE, or set it")
        found[name] = value if equals else environ[name]
    return found
