"""The commands of a cluster work on a job that was started by hand, as far as it has what they ask for."""

from __future__ import annotations

import json
import re
import signal
import urllib.request

from click.testing import CliRunner

from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_launch.main import cli
from tests.faults.conftest import MakeJob
from tests.faults.job import DEADLINE_S, STEPS
from tests.lab.wait import eventually

SIGTERM_CODE = 128 + signal.SIGTERM


def said(etcd: EmbeddedEtcd, *words: str) -> str:
    done = CliRunner().invoke(cli, [words[0], "--rdzv-endpoint", etcd.endpoint, *words[1:]])
    return done.output


def test_a_job_without_a_submission_is_shown_followed_and_stopped(job: MakeJob, etcd: EmbeddedEtcd) -> None:
    one = job(endpoints=etcd.endpoint, nodes="1", script=["--say"])
    node = one.start(slots=2)
    one.await_step(2)
    for command in ("status", "list", "ps"):
        [shown] = json.loads(said(etcd, command, "--json"))
        assert (shown["job_id"], shown["state"], shown["by_hand"]) == (one.job_id, "running", True)
    assert "started by hand" in said(etcd, "status", one.job_id)
    assert "no job 'other' in this etcd; there are " + repr(one.job_id) in said(etcd, "status", "other")
    assert said(etcd, "logs", one.job_id, "--rank", "0").startswith("hello from slot ")
    lines = said(etcd, "logs", one.job_id).splitlines()
    assert {line.split("] ")[0] for line in lines if "hello from" in line} == {
        f"[{shown['nodes'][0]}:{rank}" for rank in (0, 1)
    }
    assert "has no rank 7" in said(etcd, "logs", one.job_id, "--rank", "7")
    shown_once = said(etcd, "top", "--once", one.job_id)
    assert "trains with 2 workers on 1 node" in shown_once and "goodput " in shown_once
    assert f"step 2 of {STEPS}" not in shown_once and f" of {STEPS} (" in shown_once
    page = json.loads(said(etcd, "top", "--once", "--json", one.job_id))
    assert [worker["rank"] for worker in page["workers"]] == [0, 1]
    assert "no job 'other' in this etcd" in said(etcd, "top", "--once", "other")
    frozen = node.workers[1]
    frozen.send(signal.SIGSTOP)
    eventually(
        lambda: "; Rank 1 did not answer." in said(etcd, "collectives", one.job_id), DEADLINE_S, "named"
    )
    shown = said(etcd, "collectives", one.job_id)
    assert re.search(r"Rank 0 waits in \w+ number \d+ \(generation \d+, all, gloo\), for ", shown)
    assert f"no answer: process {frozen.pid} is stopped (state T)" in shown
    frozen.send(signal.SIGCONT)
    assert "was started by hand" in said(etcd, "delete", one.job_id)
    assert "stops at its next step boundary" in said(etcd, "stop", one.job_id)
    assert node.process.wait(DEADLINE_S) == SIGTERM_CODE
    assert node.says("the job is asked to stop (bagua-launch stop)")
    assert node.says("stopped: ")
    story = said(etcd, "events", one.job_id)
    assert "stopped" in story.splitlines()[-1]
    followed = said(etcd, "events", "-f", one.job_id)
    assert followed.startswith(story) and "\nstopped: " in followed
    assert "has ended" in said(etcd, "stop", one.job_id)
    assert "no node of it is present" in said(etcd, "logs", one.job_id)
    assert "The job was stopped." in said(etcd, "top", one.job_id)

    again = one.start()
    again.await_line("was stopped before")
    one.await_step(one.step + 2)
    one.finish([SIGTERM_CODE, 0])
    assert again.says("succeeded")
    one.check_nothing_left()


def test_a_job_for_other_nodes_shows_its_store_and_one_without_has_a_page(job: MakeJob) -> None:
    """Which are the two ways that the error of a missing --etcd names."""
    alone, open_to_others = job(nodes="1"), job(nodes="1:2")
    private, node = alone.start(options=["--dashboard=0"]), open_to_others.start()
    private.await_line("1 node, store private")
    node.await_line("1 to 2 nodes, store ")
    endpoint, page = (
        re.search(pattern, log)
        for pattern, log in (
            (r"2 nodes, store (\S+:[0-9]+)\n", node.log),
            (r"dashboard at (http://[0-9.:]+/)", private.log),
        )
    )
    assert endpoint is not None and page is not None
    open_to_others.await_step(2)
    shown = CliRunner().invoke(cli, ["status", "--etcd", endpoint[1], open_to_others.job_id])
    assert "started by hand" in shown.output

    def verdict() -> str:
        with urllib.request.urlopen(f"{page[1]}api/page", timeout=DEADLINE_S) as answer:
            return str(json.load(answer)["verdict"]["what"])

    eventually(lambda: "trains with 1 worker" in verdict(), DEADLINE_S, verdict, 0.1)
    for one in (alone, open_to_others):
        one.finish()


def test_a_job_whose_nodes_are_gone_is_absent(etcd: EmbeddedEtcd) -> None:
    store = Store(store_config((etcd.endpoint,), StoreCredentials()))
    try:
        store.put(JobKeys("gone").spec, b"")
    finally:
        store.close()
    [shown] = json.loads(said(etcd, "status", "--json"))
    assert shown["state"] == "absent"
    assert "no node that could stop" in said(etcd, "stop", "gone")
