"""A trace of a running job: every step of every worker on one axis, also while a worker is lost and another joins."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bagua_agent.cluster_client.chrome_trace import chrome_trace
from bagua_agent.cluster_client.job_trace import JobTrace
from bagua_agent.cluster_client.trace_reader import TraceReader
from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_launch.main import cli
from tests.agent.cluster_client.trace_format import check_format
from tests.docs.printed import printed
from tests.faults.conftest import MakeJob
from tests.faults.job import DEADLINE_S, SAMPLES, Job
from tests.lab.wait import eventually

Event = dict[str, Any]
STEPS = 40


def command(etcd: EmbeddedEtcd, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["trace", "--etcd", etcd.endpoint, *words])
    return done.exit_code, done.output


def tracks(content: Event) -> Iterator[tuple[str, str, list[Event]]]:
    """Process, track, and its spans in the order of their begins, outer ones first."""
    events: list[Event] = content["traceEvents"]
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    thread = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            found[event["pid"], event["tid"]].append(event)
    for (pid, tid), spans in found.items():
        complete = [e for e in spans if e["ph"] == "X"]
        yield process[pid], thread[pid, tid], sorted(complete, key=lambda e: (e["ts"], -e["dur"]))


def script_of(content: Event) -> dict[str, list[Event]]:
    return {process: spans for process, track, spans in tracks(content) if track == "script"}


def is_lap(span: Event) -> bool:
    return span["name"].startswith("step ")


def check_covered(content: Event) -> None:
    """The spans within each step sum up to most of it."""
    for process, spans in script_of(content).items():
        steps = [s for s in spans if is_lap(s)]
        assert steps, process
        for step in steps:
            end, at, covered = step["ts"] + step["dur"], step["ts"], 0.0
            for inner in spans:
                if is_lap(inner) or not step["ts"] <= inner["ts"] < end:
                    continue
                begin = max(at, inner["ts"])
                covered += max(0.0, min(end, inner["ts"] + inner["dur"]) - begin)
                at = max(at, inner["ts"] + inner["dur"])
            assert covered >= 0.9 * step["dur"], (process, step, covered)


def test_a_trace_holds_the_next_steps_of_all_workers(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job(endpoints=etcd.endpoint, nodes="1", samples=2 * SAMPLES, script=["--algorithm", "bytegrad"])
    one.start(slots=2)
    one.await_step(2)
    monkeypatch.chdir(tmp_path)  # the trace is written there
    given = {"demo": one.job_id, "192.0.2.2:2379": etcd.endpoint}
    words = printed("docs/tracing.md", "bagua-launch trace", given)
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output.splitlines()[-1])
    assert (told["workers"], told["missing"]) == (2, [])
    content = json.loads((tmp_path / f"{one.job_id}.trace.json").read_text())
    check_format(content)
    check_covered(content)
    scripts = script_of(content)
    assert len(scripts) == 2
    committed = one.step
    for spans in scripts.values():
        steps = [s for s in spans if is_lap(s)]
        assert len(steps) == 20
        numbers = [s["args"]["step"] for s in steps]
        assert numbers == list(range(numbers[0], numbers[0] + 20)) and 2 <= numbers[0] <= committed
        names = {s["name"] for s in spans}
        assert {"load", "forward", "backward", "bucket wait", "optimizer", "commit", "boundary"} <= names
    # both workers' clocks are this host's: what the round trips say of it must hold
    reached = [max(s["ts"] for s in spans if is_lap(s)) for spans in scripts.values()]
    assert abs(reached[0] - reached[1]) < DEADLINE_S * 1e6
    assert 0 <= told["clock_error_us"] < DEADLINE_S * 1e6
    assert {track for _, track, _ in tracks(content)} >= {
        "script",
        "collectives",
        "bagua-operations",
        "generations",
    }
    one.finish()
    one.check(finished=2)
    code, said = command(etcd, one.job_id)
    assert code == 2 and "has ended" in said


class Reading:
    """A trace in a thread of its own, since the test has to act meanwhile."""

    def __init__(self, etcd: EmbeddedEtcd, one: Job) -> None:
        self.found: JobTrace | None = None
        self._store = Store(store_config([etcd.endpoint], StoreCredentials()))
        self._store.connect(DEADLINE_S)
        self._reader = TraceReader(
            self._store, one.job_id, STEPS, 2 * DEADLINE_S, "the test", lambda text: None
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def has_begun(self) -> bool:
        """Whether the job's agent has accepted this trace."""
        return bool(self._reader.trace.workers)

    def has_spans_of(self, worker_id: str) -> bool:
        worker = self._reader.trace.workers.get(worker_id)
        return worker is not None and bool(worker.spans)

    def _read(self) -> None:
        try:
            self.found = self._reader.collect()
        finally:
            self._reader.close()
            self._store.close()

    def result(self) -> JobTrace:
        self._thread.join(3 * DEADLINE_S)
        assert self.found is not None
        return self.found


def test_a_lost_worker_and_its_successor_are_in_the_trace_and_a_second_one_is_refused(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    one = job(endpoints=etcd.endpoint, nodes="1")
    node = one.start(slots=2)
    one.await_step(2)
    reading = Reading(etcd, one)

    # before the command below, which would be the first to trace the job otherwise, and the reading be refused
    eventually(lambda: reading.has_begun, DEADLINE_S, "the job is traced")
    code, said = command(etcd, one.job_id, "--steps", "1", "--out", str(tmp_path / "b.json"))
    assert code == 2, said
    assert "is being traced already" in said and "the test has been tracing it for" in said
    assert not (tmp_path / "b.json").exists()
    killed = node.workers[1].worker_id
    eventually(lambda: reading.has_spans_of(killed), DEADLINE_S, "spans of the worker that is killed now")
    again = one.replace_killed_worker(node)
    one.await_step(again + 2)
    found = reading.result()
    assert found.workers[killed].ended and found.workers[killed].spans, "its spans until then"
    assert any(f"worker {killed}" in remark and "ended meanwhile" in remark for remark in found.remarks)
    content = chrome_trace(found)
    check_format(content)
    generations = [e for e in content["traceEvents"] if e.get("cat") == "generation"]
    assert "failover" in {e["args"]["kind"] for e in generations}
    assert len({e["args"]["generation"] for e in generations}) >= 3
    names = {name: [s["name"] for s in spans] for name, spans in script_of(content).items()}
    assert len(names) == 3, "two workers, and the successor of one"
    survivor = next(n for name, n in names.items() if not name.endswith(killed) and n.count("boundary") > 20)
    assert {"failover", "switch"} <= {name.split()[0] for name in survivor}
    assert {"exchange names", "build communicator"} <= {" ".join(n.split()[:2]) for n in survivor}
    copies = [
        track for _, track, spans in tracks(content) if any(s["name"] == "copy of the state" for s in spans)
    ]
    assert copies == ["bagua-heal"] * len(copies) and copies
    one.finish()
    one.check(finished=2)
