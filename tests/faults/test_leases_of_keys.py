"""A key hangs on a lease exactly if its row in the table of keys states that it comes back under one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from click.testing import CliRunner

from bagua_agent.etcd.client import KeyValue, Store, StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoints
from bagua_agent.etcd.key_range import KeyRange
from bagua_agent.etcd.keys import KEY_TABLE, AfterLoss, JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.etcd.watch_stream import WatchStream
from bagua_launch.main import cli
from tests.faults.conftest import MakeJob
from tests.faults.job import START_S
from tests.lab.wait import HANG_S, eventually

# Rows whose keys need restart mode, a leave, or another fault than a lost worker. None of them is a leased row.
NOT_WRITTEN_HERE = {"hang", "refusals", "stop", "measured", "study", "meeting", "departures"}
STUB = Path(__file__).with_name("replica_stub.py")
MARK = "/bagua/end-of-history"


def leases_by_row(etcd: EmbeddedEtcd, job_ids: list[str]) -> dict[str, set[bool]]:
    """Whether each row's keys were written under a lease, by row, in all of etcd's history."""
    jobs = [JobKeys(job_id) for job_id in job_ids]
    found: dict[str, set[bool]] = {}
    with closing(Store(StoreConfig(parse_endpoints(str(etcd.endpoint))))) as store:
        end = store.put(MARK, b"")
        with closing(store.connection(store.config.endpoints[0])) as connection:
            stream = WatchStream(connection, [(KeyRange.of_prefix("/bagua/"), 1)], HANG_S)
            with closing(stream):
                for response in stream:
                    assert not response.compact_revision, "etcd has forgotten a part of it"
                    for event in response.events:
                        written = KeyValue.of(event.kv)
                        if written.mod_revision == end:
                            return found
                        for row in (keys.row_of(written.key) for keys in jobs):
                            if row is not None and event.type == event.PUT:
                                found.setdefault(row[0].name, set()).add(written.lease_id != 0)
    raise AssertionError("the history ended before its end was read")


def test_the_keys_that_jobs_write_under_leases_are_those_of_the_leased_rows(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    one = job(endpoints=str(etcd.endpoint), nodes="1:2")
    first = one.start(slots=2)
    one.await_world(2)
    words = ["tune", "--rdzv-endpoint", str(etcd.endpoint), one.job_id, "--bucket-size", "16KiB"]
    asked = CliRunner().invoke(cli, words)
    assert asked.exit_code == 0, asked.output
    first.workers[1].kill()
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    one.check(finished=2)

    out = tmp_path / "stub"
    out.mkdir()
    replicas = job(endpoints=str(etcd.endpoint), options=["--replica-size", "2"], program=[str(STUB)])
    replicas.start(slots=2, environment={"STUB_OUT": str(out)})
    seen: dict[str, set[bool]] = {}

    def wrote_replicas() -> bool:
        seen.update(leases_by_row(etcd, [one.job_id, replicas.job_id]))
        return "replicas" in seen

    eventually(wrote_replicas, START_S, lambda: f"a replica's record; seen: {sorted(seen)}", 0.2)
    assert seen.keys() == KEY_TABLE.keys() - NOT_WRITTEN_HERE
    leased = {name: KEY_TABLE[name].after_loss is AfterLoss.LEASED for name in seen}
    assert seen == {name: {has_lease} for name, has_lease in leased.items()}
