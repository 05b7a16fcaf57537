"""Writes a job's request as JSON and reads it back, for a submission in etcd and for a unit's file.

A file holds everything that an agent needs to run its part. A submission holds only what its submitter may choose: the
node that runs it determines node name, log directory, store and account.
"""

from __future__ import annotations

import json
import math
import reprlib
import types
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import JobConfig

SUBMITTED = frozenset(
    {
        *("job_id", "command", "min_nodes", "max_nodes"),
        *("max_restarts", "role", "start_method", "shutdown_timeout_s", "numa_binding", "virtual_local_rank"),
        *("virtual_shards", "replica_size"),
        *("autotune_level", "autotune_max_samples", "autotune_confidence_s", "autotune_warmup_s"),
        *("autotune_algorithms", "autotune_verbose"),
        *("ledger_dir", "digest_every_steps", "checkpoint_dir", "checkpoint_every"),
        *("join_timeout_s", "last_call_s", "node_window_s", "below_minimum_timeout_s", "holder_timeout_s"),
        *("hang_notice_s", "hang_renew_s", "hang_timeout_s"),
    }
)
"""Fields that travel in a submission."""

MOST_NAMED = 5


def encode(config: JobConfig, only: frozenset[str] | None = None) -> str:
    """Returns the JSON of the fields that differ from their defaults. only: the names of those to write; others are
    left out."""
    written = {}
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if (only is None or field.name in only) and value != default:
            written[field.name] = _plain(value)
    return json.dumps(written, sort_keys=True)


def decode(text: str, only: frozenset[str] | None = None, **overruling: Any) -> JobConfig:
    """Returns the job's configuration; the inverse of `encode`. `overruling` fields win. Raises UserError naming the
    field and its value."""
    try:
        read = json.loads(text)
    except ValueError as error:
        raise UserError(f"a job's description can't be read: {error}") from error
    except RecursionError as error:
        raise UserError("a job's description can't be read: it is nested too deeply") from error
    if not isinstance(read, dict):
        raise UserError(f"a job's description is {type(read).__name__}, not an object")
    allowed = {f.name for f in fields(JobConfig)} if only is None else only
    unknown = sorted(read.keys() - allowed)
    if unknown:
        raise UserError(
            f"a job's description has {', '.join(map(reprlib.repr, unknown[:MOST_NAMED]))}; "
            "use one version of bagua everywhere"
        )
    hints = get_type_hints(JobConfig)
    values = {name: _typed(name, hints[name], value) for name, value in read.items()}
    try:
        return JobConfig(**{**values, **overruling})
    except (TypeError, ValueError) as error:
        raise UserError(f"a job's description makes no job: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return list(value) if isinstance(value, tuple) else value


def _typed(name: str, hint: Any, value: Any) -> Any:
    """Returns `value` as `hint` says. Raises UserError."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (hint,) = (h for h in get_args(hint) if h is not type(None))
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_typed(name, get_args(hint)[0], v) for v in value)
    if is_dataclass(hint) and isinstance(value, dict):
        hints = get_type_hints(hint)
        if value.keys() <= hints.keys():
            try:
                return hint(**{k: _typed(f"{name}.{k}", hints[k], v) for k, v in value.items()})  # type: ignore[operator]
            except TypeError as error:
                raise UserError(f"a job's description: {name} is incomplete ({error})") from error
            except ValueError as error:
                raise UserError(f"a job's description: {name} is invalid ({error})") from error
    if isinstance(hint, type) and issubclass(hint, Enum) and value in [m.value for m in hint]:
        return hint(value)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer of more digits than any float has
            number = math.inf
        if math.isfinite(number):
            return number
    elif isinstance(hint, type) and type(value) is hint:
        if isinstance(value, str) and (odd := _not_passed(value)):
            raise UserError(f"a job's description: {name} is {reprlib.repr(value)}, which holds {odd}")
        return value
    # reprlib: a value may be long, and nested deeper than repr() takes
    raise UserError(
        f"a job's description: {name} is {reprlib.repr(value)}, which is no {getattr(hint, '__name__', hint)}"
    )


def _not_passed(value: str) -> str:
    """Returns what keeps `value` from being an argument of a process or a part of a record; empty for nothing."""
    try:
        return "a zero byte" if b"\0" in value.encode() else ""
    except UnicodeEncodeError:
        return "half a character"
