"""The button for collectives shows torch's flight recorder, of a real job whose rank does not come to one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.browser.browser import Page
from tests.browser.test_dashboard_in_browser import address_of
from tests.faults.conftest import MakeJob
from tests.faults.job import START_S
from tests.faults.test_collectives_under_way import SCRIPT
from tests.lab.wait import eventually

WAITS = re.compile(
    r"Rank 0 waits in all_reduce number 2 \(torch's group 0 \(default_pg\), gloo\), for [\d.]+ m?s; "
    r"Rank 1 has not begun it\.\n"
)


def test_a_click_shows_what_torchs_flight_recorder_has(
    job: MakeJob, etcd: EmbeddedEtcd, chromium: Any, tmp_path: Path
) -> None:
    script = tmp_path / "holds.py"
    script.write_text(SCRIPT)
    one = job(endpoints=etcd.endpoint, nodes="1", program=[str(script), str(tmp_path)])
    page = Page(chromium, address_of(one.start(slots=2, options=["--dashboard=0"])))
    eventually((tmp_path / "holds-1").exists, START_S, "rank 1 holds", 0.02)
    button = page.tab.get_by_role("button", name=re.compile("Collectives of rank 1"))

    def asked() -> str:
        button.click()
        page.await_text("#panel-note", "Taken just now.")
        said = page.text("#panel-text")
        page.tab.keyboard.press("Escape")
        page.tab.wait_for_selector("#panel", state="hidden")
        return said

    said = eventually(lambda: found if WAITS.match(found := asked()) else "", START_S, asked, 0.1)
    of_1, of_0 = said.index("\nrank 1, slot 1 of "), said.index("\nrank 0, slot 0 of ")
    assert of_1 < of_0, "the worker whose button it was comes first"
    group = "torch's group 0 (default_pg) (gloo) among ranks 0, 1:"
    assert f"  {group} 1 collective begun\n  nothing is under way\n" in said[of_1:of_0], said
    assert f"  {group} 2 collectives begun\n    all_reduce number 2, 1,000 elements, for " in said[of_0:], (
        said
    )
    assert page.violations() == []

    (tmp_path / "go").touch()
    page.await_text("#what", "has succeeded")
    page.close()
    one.finish()
