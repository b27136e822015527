"""Plain elements: what a text says is only ever a text, and never becomes a property's name or a template."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import events, ui

Handler = Callable[[], Awaitable[None] | None]
Told = Callable[[str], Awaitable[None] | None]

LONGEST_NAME = 100  # characters of a user's

# Sends what the form's field holds, and empties it; Enter sends too, Shift+Enter makes a line.
_SUBMIT = """(e) => {
  e.preventDefault();
  const field = e.currentTarget.querySelector("textarea, input");
  if (!field.value.trim()) return;
  emit(field.value);
  if (!e.currentTarget.classList.contains("keeps")) field.value = "";
}"""
_ENTER = """(e) => {
  if (e.key !== "Enter" || e.shiftKey || e.isComposing) return;
  e.preventDefault();
  e.currentTarget.form.requestSubmit();
}"""


def box(classes: str, tag: str = "div", **properties: str) -> ui.element:
    """An element; underscores in the names of its properties stand for hyphens."""
    made = ui.element(tag).classes(classes)
    for name, value in properties.items():
        made.props[name.replace("_", "-")] = value
    return made


def text(content: str, classes: str = "", tag: str = "div") -> ui.label:
    """A text, exactly as it is; ``dir=auto`` lets each language run its own way."""
    made = ui.label(content).classes(classes)
    made.tag = tag
    made.props["dir"] = "auto"
    return made


def button(
    label: str, on_click: Handler | str, *, icon: str | None = None, classes: str = "", name: str = ""
) -> ui.element:
    """A button.

    Args:
        label: what stands on it; with ``name`` alone, only the icon does.
        on_click: what it does, here, or as JavaScript in the browser alone.
        icon: of the Material Icons.
        classes: of its look.
        name: what it is called where no label tells.
    """
    made = box(f"button {classes}", "button", type="button")
    if name:
        made.props["aria-label"] = made.props["title"] = name
    with made:
        if icon is not None:
            ui.icon(icon).props("aria-hidden=true")
        if label:
            ui.label(label)
    if isinstance(on_click, str):
        made.on("click", js_handler=on_click)
    else:
        made.on("click", lambda _: on_click(), [])
    return made


def form(classes: str, on_text: Told) -> ui.element:
    """A form with one field, whose text is handed over when it is sent; the field ``keeps`` it, or is emptied."""

    def told(event: events.GenericEventArguments) -> Any:
        return on_text(str(event.args))

    return box(classes, "form").on("submit", told, js_handler=_SUBMIT)


def field(
    label: str, *, most: int, lines: bool = False, hint: str = "", secret: bool = False, value: str = ""
) -> ui.element:
    """A form's field, of one line or of as many as are typed."""
    made = box("field", "textarea" if lines else "input", placeholder=hint or label, maxlength=str(most))
    made.props["aria-label"] = label
    made.props["autocomplete"] = "off"
    made.props["dir"] = "auto"
    if lines:
        made.props["rows"] = "1"
        made.on("keydown", js_handler=_ENTER)
    else:
        made.props["type"] = "password" if secret else "text"
    if value:
        made.props["value"] = value
    return made


def mark(element: ui.element, name: str, on: bool) -> None:
    """Gives an element a class, or takes it away."""
    if (name in element.classes) != on:
        element.classes(add=name if on else None, remove=None if on else name)


def call(element: ui.element, told: str) -> None:
    """Says what an element is, to whoever points at it and to screen readers."""
    if element.props.get("title") != told:
        element.props["title"] = element.props["aria-label"] = told


def width(element: ui.element, percent: float) -> None:
    """Sets how much of its parent an element takes."""
    wanted = f"{percent:.3f}%"
    if element.style.get("width") != wanted:
        element.style["width"] = wanted


def section(title: str, hint: str = "") -> ui.element:
    """A part of the panel, with its heading."""
    made = box("section", "section", aria_label=title)
    with made, box("section-head"):
        text(title, "section-title", "h2")
        if hint:
            text(hint, "hint")
    return made


def dialog(name: str) -> ui.dialog:
    """A dialog that is closed yet."""
    made = ui.dialog()
    made.props["aria-label"] = name
    return made


def brand(model: str) -> None:
    """The name of the house, and of the model."""
    with box("brand"):
        with box("mark", aria_hidden="true"):
            for part in ("sink", "memory", "window"):
                box(f"mark-{part}", "span")
        text("memstream", "brand-name")
        text(model, "brand-model")
