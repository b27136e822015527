"""The talk: what was said, what is being said, and the field for what comes next."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import partial

from nicegui import ui

from memstream.serving.page import parts, words
from memstream.serving.page.parts import Handler, Told
from memstream.serving.page.rooms import Room

_LONGEST = 200_000  # characters that the field takes
_ROLES = {"user": "user", "call": "tool", "tool": "tool"}  # every other is the assistant's
_NOTES = {"call": "calls a tool", "tool": "what the tool answered"}
_WAITS = "waiting for a free place"
_STARTERS = (
    "My order number is 48213.",
    "What did I tell you so far?",
    "Tell me something about the sea.",
)


@dataclass(frozen=True, slots=True)
class Line:
    """One bubble: its key, who says it (``user``, ``assistant``, ``tool``, ``error``), the text, a word about it."""

    key: str
    role: str
    text: str
    note: str = ""
    pending: bool = False


def lines(room: Room) -> list[Line]:
    """What a conversation shows, in order."""
    found = [
        Line(
            f"turn:{turn.id}",
            _ROLES.get(turn.role, "assistant"),
            turn.text,
            note=_NOTES.get(turn.role) or ("stopped here" if turn.state == "cut" and turn.role != "user" else ""),
            pending=turn.state == "open",
        )
        for turn in room.said
    ]
    if room.report is not None and not room.talks and found and found[-1].role == "assistant":
        told = [found[-1].note, words.account(room.report)]
        found[-1] = dataclasses.replace(found[-1], note=" · ".join(part for part in told if part))
    for talk in room.talks:
        stored = bool(room.said) and room.said[-1].role == "user" and room.said[-1].text == talk.text
        if talk.runs or not stored:
            found.append(Line(f"talk:{talk.number}:user", "user", talk.text))
        if talk.error is not None:
            found.append(Line(f"talk:{talk.number}:error", "error", talk.error))
        else:
            waits = _WAITS if talk.turn.waits else ""
            found.append(Line(f"talk:{talk.number}:reply", "assistant", talk.reply, note=waits, pending=True))
    if room.trouble and not any(talk.error for talk in room.talks):
        found.append(Line("trouble", "error", room.trouble))
    return found


class _Bubble:
    """A line in the browser."""

    def __init__(self, line: Line) -> None:
        self.line = line
        with parts.box(f"line {line.role}") as self.element:
            if line.role == "assistant":
                self._text: ui.html | ui.label = ui.html("", sanitize=True).classes("said markdown")
                self._text.props["dir"] = "auto"
            else:
                self._text = parts.text("", "said plain")
            self._note = parts.text("", "note")
        self.show(line)

    def show(self, line: Line) -> None:
        """Shows the line as it is now."""
        self.line = line
        if isinstance(self._text, ui.html):
            self._text.set_content(words.as_html(line.text))
        else:
            self._text.set_text(line.text)
        self._note.set_text(line.note)
        parts.mark(self.element, "pending", line.pending)
        parts.mark(self.element, "empty", not line.text)


class Chat:
    """The left side of the page.

    Args:
        cache: size of the cache, for the greeting.
        on_say: takes a text.
        on_stop: stops what runs.
        on_earlier: shows more of the past.
    """

    def __init__(self, *, cache: str, on_say: Told, on_stop: Handler, on_earlier: Handler) -> None:
        self._bubbles: list[_Bubble] = []
        with parts.box("chat", "main", aria_label="Conversation"):
            with parts.box("log"), parts.box("log-inner"):  # the outer one runs upwards, so that it stays at its end
                self._earlier = parts.button("Earlier turns", on_earlier, icon="expand_less", classes="quiet earlier")
                self._log = parts.box("lines", role="log", aria_live="polite")
                with parts.box("greeting") as self._greeting:
                    parts.text(f"An endless conversation in {cache}", "greeting-title", "h1")
                    parts.text(
                        "Tell it something, talk about other things for as long as you like, and ask again. What "
                        "leaves the window is kept as text, and comes back when it matters.",
                        "greeting-text",
                    )
                    with parts.box("starters"):
                        for starter in _STARTERS:
                            parts.button(starter, partial(on_say, starter), classes="starter")
            with parts.box("composer"), parts.form("composer-form", on_say):
                self._field = parts.field("Message", most=_LONGEST, lines=True, hint="Say something")
                self._stop = parts.button("", on_stop, icon="stop", classes="round stop", name="Stop")
                with parts.box("button round send", "button", type="submit", aria_label="Send", title="Send (Enter)"):
                    ui.icon("arrow_upward").props("aria-hidden=true")

    def show(self, room: Room) -> None:
        """Shows a conversation as it is now, touching only what has changed."""
        wanted = lines(room)
        kept = 0
        while kept < min(len(wanted), len(self._bubbles)) and wanted[kept].key == self._bubbles[kept].line.key:
            if wanted[kept] != self._bubbles[kept].line:
                self._bubbles[kept].show(wanted[kept])
            kept += 1
        for bubble in self._bubbles[kept:]:
            bubble.element.delete()
        with self._log:
            self._bubbles[kept:] = [_Bubble(line) for line in wanted[kept:]]
        self._greeting.set_visibility(not wanted)
        self._earlier.set_visibility(len(room.said) >= room.shown)
        self._stop.set_visibility(bool(room.running))

    def give_back(self, text: str) -> None:
        """Puts a text that was not taken back into the field, unless something else was typed meanwhile."""
        self._field.client.run_javascript(f"getHtmlElement({self._field.id}).value ||= {json.dumps(text)}")

    def focus(self) -> None:
        """Lets the next letter go into the field, except where that would open a phone's keyboard."""
        self._field.client.run_javascript(
            f"matchMedia('(pointer: fine)').matches && getHtmlElement({self._field.id}).focus()"
        )
