"""A real browser, and the page in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

ARTEFACTS = Path(__file__).parents[2] / "test-artifacts"
WIDE = {"width": 1400, "height": 900}
PHONE = {"width": 390, "height": 844}
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
_PATIENCE_MS = 20_000


def found() -> str | None:
    """The browser's path: ``$MEMSTREAM_CHROMIUM``, or what is called so on the PATH."""
    named = os.environ.get("MEMSTREAM_CHROMIUM")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def running() -> Iterator[Browser]:
    """A browser, or a skipped test where there is none."""
    path = found()
    if path is None:
        pytest.skip("chromium not found: neither $MEMSTREAM_CHROMIUM nor one on the PATH")
    expect.set_options(timeout=_PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Tab:
    """The page in one tab.

    Attributes:
        page: the tab.
        asked: hosts that anything was asked of.
        errors: what scripts complained about.
    """

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.asked: set[str] = set()
        self.errors: list[str] = []
        page.set_default_timeout(_PATIENCE_MS)
        page.context.on("request", lambda request: self._note(request.url))
        page.on("websocket", lambda socket: self._note(socket.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)

    def _note(self, url: str) -> None:
        if not url.startswith(("data:", "blob:")):
            self.asked.add(urlsplit(url).netloc)

    def open(self) -> Tab:
        """Loads the page and waits until one can type."""
        self.page.goto(self.url)
        expect(self.message).to_be_visible()
        return self

    def reload(self) -> Tab:
        """Loads it again."""
        self.page.reload()
        expect(self.message).to_be_visible()
        return self

    @property
    def message(self) -> Locator:
        """The field for what is said next."""
        return self.page.get_by_role("textbox", name="Message")

    @property
    def said(self) -> Locator:
        """What the user said."""
        return self.page.locator(".line.user .said")

    @property
    def replies(self) -> Locator:
        """What was answered."""
        return self.page.locator(".line.assistant .said")

    @property
    def stop(self) -> Locator:
        """The button that stops a reply; hidden while none runs."""
        return self.page.get_by_role("button", name="Stop")

    def part(self, name: str) -> Locator:
        """A section of the panel."""
        return self.page.get_by_role("region", name=name, exact=True)

    def send(self, text: str) -> None:
        """Says something, and does not wait for the reply."""
        self.message.fill(text)
        self.message.press("Enter")
        expect(self.said.last).to_have_text(text)

    def say(self, text: str) -> None:
        """Says something, and waits until the reply is stored and shown."""
        n = self.page.locator(".line.assistant").count()
        self.send(text)
        expect(self.page.locator(".line.assistant:not(.pending)")).to_have_count(n + 1)
        expect(self.stop).to_be_hidden()

    def begin(self) -> None:
        """Goes to a new conversation."""
        self.page.get_by_role("button", name="New conversation").click()
        expect(self.page.locator(".line")).to_have_count(0)

    def ask(self, part: str, field: str, text: str) -> None:
        """Fills a field of the panel and sends it."""
        box = self.part(part).get_by_role("textbox", name=field)
        box.fill(text)
        box.press("Enter")

    def overflow(self) -> int:
        """By how many pixels the page is wider than the screen."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


class Opener:
    """Opens tabs of a server, and keeps a picture of each when its test ends."""

    def __init__(self, browser: Browser, url: str, name: str) -> None:
        self._browser, self._url, self._name = browser, url, name
        self._tabs: list[Tab] = []
        self._contexts: list[Any] = []

    def context(self, *, user: str | None, size: dict[str, int] = WIDE, **options: Any) -> Any:
        """A browser of its own, which remembers a user's name."""
        made = self._browser.new_context(viewport=size, **options)
        if user is not None:
            made.add_init_script(
                f"localStorage.getItem('memstream.user') ?? localStorage.setItem('memstream.user', '{user}')"
            )
        self._contexts.append(made)
        return made

    def tab(self, *, user: str | None = "anna", context: Any = None, **options: Any) -> Tab:
        """A tab that is not open yet."""
        context = context or self.context(user=user, **options)
        tab = Tab(context.new_page(), self._url)
        self._tabs.append(tab)
        return tab

    def __call__(self, **options: Any) -> Tab:
        """An open tab."""
        return self.tab(**options).open()

    def close(self) -> None:
        """Keeps the pictures, and closes everything."""
        ARTEFACTS.mkdir(exist_ok=True)
        for i, tab in enumerate(self._tabs):
            if not tab.page.is_closed():
                tab.page.screenshot(path=ARTEFACTS / f"{self._name}-{i}.png")
        for context in self._contexts:
            context.close()


Open = Callable[..., Tab]
