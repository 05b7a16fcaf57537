"""Parses a command line of deploy/ as bagua-launch does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagua_agent.config.job_config import JobConfig
from bagua_launch.job_request import parse_request
from bagua_launch.main import cli
from bagua_launch.options import RUN_OPTIONS
from bagua_launch.precedence import merge


def parsed(words: Sequence[str], environment: Mapping[str, str] | None = None) -> JobConfig:
    """Raises click.UsageError or RequestError where the terminal would show one."""
    typed = cli.commands["run"].make_context("bagua-launch", list(words)).params
    program = typed.pop("program")
    request = parse_request(merge(RUN_OPTIONS, typed, environment or {}, {}), program)
    assert not request.notes, "a manifest uses nothing that is not meant for it"
    return request.config
