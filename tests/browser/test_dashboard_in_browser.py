"""The dashboard of a real job in a real browser: what it says while a worker is killed, by clicks and by keys."""

from __future__ import annotations

import re
from typing import Any

from bagua_agent.dashboard.listening import Listening
from bagua_agent.dashboard.page_data import page_data
from bagua_agent.dashboard.server import Dashboard
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.observation.series import JobSeries
from tests.agent.dashboard.test_page_data import FORMED, IN_FORCE
from tests.agent.observation.facts import NOW_S, agent, facts, worker
from tests.browser.browser import Page
from tests.faults.conftest import MakeJob
from tests.faults.job import Node

RECORD_TEXT = """
window.drawn = [];
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
  drawn.push(text);
  draw.call(this, text, ...place);
};
undefined;
"""
NETWORK = (
    "[...document.querySelectorAll('#network tr')].map(row => [...row.cells].map(cell => cell.textContent))"
)


def address_of(node: Node) -> str:
    node.await_line("dashboard at http://")
    found = re.search(r"dashboard at (http://[0-9.:]+/)", node.log)
    assert found is not None
    return found[1]


def test_a_killed_worker_is_told_with_its_cause_and_cost(
    job: MakeJob, etcd: EmbeddedEtcd, chromium: Any
) -> None:
    one = job(endpoints=etcd.endpoint, nodes="1:2", script=["--say"])
    node = one.start(slots=2, options=["--dashboard=0"])
    page = Page(chromium, address_of(node))
    page.await_text("#what", "trains with 2 workers on 1 node")
    assert one.job_id in page.text("h1")
    assert "up to 2 nodes" in page.text("#why")
    page.tab.wait_for_function("() => document.querySelectorAll('#workers tr').length === 2")

    page.tab.get_by_role("button", name=re.compile("Output of rank 1")).click()
    page.await_text("#panel-text", "hello from slot")
    assert page.violations_light_and_dark() == []
    page.tab.keyboard.press("Escape")
    page.tab.wait_for_selector("#panel", state="hidden")
    _check_a_gap_in_output(page)
    stacks = page.tab.get_by_role("button", name=re.compile("Stacks of rank 0"))
    stacks.focus()
    page.tab.keyboard.press("Enter")
    page.await_text("#panel-text", "train.py")
    assert page.violations_light_and_dark() == []
    page.tab.click("#panel-close")
    page.tab.get_by_role("button", name=re.compile("Collectives of rank 1")).click()
    page.await_text("#panel-text", "(gloo) among ranks 0, 1: ")
    assert page.text("#panel-text").index("rank 1, slot") < page.text("#panel-text").index("rank 0, slot")
    assert page.violations_light_and_dark() == []
    page.tab.click("#panel-close")

    before = one.step
    one.replace_killed_worker(node)
    page.await_text("#what", "was lost")
    page.await_text("#failure-list", "killed by SIGKILL")
    assert "What failed first" in page.text("#failures")
    page.await_text("#timeline", "failover")
    page.await_text("#goodput-legend", "failover")
    page.tab.wait_for_function(f"() => {NETWORK}.some(cells => cells[9].includes(' in '))")
    for chart in ("speed", "metric-chart"):
        page.tab.wait_for_selector(f"#{chart} canvas")
        page.tab.wait_for_function(
            f"() => / now; .*\\(failover\\)/.test(document.querySelector('#{chart}').getAttribute('aria-label'))"
        )
    assert page.tab.evaluate("document.querySelector('#metric').value") == "loss"
    network = page.tab.evaluate(NETWORK)
    assert sorted(cells[0] for cells in network) == ["0", "1"]
    assert all("–" not in (cells[3], cells[6]) for cells in network), "interface, and bytes sent in all"
    [healed] = [cells for cells in network if " in " in cells[9]]
    assert healed[2] == "1", "the successor in the killed worker's slot has received the state"
    page.tab.wait_for_function(
        "() => document.querySelector('#heat').getAttribute('aria-label').includes('slowest')"
    )
    page.tab.focus("#heat")
    page.tab.keyboard.press("ArrowLeft")
    page.await_text("#heat-cell", "Rank 0 at step")
    assert page.violations_light_and_dark() == []
    assert one.step > before

    one.finish()
    page.await_text("#what", "has succeeded")
    page.close()
    one.check(finished=2)


def _check_a_gap_in_output(page: Page) -> None:
    """A line that had begun before bytes that are not kept any more does not go on after them."""
    parts = {0: (0, "step 2 loss=0."), 14: (9000, "25\nstep 900 loss=0.25\n")}

    def answer(route: Any) -> None:
        position = int(route.request.url.rpartition("/")[2])
        begin, text = parts.get(position, (position, ""))
        route.fulfill(
            json={"kept": True, "position": begin, "next": begin + len(text), "text": text, "problem": ""}
        )

    page.tab.route("**/api/log/**", answer)
    page.tab.get_by_role("button", name=re.compile("Output of rank 1")).click()
    page.await_text("#panel-text", "step 900")
    assert page.text("#panel-text") == "step 2 loss=0.\n25\nstep 900 loss=0.25\n"
    assert page.text("#panel-note") == "Earlier output is not kept any more."
    page.tab.unroute("**/api/log/**")
    page.tab.keyboard.press("Escape")
    page.tab.wait_for_selector("#panel", state="hidden")


