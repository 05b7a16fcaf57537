"""Jobs with checkpoints in an object store go on from them: one that was preempted, and one that is lost whole while it
uploads a part, which goes on from the checkpoint before."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_core.elastic.checkpoint import catalogue
from bagua_core.elastic.checkpoint.storage import storage_of
from tests.docs.printed import printed
from tests.faults.conftest import MakeJob
from tests.faults.job import SCRIPT, START_S
from tests.faults.test_checkpoint import kill_whole
from tests.lab.object_store import BUCKET, ObjectStore, variables

SAMPLES = 720
LAST_STEP = 2 * SAMPLES // 24
URL = f"s3://{BUCKET}/runs/demo"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    made = ObjectStore()
    for name, value in variables(made.gate.port).items():
        monkeypatch.setenv(name, value)
    yield made
    made.end()


def test_a_job_killed_while_it_uploads_goes_on_from_the_checkpoint_before(
    job: MakeJob, store: ObjectStore
) -> None:
    given = {"bucket": BUCKET, "train.py": str(SCRIPT)}
    *options, script = printed("docs/training-script.md", "s3://bucket/runs/demo", given)
    one = job(samples=SAMPLES, options=[*options, "--checkpoint-every", "7"], file=Path(script))
    store.gate.hold("step-000000021-[^/]*/part-00001-of-00002")
    one.start(slots=2, environment=variables(store.gate.port))
    held = store.gate.await_held()
    assert 0 < held.sent_bytes < held.of_bytes
    one.await_step(LAST_STEP // 2 + 10)  # steps do not wait for the upload
    kill_whole(one)
    store.gate.drop()
    found = catalogue.find(storage_of(URL))
    torn = next(f for f in found if f.place.name.step == 21)
    assert not torn.is_complete and torn.reason == "part 1 of 2 is missing"
    newest = next(f.place.name.step for f in found if f.is_complete)
    assert newest in (7, 14), (
        "on a busy machine the one of step 14 is left out, while that of step 7 is still uploaded"
    )

    again = one.start(slots=2, environment=variables(store.gate.port))
    one.hurry()
    assert again.process.wait(60) == 0
    again.await_line(f"goes on from the checkpoint of step {newest}")
    one.check(finished=2)
    assert one.ledger.steps == LAST_STEP
    assert [r.resumed_at_step for r in one.ledger.resumptions] == [0, newest]
    last = catalogue.find(storage_of(URL))[0]
    assert last.is_complete and last.place.name.step == LAST_STEP


def test_a_job_whose_nodes_are_all_preempted_goes_on_from_its_bucket(
    job: MakeJob, store: ObjectStore, etcd: EmbeddedEtcd
) -> None:
    given = {"etcd-1:2379": etcd.endpoint, "bucket": BUCKET, "train.py": str(SCRIPT)}
    *options, script = printed("docs/guide/spot-nodes.md", "s3://bucket/demo", given)
    one = job(options=options, file=Path(script))
    first = one.start(environment=variables(store.gate.port))
    one.await_step(4)
    first.send(signal.SIGTERM)
    assert first.process.wait(START_S) == 128 + signal.SIGTERM
    assert first.says("stopped: every worker left; the checkpoint of step")

    again = one.start(environment=variables(store.gate.port))
    one.hurry()
    assert again.process.wait(START_S) == 0
    assert again.says("goes on from the checkpoint of step")
    one.check(finished=1)
