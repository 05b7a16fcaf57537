"""A job whose checkpoints can't be written trains on, and its page says why and which one is the newest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.dashboard.collector import Collector
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.faults.conftest import MakeJob
from tests.faults.job import DEADLINE_S, START_S
from tests.lab.wait import eventually

TROUBLE = "Checkpoints are not written: "


def test_a_directory_that_is_gone_is_on_the_page_until_it_is_back(
    job: MakeJob, etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    words = ["--checkpoint-dir", str(saved), "--checkpoint-every", "2"]
    one = job(endpoints=etcd.endpoint, options=words, samples=2400)
    one.start(slots=2)
    store = Store(store_config((etcd.endpoint,), StoreCredentials()))
    store.connect(DEADLINE_S)
    collector = Collector(store, one.job_id)

    def shown() -> tuple[int, str]:
        """The newest checkpoint that all have written, and the verdict."""
        page = json.loads(collector.page())
        return page.get("progress", {}).get("checkpoint") or 0, page.get("verdict", {}).get("what", "")

    def await_shown(is_it: Callable[[int, str], bool], what: str) -> None:
        eventually(lambda: is_it(*shown()), START_S, lambda: f"{what}: {shown()}", 0.2)

    try:
        await_shown(lambda step, said: step > 0, "a checkpoint")
        saved.rename(tmp_path / "moved away")  # at once: a removal meets files that are written meanwhile
        gone_at = one.step
        await_shown(lambda step, said: said.startswith(TROUBLE) and "No such file" in said, "the trouble")
        saved.mkdir()
        await_shown(lambda step, said: step > gone_at and not said.startswith(TROUBLE), "a checkpoint again")
    finally:
        collector.stop()
        store.close()
    one.finish()
    one.check(finished=2)
