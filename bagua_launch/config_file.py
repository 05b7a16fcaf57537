"""Reads the configuration file.

TOML whose keys are option names, at $BAGUA_CONFIG or else ~/.config/bagua/launch.toml (where only the
first must exist if named). Does not know what values mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from bagua_launch.errors import RequestError
from bagua_launch.option_suggestions import nearest
from bagua_launch.options import Option
from bagua_launch.written_values import WrittenValue

VARIABLE = "BAGUA_CONFIG"


def config_path(environ: Mapping[str, str]) -> Path:
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or "/", ".config")
    return Path(base, "bagua", "launch.toml")


def read_config_file(environ: Mapping[str, str], options: Iterable[Option]) -> dict[str, WrittenValue]:
    """Returns the file's values by option key. Raises RequestError for an unreadable file or an unknown key."""
    path = config_path(environ)
    try:
        content = path.read_bytes()
    except OSError as error:
        if not environ.get(VARIABLE) and isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return {}
        origin = f"{VARIABLE} " if environ.get(VARIABLE) else ""
        raise RequestError(f"{origin}{str(path)!r}: {error.strerror}; use a readable TOML file") from error

    import tomllib  # here: most runs have no file

    try:
        table = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        what = " ".join(str(error).split())
        raise RequestError(f'{path}: {what}; use TOML such as nnodes = "2:8"') from error

    known = {option.key: option for option in options}
    spellings = {name for option in known.values() for name in _spellings(option)}
    for key in table:
        if _key(key) not in spellings:
            raise RequestError(f"{path}: {key!r}: no such option; use {_nearest(key, known.values())}")
    spelled = {
        _key(key): WrittenValue(_as_text(path, key, value), f"{path}: {key}") for key, value in table.items()
    }
    return {
        option.key: next(spelled[name] for name in _spellings(option) if name in spelled)
        for option in known.values()
        if any(name in spelled for name in _spellings(option))
    }


def _key(name: str) -> str:
    return name.replace("-", "_")


def _spellings(option: Option) -> tuple[str, ...]:
    """Returns the file's keys that mean the option, the strongest first."""
    return (option.key, *map(_key, option.other_names))


def _nearest(key: str, options: Iterable[Option]) -> str:
    flags = [option.flag for option in options if not option.hidden]
    near = nearest("--" + key.replace("_", "-"), flags) or flags
    return " or ".join(flag.removeprefix("--") for flag in near)


def _as_text(path: Path, key: str, value: object) -> str:
    """Returns the value as it would be typed: [a, b] is "a,b", {k = v} is "k=v"."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, list):
        return ",".join(_as_text(path, key, item) for item in value)
    if isinstance(value, dict):
        return ",".join(f"{k}={_as_text(path, key, v)}" for k, v in value.items())
    raise RequestError(f"{path}: {key} {str(value)!r}: not text, number, list or table; use a string")
