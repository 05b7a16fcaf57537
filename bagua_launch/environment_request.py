"""Resolves the variables of `--env`: NAME takes this terminal's value, NAME=VALUE the given one. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bagua_launch.errors import refuse
from bagua_launch.written_values import WrittenValue

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_environment(written: WrittenValue | None, environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for part in written.text.split(",") if written else ():
        name, equals, value = part.partition("=")
        assert written is not None
        if not _VARIABLE.fullmatch(name):
            raise refuse(
                written, f"{name!r} is no name of a variable", "NAME or NAME=VALUE, separated by commas"
            )
        if not equals and name not in environ:
            raise refuse(written, f"{name} is not set here", f"{name}=VALUE, or set it")
        found[name] = value if equals else environ[name]
    return found
