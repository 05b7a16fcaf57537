"""The cluster's page of a real daemon in a real browser: nodes, the queue, a link to a job, a drain, on a phone too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from bagua_agent.cluster_client import cluster_requests
from tests.browser.browser import Page
from tests.cluster.conftest import MakeCluster, make_cluster
from tests.faults.job import BATCH
from tests.lab.fixtures import make_lab
from tests.lab.forward import Forward

__all__ = ["make_cluster", "make_lab"]

PORT = 7465


@pytest.fixture
def open_page(chromium: Any) -> Callable[..., Page]:
    return lambda address, **looks: Page(chromium, address, **looks)


def test_a_cluster_is_seen_from_its_page_alone(
    make_cluster: MakeCluster, open_page: Callable[..., Page]
) -> None:
    cluster = make_cluster(2, dashboard=f"{PORT}")
    first, second = cluster.daemons
    with closing(Forward(first.host, ("127.0.0.1", PORT))) as forward:
        address = f"http://{forward.endpoint}/"
        page = open_page(address)
        page.await_text("#what", "No job runs on the 2 nodes")
        page.await_text("#members", second.name)
        run = cluster.submit("run", (2, 2))
        cluster.submit("next", (1, 1))
        run.await_world(2)
        page.await_text("#what", "1 job runs on 2 of 2 nodes; 1 job waits, next first")
        page.await_text("#queue", "waits for 1 of 1 node")
        page.await_text("#jobs", f"of {run.epochs * run.samples // BATCH}")
        page.tab.wait_for_function("() => document.querySelector('#queue tr').textContent.includes('in ')")
        assert page.violations() == []

        page.tab.focus("#jobs a")
        page.tab.keyboard.press("Enter")
        page.await_text("#what", "trains with 2 workers on 2 nodes")
        page.await_text("#served", f"served by the daemon of {first.name}")
        assert page.violations() == []
        page.tab.click("#up a")
        page.await_text("#what", "1 job waits")

        phone = open_page(address, dark=True, width=390)
        cluster_requests.drain(cluster.store, second.name, force=False, reason="new disk")
        phone.await_text("#members", "draining")
        phone.await_text("#next", f"bagua-launch undrain {second.name}")
        wide = phone.tab.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not wide, "the page scrolls sideways on a phone"
        assert phone.violations() == []

        second.kill()
        page.await_text("#what", f"Node {second.name} has been silent")
        page.await_text("#members", "silent")
        second.start()
        cluster_requests.undrain(cluster.store, second.name)
        run.hurry()
        page.await_text("#ended", "run")
        assert page.violations_light_and_dark() == []
        phone.close()
        page.close()
