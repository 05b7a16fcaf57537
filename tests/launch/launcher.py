"""A `bagua-launch` for tests, in this process or one of its own; its agent only notes what it is to run."""

from __future__ import annotations

import inspect
import json
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from click.testing import CliRunner, Result

from bagua_agent.config.job_config import JobConfig
from bagua_launch.main import cli

# takes the agent's place in a real process; the real one would start etcd and workers
STAND_IN = """
import json, sys, types
agent = types.ModuleType("bagua_agent.job.run")
def run_job(config):
    print(json.dumps({"id": config.job_id, "nodes": [config.min_nodes, config.max_nodes],
                      "slots": config.slots, "kind": config.command.kind.value,
                      "target": config.command.target, "args": config.command.args,
                      "endpoints": config.endpoints, "restarts": config.max_restarts}))
    return 7
agent.run_job = run_job
sys.modules["bagua_agent.job.run"] = agent
"""

Completed = subprocess.CompletedProcess[str]
LaunchProcess = Callable[..., Completed]
# Before click 8.2 a runner mixes stderr into stdout by default.
_MIXES = "mix_stderr" in inspect.signature(CliRunner).parameters
_RUNNER: Callable[[], CliRunner] = partial(CliRunner, mix_stderr=False) if _MIXES else CliRunner


class Launcher:
    """Runs the command line in this process, in an environment with nothing of ours but what is given."""

    def __init__(self, directory: Path, asked: list[JobConfig]) -> None:
        self.directory = directory
        self.script = directory / "train.py"
        self.script.write_text("raise SystemExit('never run by these tests')\n")
        self._asked = asked

    def __call__(self, *words: str, env: Mapping[str, str] | None = None) -> Result:
        return _RUNNER().invoke(cli, list(words), env=dict(env or {}), prog_name="bagua-launch")

    def config(self, *words: str, env: Mapping[str, str] | None = None) -> JobConfig:
        """What the agent is asked to run; the script is added unless `words` name a .py file."""
        if not any(word.endswith(".py") for word in words):
            words = (*words, "train.py")
        self._asked.clear()
        result = self(*words, env=env)
        assert result.exit_code == 7, result.output
        return self._asked[0]

    def refusal(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """The one line about a mistake."""
        result = self(*words, env=env)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert isinstance(result.exception, SystemExit)
        assert result.stderr.startswith("bagua-launch: ") and result.stderr.count("\n") == 1, result.stderr
        return result.stderr.removeprefix("bagua-launch: ").rstrip("\n")


def asked_of(done: Completed) -> dict[str, object]:
    """What the stand-in was asked to run."""
    assert done.returncode == 7, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found
