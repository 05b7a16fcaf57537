"""Takes the pictures of docs/pictures anew: the dashboard of a real job, in which a fault is made for each of them.

    python -m tests.browser.page_pictures [NAME ...]

Each job trains examples/digits.py on lab hosts. A picture holds the page from its top to one of its sections, and
carries the words that it shows (png_text.py). Look at the pictures before they are kept. Needs what fault_pictures.py
needs, and scikit-learn.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.browser.browser import Page
from tests.browser.fault_pictures import VERDICT, browsing, show
from tests.browser.png_text import with_text

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "docs" / "pictures"
PROGRAM = (str(ROOT / "examples" / "digits.py"), "--epochs", "1000")
IMPORTS = "sklearn.datasets"
SCALE = 0.75  # 960 pixels of a page 1,280 wide
SHOWS_MS = 3000  # since the verdict appeared: the curves have points of the time after the fault
KEYWORD = "Shows"
SHOWN = """
last => {
  const box = element => element.getBoundingClientRect();
  const end = box(document.querySelector(last).closest('section')).bottom;
  const shown = title => title.getClientRects().length && box(title).top < end;
  const titles = [...document.querySelectorAll('h2')].filter(shown).map(title => title.textContent);
  return {end: end + window.scrollY, titles};
}
"""


@dataclass(frozen=True, slots=True)
class Picture:
    fault: str  # of fault_pictures.FAULTS
    verdict: re.Pattern[str]
    last: str  # the title of the section that ends the picture


PICTURES = {
    "dashboard": Picture("killed_worker", re.compile("after rank 3 on h2 was lost"), "#heat-title"),
    "stopped-worker": Picture("frozen_rank", re.compile("Rank 2 on h2 is stopped"), "#speed-title"),
    "cut-link": Picture("cut_link", re.compile("after node h2 was lost"), "#goodput-title"),
    "full-disk": Picture("full_disk", re.compile("Checkpoints are not written"), "#goodput-title"),
}


def take(browser: Any, address: str, name: str) -> None:
    """Writes the picture of the page as it is in a moment."""
    page = Page(browser, address, scale=SCALE)
    page.tab.wait_for_selector("#nodes tr")
    page.tab.wait_for_timeout(SHOWS_MS)
    shown = page.tab.evaluate(SHOWN, PICTURES[name].last)
    words = {"verdict": page.tab.evaluate(VERDICT)[:2], "titles": shown["titles"]}
    assert PICTURES[name].verdict.search(" ".join(words["verdict"])), words
    clip = {"x": 0, "y": 0, "width": page.tab.viewport_size["width"], "height": shown["end"] + 12}
    taken = page.tab.screenshot(clip=clip, full_page=True)
    (DIRECTORY / f"{name}.png").write_bytes(with_text(taken, KEYWORD, json.dumps(words)))
    page.close()


def main(names: list[str]) -> int:
    if not PICTURES.keys() >= set(names):
        print(f"usage: python -m tests.browser.page_pictures [{'|'.join(PICTURES)} ...]", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch, browsing() as browser:
        for name in names or PICTURES:
            picture = PICTURES[name]
            show(
                picture.fault,
                browser,
                Path(scratch) / name,
                [picture.verdict],
                program=PROGRAM,
                imports=IMPORTS,
                found=lambda address, name=name: take(browser, address, name),  # type: ignore[misc]
            )
            print(DIRECTORY / f"{name}.png", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
