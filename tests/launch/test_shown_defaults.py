"""Without an option its default in --help applies."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bagua_agent.config.job_config import JobConfig
from bagua_launch.options import RUN_OPTIONS
from tests.launch.launcher import Launcher

SHOWN = {o.flag: m[1] for o in RUN_OPTIONS if (m := re.search(r"\bDefault (.+)\.$", o.help))}
# it holds for one kind of rendezvous alone: see tests/launch/test_job_request.py
del SHOWN["--master-port"]
# it holds with --deterministic alone: see tests/launch/test_job_request.py
del SHOWN["--virtual-shards"]


@pytest.mark.parametrize("flag", SHOWN)
def test_the_shown_default_is_the_default(launch: Launcher, flag: str) -> None:
    def named(config: JobConfig) -> JobConfig:
        return replace(config, job_id="job")  # a fresh one each time

    assert named(launch.config(flag, SHOWN[flag])) == named(launch.config())


def test_defaults_are_shown() -> None:
    assert {
        "--checkpoint-every",
        "--digest-every",
        "--hang-timeout",
        "--max-restarts",
        "--shutdown-timeout",
    } <= set(SHOWN)
