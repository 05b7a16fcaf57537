"""Prometheus's promtool accepts the alert rules; each fires, and stays silent, on series of alert_series.yaml."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.dashboards import ALERTS, RULES
from tests.lab.prometheus import program
from tests.lab.wait import HANG_S

SERIES = Path(__file__).with_name("alert_series.yaml")


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool"), *words], capture_output=True, text=True, timeout=HANG_S)


def cases() -> list[dict[str, Any]]:
    """Each question of the file: `alertname`, `eval_time`, `exp_alerts`."""
    return [case for test in yaml.safe_load(SERIES.read_text())["tests"] for case in test["alert_rule_test"]]


def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(ALERTS)} rules found" in done.stdout


def test_every_alert_fires_and_stays_silent_on_its_series() -> None:
    done = promtool("test", "rules", SERIES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {case["alertname"] for case in cases() if case["exp_alerts"]} == ALERTS.keys(), "each fires once"
    assert {case["alertname"] for case in cases() if not case["exp_alerts"]} == ALERTS.keys(), (
        "each is silent once"
    )


def test_a_rule_that_never_fires_is_found(tmp_path: Path) -> None:
    """As BaguaTooFewNodes was, while it read the nodes of the newest generation."""
    rules, series = tmp_path / RULES.name, tmp_path / SERIES.name
    text = RULES.read_text()
    assert text.count("(bagua_present_nodes)") == 1
    rules.write_text(text.replace("(bagua_present_nodes)", "(bagua_nodes)"))
    series.write_text(SERIES.read_text().replace("../../deploy/monitoring/alerts.yaml", str(rules)))
    done = promtool("test", "rules", series)
    assert done.returncode != 0 and "BaguaTooFewNodes" in done.stdout + done.stderr
