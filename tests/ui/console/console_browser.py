"""A browser for tests of the console: Debian's Chromium, and what it complained about."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WAIT_MS = 30_000

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; `make system` installs it")


@dataclass
class Tab:
    """A page, and every fault it had: console errors, script errors, answers of 400 and more, requests elsewhere."""

    page: Any
    url: str
    faults: list[str] = field(default_factory=list)

    def open(self, name: str = "") -> None:
        """Load a page and wait until the strip has figures and the page its title."""
        self.page.goto(f"{self.url}/{name}")
        self.page.wait_for_selector("[data-figure=goodput] dd", timeout=WAIT_MS)
        self.page.wait_for_selector("h1", timeout=WAIT_MS)

    def go(self, title: str) -> None:
        """Choose a page in the menu."""
        self.page.locator("[data-testid=stSidebarNav]").get_by_text(title, exact=True).click()
        self.page.locator("h1", has_text=title).wait_for(timeout=WAIT_MS)

    def figure(self, name: str) -> str:
        return str(self.page.locator(f"[data-figure={name}] dd").first.inner_text())

    def boxes(self) -> list[str]:
        """What exception boxes and error messages say."""
        found = self.page.locator("[data-testid=stException], [data-testid=stAlertContentError]")
        return list(found.all_inner_texts())

    def button(self, text: str) -> Any:
        return self.page.get_by_role("button", name=text)


@contextmanager
def browsing(url: str, *, scheme: str = "light", locale: str = "en-US", height: int = 1000) -> Iterator[Tab]:
    """A tab of a fresh browser at the console of that address; its faults are kept."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            context = browser.new_context(
                viewport={"width": 1400, "height": height}, color_scheme=scheme, locale=locale
            )
            page = context.new_page()
            tab = Tab(page, url)
            page.on("console", lambda said: tab.faults.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: tab.faults.append(str(error)))
            page.on("response", lambda one: tab.faults.append(f"{one.status} {one.url}") if one.status >= 400 else None)
            page.on("request", lambda one: None if _own(one.url, url) else tab.faults.append(f"asked {one.url}"))
            yield tab
        finally:
            browser.close()


def _own(asked: str, url: str) -> bool:
    return asked.startswith((url, url.replace("http", "ws", 1), "data:", "blob:"))
