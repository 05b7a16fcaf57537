"""A real Prometheus scrapes a job as docs/metrics.md prints: panels show it, and an alert fires for a lost node."""

from __future__ import annotations

import math
import re
import signal
from contextlib import closing
from pathlib import Path

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.deploy.dashboards import ALERTS, JOB, RULES, shown_queries
from tests.docs.printed import printed_text
from tests.faults.conftest import MakeJob
from tests.faults.job import Node
from tests.lab.free_port import free_port
from tests.lab.prometheus import Prometheus, hurried

WITHOUT_DATA = {
    "bagua_net_": "no worker has loaded Bagua-Net, which carries NCCL's traffic between GPUs",
    "bagua_autotune_": "the job does not tune",
}
# Events of this test, and the queries that must have counted them.
COUNTED = (
    "max by (kind) (increase(bagua_generations_total{",
    "sum by (node, how) (increase(bagua_worker_exits_total{",
    "sum by (node) (increase(bagua_worker_restarts_total{",
    "sum by (node, interface) (bagua_heal_bytes_total{",
    "sum by (use) (rate(bagua_time_seconds_total{",
)


def expressions(text: str) -> list[str]:
    """Of a block: each begins at the left."""
    return re.split(r"\n(?! )", text.strip())


def test_prometheus_shows_a_job_and_warns_of_too_few_nodes(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    one = job(endpoints=etcd.endpoint, nodes="2:2")
    staying, other = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"

    def start(address: str) -> Node:
        return one.start(options=["--metrics-port", address.rpartition(":")[2]])

    start(staying)
    lost = start(other)
    given = {"node-1:9464": staying, "node-2:9464": other}
    given |= {"scrape_interval: 15s": "scrape_interval: 1s, evaluation_interval: 1s"}
    configuration = printed_text("docs/metrics.md", "job_name: bagua\n", given)
    rules = {RULES.name: hurried(RULES.read_text())}
    with closing(Prometheus(tmp_path / "prometheus", configuration, rules)) as prometheus:
        prometheus.await_targets(2)
        prometheus.check_rules(set(ALERTS))
        before = one.await_world(2)
        too_few = {"alertname": "BaguaTooFewNodes", "bagua_job": one.job_id, "severity": "warning"}
        prometheus.await_data("bagua_present_nodes == 2")
        assert too_few not in prometheus.firing()

        lost.kill_agent()
        prometheus.await_data(f'up{{instance="{other}"}} == 0')
        prometheus.await_alert(too_few, fires=True)
        came = start(other)
        one.await_world(2, after_step=max(before, one.step))
        prometheus.await_alert(too_few, fires=False)
        for first in ('bagua_generations_total{kind="failover"}', 'bagua_time_seconds_total{use="failover"}'):
            prometheus.await_data(f"max(increase({first}[5m]))", above=0.0)

        prometheus.await_data(f'bagua_worker_restarts_total{{instance="{other}"}} == 0')
        came.workers[0].kill()
        came.await_line("ended: killed by SIGKILL")
        one.await_world(2, after_step=one.step)
        check_panels(prometheus, one.job_id)
        check_page(prometheus)
        one.finish([0, -signal.SIGKILL, 0])
    one.check(finished=2)


def check_panels(prometheus: Prometheus, job_id: str) -> None:
    """Prometheus takes every query of the dashboard, and each has data or a reason for none."""
    without = set()
    for query in shown_queries(JOB):
        asked = query.replace("$job", job_id)
        if reasons := {name for name in WITHOUT_DATA if name in query}:
            assert prometheus.query(asked) == {}, f"{query} has data, against {reasons}"
            without |= reasons
        else:
            prometheus.await_data(asked, above=0.0 if query.startswith(COUNTED) else -math.inf)
    assert without == WITHOUT_DATA.keys()


def check_page(prometheus: Prometheus) -> None:
    """The queries that the page prints have data."""
    goodput, lost = expressions(printed_text("docs/metrics.md", 'use!~"start|standby"'))
    (share,) = prometheus.await_data(goodput).values()
    assert 0 < share < 1
    uses = {dict(labels)["use"] for labels in prometheus.await_data(f"{lost} > 0")}
    assert uses >= {"failover", "failed_step"} and "step" not in uses
    (sent,) = expressions(printed_text("docs/metrics.md", "group_left bagua_steps_per_second"))
    prometheus.await_data(sent, above=0.0)
