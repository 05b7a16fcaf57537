"""The dashboards and the alert rules of deploy/monitoring, and the queries in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
JOB, CLUSTER = (MONITORING / f"grafana-{name}.json" for name in ("dashboard", "cluster"))
DASHBOARDS: dict[Path, dict[str, Any]] = {path: json.loads(path.read_text()) for path in (JOB, CLUSTER)}
RULES = MONITORING / "alerts.yaml"
ALERTS: dict[str, str] = {  # expressions by name
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
}


def shown_queries(path: Path) -> Iterator[str]:
    """Those of a dashboard's panels and of their marks."""
    dashboard = DASHBOARDS[path]
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (each["expr"] for each in dashboard["annotations"]["list"])
