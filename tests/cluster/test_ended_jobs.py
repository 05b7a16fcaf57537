"""The remains of an ended job: its logs can be read, and they do not affect the next job of its name."""

from __future__ import annotations

import json

from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.keys import JobKeys
from tests.cluster.conftest import MakeCluster
from tests.cluster.test_cluster_commands import DEADLINE_S, JOB, Terminal
from tests.lab.wait import eventually


def stop(terminal: Terminal, name: str) -> None:
    terminal.said("stop", name)
    eventually(
        lambda: terminal.cluster.store.get(cluster_keys.outcome(name)), DEADLINE_S, terminal.cluster.logs
    )


def test_logs_of_a_stopped_job_are_read_on_all_nodes_that_ran_it(make_cluster: MakeCluster) -> None:
    """Also of nodes that had left by the last generation."""
    cluster = make_cluster(2)
    terminal = Terminal(cluster)
    terminal.submit_endless("demo", 2, "trains")
    stop(terminal, "demo")
    lines = [
        json.loads(line) for line in terminal.said("logs", "demo", "--stream", "out", "--json").splitlines()
    ]
    assert sorted((line["node"], line["line"]) for line in lines) == [
        ("h2", "trains of 2"),
        ("h3", "trains of 2"),
    ]
    assert "shows workers that had left" in terminal.said("logs", "demo", "--rank", "0", code=2)


def test_a_deleted_jobs_name_is_used_again_and_nothing_of_it_is_there(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    terminal = Terminal(cluster)
    terminal.submit_endless("demo", 2, "first")
    assert "`bagua-launch stop demo` first" in terminal.said("delete", "demo", code=2)
    stop(terminal, "demo")
    told = terminal.said("submit", "--name", "demo", *JOB, "endless.py", "1", "x", code=2)
    assert "has ended and is still kept" in told and "`bagua-launch delete demo` first" in told
    assert "is removed" in json.loads(terminal.said("delete", "demo", "--json"))["done"]
    assert terminal.said("status").strip() == "no job in this etcd"
    assert "no job 'demo' in this etcd" in terminal.said("logs", "demo", code=2)
    for prefix in (
        JobKeys("demo").prefix,
        JobKeys("demo").records,
        JobKeys("demo").secrets,
        cluster_keys.OUTCOMES,
    ):
        assert cluster.store.get_prefix(prefix)[0] == []
    for daemon in cluster.daemons:
        daemon.await_line("job demo was removed, and its logs here with it")
        assert list((daemon.directory / "log").iterdir()) == []
    terminal.submit_endless("demo", 2, "second")
    assert "first" not in terminal.said("logs", "demo") + terminal.said("events", "demo")
    stop(terminal, "demo")
    lines = [
        json.loads(line) for line in terminal.said("logs", "demo", "--stream", "out", "--json").splitlines()
    ]
    assert [line["line"] for line in lines] == ["second of 2"] * 2


def test_jobs_beyond_their_number_go_by_themselves(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(1)
    terminal = Terminal(cluster)
    [daemon] = cluster.daemons
    daemon.stop()
    daemon.config.write_text(daemon.config.read_text().replace("[jobs]", "[jobs]\nkeep_ended = 1"))
    daemon.start()
    for name in ("one", "two"):
        terminal.said("submit", "--name", name, "-f", *JOB, "train.py", "40")
    daemon.await_line("job one is removed: 1 jobs have ended since")
    daemon.await_line("job one was removed, and its logs here with it")
    assert [job["job_id"] for job in json.loads(terminal.said("status", "--json"))] == ["two"]
    assert "trained on 40 samples" in terminal.said("logs", "two")
