"""What a server with keys shows first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import ui

from memstream.serving.page import parts

_LONGEST_KEY = 1000  # characters
# Hands both fields over and empties the key's.
_SUBMIT = """(e) => {
  e.preventDefault();
  const [name, key] = e.currentTarget.querySelectorAll("input");
  emit(name.value, key.value);
  key.value = "";
}"""


class Door:
    """Asks for a name and a key.

    Args:
        model: that is served.
        user: the name it was last.
        complaint: what is wrong with the key that was kept.
        on_key: takes name and key; returns what is wrong with them, None where they open the page.
    """

    def __init__(
        self, *, model: str, user: str, complaint: str, on_key: Callable[[str, str], Awaitable[str | None]]
    ) -> None:
        self._on_key = on_key
        with parts.box("door", "main"), parts.box("door-card"):
            parts.brand(model)
            parts.text("This server takes a key.", "door-text")
            with parts.box("door-form", "form").on("submit", self._take, js_handler=_SUBMIT):
                parts.field("Your name", most=parts.LONGEST_NAME, hint="Your name: whose memory is used", value=user)
                parts.field("API key", most=_LONGEST_KEY, secret=True)
                with parts.box("button primary", "button", type="submit"):
                    ui.label("Enter")
            self._complaint = parts.text(complaint, "complaint")
            self._complaint.props["role"] = "alert"

    async def _take(self, event: Any) -> None:
        name, key = (str(part) for part in event.args)
        complaint = await self._on_key(name, key)
        if complaint is not None:
            self._complaint.set_text(complaint)
