"""What a browser keeps: the key and the conversation as long as the tab is open, the name and the look for good."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from nicegui import Client

_ANSWER_S = 10.0
_PREFIX = "memstream."
_KEPT_IN = {"key": "sessionStorage", "conversation": "sessionStorage", "user": "localStorage", "look": "localStorage"}

Kept = Literal["key", "conversation", "user", "look"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memento:
    """What a browser has kept; empty where it has not."""

    key: str = ""
    conversation: str = ""
    user: str = ""
    look: str = ""


async def recall(client: Client) -> Memento:
    """Asks a browser what it has kept. It is sent through the page's own connection, and never part of an address."""
    wanted = ", ".join(f"{name}: {storage}.getItem('{_PREFIX}{name}')" for name, storage in _KEPT_IN.items())
    try:
        told = await client.run_javascript(
            f"(() => {{ try {{ return {{{wanted}}} }} catch {{ return {{}} }} }})()", timeout=_ANSWER_S
        )
    except TimeoutError:
        told = None
    kept = told if isinstance(told, dict) else {}
    return Memento(**{name: kept[name] for name in _KEPT_IN if isinstance(kept.get(name), str)})


def keep(client: Client, name: Kept, value: str) -> None:
    """Lets a browser keep something; an empty value is removed."""
    key = json.dumps(_PREFIX + name)
    call = f"setItem({key}, {json.dumps(value)})" if value else f"removeItem({key})"
    client.run_javascript(f"try {{ {_KEPT_IN[name]}.{call} }} catch {{}}")
