"""JSON as Markdown: the keys that lead to values become headings, what stands there paragraphs and lists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_DEEPEST = 6  # heading of Markdown


def outline(value: Any) -> str:
    """A JSON value as Markdown; ``""`` for one that holds nothing.

    Objects under a key are sections, deeper ones than Markdown has headings are lists. Each object of a list is a
    paragraph of ``name: value`` lines, each other item an item.
    """
    return "\n\n".join(_section(value, 1))


def _section(value: Any, level: int) -> Iterator[str]:
    if not isinstance(value, dict):
        yield from _blocks(value)
        return
    plain = {key: inner for key, inner in value.items() if not _is_nested(inner)}
    if lines := list(_lines(plain)):
        yield "\n".join(lines)
    for key, inner in value.items():
        if key in plain:
            continue
        blocks = list(_section(inner, level + 1) if level < _DEEPEST else _blocks(inner))
        if blocks:
            yield f"{'#' * level} {_on_one_line(key)}"
            yield from blocks


def _blocks(value: Any) -> Iterator[str]:
    items = value if isinstance(value, list) else [value]
    listed: list[str] = []
    for item in items:
        if isinstance(item, dict):
            if listed:
                yield "\n".join(listed)
                listed = []
            if lines := list(_lines(item)):
                yield "\n".join(lines)
        elif text := _text(item):
            listed.append(f"- {text}")
    if listed:
        yield "\n".join(listed)


def _lines(value: dict[str, Any]) -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, list) and inner:
            yield f"{_on_one_line(key)}:"
            yield from (f"- {text}" for item in inner if (text := _text(item)))
        elif text := _text(inner):
            yield f"{_on_one_line(key)}: {text}"


def _text(value: Any) -> str:
    """A value on one line; of an object or a list, as JSON."""
    if value is None or value == {} or value == []:
        return ""
    return _on_one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _is_nested(value: Any) -> bool:
    return isinstance(value, (dict, list))
