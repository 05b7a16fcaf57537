"""A real Prometheus for tests, on this machine's loopback or on a lab host, with what its HTTP API says.

Debian's package `prometheus` has the program and promtool. Data and configuration lie in a folder of the test's own.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.lab.forward import Forward
from tests.lab.network import Host
from tests.lab.process import LabProcess
from tests.lab.wait import HANG_S, eventually

START_S = 60.0
_ANSWER_S = 40.0
_POLL_S = 0.2


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; Debian's package is prometheus")
    return found


def hurried(rules: str) -> str:
    """Alert rules that fire a second after their cause; their expressions stay as they are."""
    text, found = re.subn(r"(?m)^( +for:) \w+$", r"\1 1s", rules)
    assert found
    return text


class Prometheus:
    """Runs from construction until `close`.

    directory: is made; `files` are written into it, and the configuration, which may name them. host: of a lab; None:
    this machine. Raises AssertionError where promtool does not accept the configuration.
    """

    def __init__(
        self,
        directory: Path,
        configuration: str,
        files: Mapping[str, str],
        host: Host | None = None,
    ) -> None:
        directory.mkdir()
        for name, text in files.items():
            (directory / name).write_text(text)
        path = directory / "prometheus.yml"
        path.write_text(configuration)
        done = subprocess.run(
            [program("promtool"), "check", "config", path], capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        words = [
            program("prometheus"),
            f"--config.file={path}",
            f"--storage.tsdb.path={directory / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        ]
        output = directory / "prometheus.log"
        if host is None:
            self.process = LabProcess([], words, env=None, output=output, host_name="here")
        else:
            self.process = host.run(words, output=output)
        self._forward: Forward | None = None
        try:
            port = eventually(self._listens_at, START_S, lambda: f"Prometheus listens\n{self.process.tail()}")
            self._at = f"127.0.0.1:{port}"
            if host is not None:
                self._forward = Forward(host, ("127.0.0.1", port))
                self._at = self._forward.endpoint
        except BaseException:
            self.close()
            raise

    def _listens_at(self) -> int:
        assert self.process.is_running, self.process.text()
        found = re.search(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', self.process.text())
        return int(found[1]) if found and "Server is ready" in self.process.text() else 0

    def close(self) -> None:
        if self._forward is not None:
            self._forward.close()
        if self.process.is_running:
            self.process.send(signal.SIGTERM)
        self.process.wait(START_S)

    # -- its HTTP API

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self._at}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error
        assert said["status"] == "success" and not said.get("warnings"), said
        return said["data"]

    def query(self, expression: str) -> dict[frozenset[tuple[str, str]], float]:
        """The present values by labels. Raises AssertionError where Prometheus refuses the expression."""
        data = self._get("query", query=expression)
        assert data["resultType"] == "vector", expression
        return {frozenset(of["metric"].items()): float(of["value"][1]) for of in data["result"]}

    def await_data(
        self, expression: str, above: float = -math.inf
    ) -> dict[frozenset[tuple[str, str]], float]:
        """The first values of the expression of which one is a number, and above `above`."""
        newest: dict[frozenset[tuple[str, str]], float] = {}

        def found() -> bool:
            newest.clear()
            newest.update(self.query(expression))
            return any(math.isfinite(value) and value > above for value in newest.values())

        eventually(found, _ANSWER_S, lambda: f"data above {above} of {expression}, not {newest}", _POLL_S)
        return newest

    def await_targets(self, up: int) -> None:
        """Until so many targets answer, and no other is known."""

        def healths() -> list[str]:
            return [of["health"] for of in self.targets()]

        eventually(
            lambda: healths() == ["up"] * up, _ANSWER_S, lambda: f"{up} targets: {self.targets()}", _POLL_S
        )

    def targets(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("targets")["activeTargets"]
        return found

    def firing(self) -> list[dict[str, str]]:
        """The labels of each alert that fires."""
        return [of["labels"] for of in self._get("alerts")["alerts"] if of["state"] == "firing"]

    def await_alert(self, labels: Mapping[str, str], fires: bool) -> None:
        eventually(
            lambda: (dict(labels) in self.firing()) == fires,
            _ANSWER_S,
            lambda: f"{labels} fires: {fires}; there are {self._get('alerts')}",
            _POLL_S,
        )

    def check_rules(self, names: set[str]) -> None:
        """Prometheus evaluates exactly these alert rules, each without an error."""

        def rules() -> list[dict[str, Any]]:
            return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

        eventually(
            lambda: all(rule["health"] != "unknown" for rule in rules()), _ANSWER_S, "all rules ran", _POLL_S
        )
        assert {rule["name"] for rule in rules()} == names
        assert {rule["health"] for rule in rules()} == {"ok"}, rules()
