"""A real Prometheus discovers the jobs of a cluster over TLS, as docs/metrics.md prints: panels and an alert."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from bagua_agent.security.certificate_files import create_authority, issue_files, utc_now
from bagua_agent.security.certificates import Role
from tests.cluster.conftest import MakeCluster
from tests.deploy.dashboards import ALERTS, CLUSTER, RULES, shown_queries
from tests.docs.printed import printed_text
from tests.lab.prometheus import Prometheus, hurried

PORT = 7465
WITHOUT_DATA = {"bagua_node_troubles > 0": "no node has a fault"}


def test_prometheus_discovers_submitted_jobs_and_warns_of_a_lost_node(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    authority = tmp_path / "authority"
    create_authority(authority, now=utc_now())
    viewer = issue_files(authority, "vic", Role.VIEWER, now=utc_now())
    cluster = make_cluster(2, dashboard=f"0.0.0.0:{PORT}", authority=authority)
    first, second = cluster.daemons
    given = {"node-1": first.name, "node-2": second.name, "refresh_interval: 15s": "refresh_interval: 1s"}
    configuration = "\n".join(
        (
            "global: {scrape_interval: 1s, evaluation_interval: 1s}",
            f"rule_files: [{RULES.name}]",
            printed_text("docs/metrics.md", "job_name: bagua-daemons", given),
        )
    )
    files = {RULES.name: hurried(RULES.read_text())}
    held = (viewer.ca_file, viewer.cert_file, viewer.key_file)
    files |= {
        name: Path(file).read_text()
        for name, file in zip(("ca.pem", "certificate.pem", "key.pem"), held, strict=True)
    }
    run = cluster.submit("run", (2, 2))
    run.await_world(2)
    with closing(
        Prometheus(tmp_path / "prometheus", configuration, files, cluster.lab.hosts[0])
    ) as prometheus:
        prometheus.await_targets(4)
        prometheus.check_rules(set(ALERTS))
        found = prometheus.targets()
        assert {of["discoveredLabels"].get("__meta_bagua_job") for of in found} == {None, "run"}
        assert {of["scrapeUrl"].partition(":")[0] for of in found} == {"https"}
        for node in (first.name, second.name):
            prometheus.await_data(f'bagua_step{{job="bagua-jobs",bagua_job="run",node="{node}"}} > 0')
        waits = cluster.submit("next", (1, 1))
        prometheus.await_data("max(bagua_cluster_oldest_wait_seconds)", above=0.0)
        run.hurry()
        assert run.await_outcome().exit_code == 0
        waits.await_world(1)
        for query in shown_queries(CLUSTER):
            if query in WITHOUT_DATA:
                assert prometheus.query(query) == {}, f"{query} has data, against: {WITHOUT_DATA[query]}"
            else:
                prometheus.await_data(query)
        prometheus.await_data("sum by (outcome) (increase(bagua_cluster_jobs_ended_total[1h]))", above=0.0)

        lost = {"alertname": "BaguaNodesLost", "severity": "warning", "state": "absent"}
        assert lost not in prometheus.firing()
        away = next(d for d in cluster.daemons if d.name != cluster.scheduler())
        away.kill()
        prometheus.await_alert(lost, fires=True)
        away.start()
        prometheus.await_alert(lost, fires=False)
        waits.hurry()
        assert waits.await_outcome().exit_code == 0

        none_schedules = {"alertname": "BaguaNoScheduler", "severity": "critical"}
        assert none_schedules not in prometheus.firing()
        for daemon in cluster.daemons:
            daemon.kill()
        prometheus.await_data('up{job="bagua-daemons"} == 0')
        prometheus.await_alert(none_schedules, fires=True)
