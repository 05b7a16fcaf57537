"""Writes pictures of a dashboard that is being served: light, dark, and as a phone shows it.

    python -m tests.browser.dashboard_pictures http://127.0.0.1:7465/ build/pictures

Needs Playwright (pip install -e '.[browser]') and a Chromium on PATH.
"""

import sys
from pathlib import Path

from tests.browser.fault_pictures import browsing

LOOKS = {"light": ("light", 1280), "dark": ("dark", 1280), "phone": ("light", 390)}
SETTLED_MS = 3000  # for curves to have points


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python -m tests.browser.dashboard_pictures ADDRESS DIRECTORY", file=sys.stderr)
        return 2
    address, directory = sys.argv[1], Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    with browsing() as browser:
        for name, (scheme, width) in LOOKS.items():
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
            page.goto(address)
            page.wait_for_selector("#nodes tr")
            page.wait_for_timeout(SETTLED_MS)
            page.screenshot(path=directory / f"{name}.png", full_page=True)
            print(directory / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
