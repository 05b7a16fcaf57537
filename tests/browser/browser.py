"""A headless Chromium for tests of the dashboard; the tests are skipped, with the reason, where there is none."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 60_000  # bounds of a loaded machine


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser of Playwright's."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="the dashboard's page is not tested: pip install bagua-elastic[browser]"
    )
    pytest.importorskip(
        "axe_playwright_python", reason="accessibility is not checked: no axe-playwright-python"
    )
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"the dashboard's page is not tested: none of {', '.join(PROGRAMS)} is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Page:
    """A tab that shows a dashboard. Errors of the page's scripts fail `close`."""

    def __init__(
        self, browser: Any, address: str, *, dark: bool = False, width: int = 1280, scale: float = 1
    ) -> None:
        self.errors: list[str] = []
        self.tab = browser.new_page(
            color_scheme="dark" if dark else "light",
            viewport={"width": width, "height": 900},
            device_scale_factor=scale,
        )
        self.tab.set_default_timeout(WAIT_MS)
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.goto(address)

    def await_text(self, selector: str, text: str) -> None:
        """Until the element holds `text`."""
        self.tab.wait_for_function(
            "([selector, text]) => document.querySelector(selector)?.textContent.includes(text)",
            arg=[selector, text],
        )

    def text(self, selector: str) -> str:
        return str(self.tab.text_content(selector))

    def violations(self) -> list[str]:
        """What axe finds against accessibility; the rules and the elements."""
        axe = importlib.import_module("axe_playwright_python.sync_playwright")
        found = axe.Axe().run(self.tab).response["violations"]
        return [f"{v['id']}: {node['html'][:200]}" for v in found for node in v["nodes"]]

    def violations_light_and_dark(self) -> list[str]:
        """Of the page as it is, in both color schemes; leaves it light."""
        light = self.violations()
        self.tab.emulate_media(color_scheme="dark")
        dark = self.violations()
        self.tab.emulate_media(color_scheme="light")
        return light + dark

    def close(self) -> None:
        self.tab.close()
        assert self.errors == []