def test_a_job_that_fails_shows_its_first_failure_first(
    job: MakeJob, etcd: EmbeddedEtcd, chromium: Any
) -> None:
    one = job(
        endpoints=etcd.endpoint, nodes="1", script=["--raise-at", "30"], options=["--max-restarts", "0"]
    )
    page = Page(chromium, address_of(one.start(slots=2, options=["--dashboard=0"])))
    page.await_text("#what", "The job has failed")
    page.await_text("#failure-list", "Traceback")
    assert page.text("#failures-title") == "What failed first"
    sections = page.tab.evaluate(
        "[...document.querySelectorAll('main > section')].slice(0, 2).map(s => s.id)"
    )
    assert sections == ["verdict", "failures"], "the cause stands directly below the verdict"
    assert "ValueError: a bad sample" in page.text("#what") and "rank" in page.text("#why")
    assert page.violations() == []
    page.close()
    one.finish([1])


def test_the_page_goes_on_when_its_agent_is_gone_and_fits_a_phone(
    job: MakeJob, etcd: EmbeddedEtcd, chromium: Any
) -> None:
    one = job(endpoints=etcd.endpoint, nodes="1:2")
    first, second = (one.start(options=["--dashboard=0"]) for _ in range(2))
    page = Page(chromium, address_of(first), dark=True, width=390)
    one.await_world(2)
    page.await_text("#what", "trains with 2 workers on 2 nodes")
    page.tab.wait_for_function("() => document.querySelectorAll('#nodes a').length === 2")
    wide = page.tab.evaluate("document.documentElement.scrollWidth > innerWidth")
    assert not wide, "the page scrolls sideways on a phone"
    assert page.violations() == []
    first.kill_agent()
    page.tab.wait_for_url(address_of(second))
    page.await_text("#what", "trains with 1 worker on 1 node")
    one.finish([-9, 0])
    page.close()


def test_an_answer_that_is_no_page_is_shown_with_the_age_of_the_last_one(chromium: Any) -> None:
    """As a revoked certificate is answered, and as a proxy answers whose server is gone."""
    dashboard = Dashboard(Listening.parse("0"))
    dashboard.start()
    page = Page(chromium, dashboard.url)

    def answer(**given: Any) -> None:
        page.tab.unroute("**/api/page")
        page.tab.route("**/api/page", lambda route: route.fulfill(**given))

    try:
        page.await_text("#problem", "has not joined its job yet")
        answer(json=page_data(facts(), JobSeries(), "h0"))
        page.await_text("#what", "trains with 2 workers on 2 nodes")
        page.tab.wait_for_selector("#problem", state="hidden")
        answer(status=403, body="this certificate is revoked\nand more\n")
        page.await_text("#problem", "answers with status 403: this certificate is revoked.")
        assert "The page shows what was so at " in page.text("#problem")
        answer(status=502, content_type="text/html", body="<html>\n<h1>Bad Gateway</h1></html>")
        page.await_text("#problem", "answers with status 502. The page shows")
        answer(status=200, content_type="text/html", body="<html>Sign in</html>")
        page.await_text("#problem", "answers with something other than JSON. The page shows")
        answer(json=page_data(facts(), JobSeries(), "h0"))
        page.tab.wait_for_selector("#problem", state="hidden")
    finally:
        page.close()
        dashboard.stop()


def test_times_of_another_day_have_their_date_on_a_phone_too(chromium: Any) -> None:
    series = JobSeries()
    for hour in range(60):
        agents = (
            agent(rank, worker(rank, step=10 + hour, metrics={"loss": 1 / (1 + hour)})) for rank in (0, 1)
        )
        seen = facts(NOW_S + 3600 * hour, events=(FORMED, IN_FORCE), agents=tuple(agents))
        series.take(seen)
    dashboard = Dashboard(Listening.parse("0"))
    dashboard.start()
    page = Page(chromium, dashboard.url, width=390)
    try:
        page.await_text("#problem", "has not joined its job yet")
        page.tab.evaluate(RECORD_TEXT)
        page.tab.route("**/api/page", lambda route: route.fulfill(json=page_data(seen, series, "h0")))
        page.await_text("#what", "trains with 2 workers on 2 nodes")
        for table in ("#timeline", "#events"):
            page.await_text(table, "1970-01-01 ")
        for text in ("1970-01-02 00:00:00", "0.0002"):  # of the axes
            page.tab.wait_for_function("text => drawn.includes(text)", arg=text)
        wide = page.tab.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not wide, "the page scrolls sideways on a phone"
    finally:
        page.close()
        dashboard.stop()
