"""A rank that computes longer than the others, on the dashboard of a real job: the verdict and the heat map name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from tests.browser.browser import Page
from tests.browser.test_dashboard_in_browser import NETWORK, address_of
from tests.faults.conftest import MakeJob

SLOW_SLOT, WORKERS = 1, 3
SAMPLES = 12_000  # 500 steps: 50 s and more while the slot is slow

# For each row of the heat map, the share of its coloured pixels that are red: twice the median of their column or more.
RED_SHARES = f"""() => {{
  const canvas = document.querySelector("#heat"), image = canvas.getContext("2d");
  const left = 36 * canvas.width / canvas.clientWidth;  // behind the labels
  return Array.from({{length: {WORKERS}}}, (_, row) => {{
    const middle = Math.floor((row + 0.5) * canvas.height / {WORKERS});
    const pixels = image.getImageData(left, middle, canvas.width - left, 1).data;
    let coloured = 0, red = 0;
    for (let at = 0; at < pixels.length; at += 4) {{
      if (!pixels[at + 3]) continue;
      coloured += 1;
      red += pixels[at] > 2 * pixels[at + 2];
    }}
    return coloured ? red / coloured : 0;
  }});
}}"""


def test_a_straggler_stands_out_and_is_named(
    job: MakeJob, etcd: EmbeddedEtcd, chromium: Any, tmp_path: Path
) -> None:
    script = ["--slow-slot", str(SLOW_SLOT), "--step-s", "0"]
    one = job(endpoints=etcd.endpoint, nodes="1", samples=SAMPLES, epochs=1, script=script)
    page = Page(chromium, address_of(one.start(slots=WORKERS, options=["--dashboard=0"])))
    page.await_text("#what", "slows the job down")
    page.tab.wait_for_function(f"() => document.querySelectorAll('#network tr').length === {WORKERS}")
    (slow,) = (int(cells[0]) for cells in page.tab.evaluate(NETWORK) if cells[2] == str(SLOW_SLOT))
    assert page.text("#what").startswith(f"Rank {slow} on ")
    assert "its row stands out in the heat map" in page.text("#next")

    page.tab.wait_for_function(f"() => ({RED_SHARES})()[{slow}] > 0.5")
    page.tab.screenshot(path=tmp_path / "straggler.png", full_page=True)
    shares = page.tab.evaluate(RED_SHARES)
    others = [share for rank, share in enumerate(shares) if rank != slow]
    assert max(others) < 0.5, f"red by row: {shares}"
    assert f"the slowest now is rank {slow} with " in page.tab.get_attribute("#heat", "aria-label")
    page.tab.focus("#heat")
    for key in ["ArrowUp", *["ArrowDown"] * slow]:  # the first key goes to the newest column of the first row
        page.tab.keyboard.press(key)
    page.await_text("#heat-cell", f"Rank {slow} at step ")
    page.close()
    one.finish()
    one.check(finished=WORKERS)
