"""Resolves an option's value from the command line, the environment and the configuration file.

Flag over environment over file over default. Every value keeps the place it came from, so that an
error names what the person wrote. Pure; does not know what values mean, but for switches: theirs are "true" or
"false", in whichever form they were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from bagua_launch import scalar_values
from bagua_launch.options import Option
from bagua_launch.written_values import Values, WrittenValue


def merge(
    options: Iterable[Option],
    command_line: Mapping[str, str | bool | None],
    environ: Mapping[str, str],
    file_values: Values,
    only_typed: Set[str] = frozenset(),
) -> dict[str, WrittenValue]:
    """Returns the value given for each option's key; keys without a value are absent.

    command_line: by key; None or False where the flag was not given. An empty variable says nothing,
    as job scripts often export one. only_typed: keys whose variables and lines of the file are ignored.
    A switch that is off has a value too: some are on by default, and off in a variable is stronger than on in the file.
    Raises RequestError for a switch whose value is neither.
    """
    written: dict[str, WrittenValue] = {}
    for option in options:
        typed = command_line.get(option.key)
        variable = next((v for v in option.variables if environ.get(v)), None)
        if typed is not None and typed is not False:
            written[option.key] = WrittenValue("true" if typed is True else typed, option.flag)
        elif option.key in only_typed:
            continue
        elif variable is not None:
            written[option.key] = _canonical(option, WrittenValue(environ[variable], variable))
        elif option.key in file_values:
            written[option.key] = _canonical(option, file_values[option.key])
    return written


def _canonical(option: Option, written: WrittenValue) -> WrittenValue:
    if not option.is_switch:
        return written
    return replace(written, text="true" if scalar_values.switch(written) else "false")
