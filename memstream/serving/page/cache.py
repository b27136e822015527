"""The cache drawn as it is: sink | memory | window, to scale, the window made of exchanges."""

from __future__ import annotations

from dataclasses import dataclass

from nicegui import ui

from memstream.config import CacheConfig
from memstream.report import Held, Occupancy
from memstream.serving.page import parts

_LEAVES_S = 0.8  # as long as style.css lets a block leave


@dataclass(frozen=True, slots=True)
class Block:
    """An exchange in the bar: its key, its share of the whole cache in percent, and what it says."""

    key: str
    share: float
    held: Held


@dataclass(frozen=True, slots=True)
class Drawing:
    """The bar in percent of the whole cache; the segments' rooms and ``free`` add up to 100.

    Attributes:
        sink: pinned.
        memory: filled with notes, of
        memory_room: what notes may take.
        other: of the window, what is no exchange's.
        blocks: exchanges, oldest first.
        free: the rest of the window.
    """

    sink: float
    memory: float
    memory_room: float
    other: float
    blocks: tuple[Block, ...]
    free: float


def drawing(held: Occupancy) -> Drawing:
    """Where everything lies in the bar."""
    total = held.sink_tokens + held.memory_room + held.window_room
    exchanges = sum(exchange.n_tokens for exchange in held.exchanges)
    part = 100.0 / max(total, 1)
    return Drawing(
        sink=held.sink_tokens * part,
        memory=held.memory_tokens * part,
        memory_room=held.memory_room * part,
        other=max(0, held.window_tokens - exchanges) * part,
        blocks=tuple(Block(e.turns[0] if e.turns else e.text, e.n_tokens * part, e) for e in held.exchanges),
        free=max(0, held.window_room - max(held.window_tokens, exchanges)) * part,
    )


def empty(config: CacheConfig) -> Occupancy:
    """A cache of which nothing is filled."""
    window = config.total - config.memory_tokens - config.sink_tokens
    return Occupancy(
        sink_tokens=config.sink_tokens,
        memory_tokens=0,
        memory_room=config.memory_tokens,
        window_tokens=0,
        window_room=window,
        exchanges=(),
    )


class Cache:
    """The bar, with its numbers; a block that is clicked tells what it holds.

    Args:
        config: the cache's shape, drawn empty while the conversation has no row.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._held: Occupancy | None = None
        self._drawn = False
        self._blocks: dict[str, ui.element] = {}
        self._chosen: str | None = None
        with parts.section("Cache").classes("cache") as self._section:
            with parts.box("bar", role="img", aria_label="sink, memory and window, to scale"):
                self._sink = parts.box("seg sink", title="sink: the beginning, which never leaves")
                with parts.box("seg memory", title="memory: what was recalled for the last turn") as self._memory:
                    self._notes = parts.box("notes")
                with parts.box("seg window") as self._window:
                    self._other = parts.box("other", title="the beginning of the conversation")
            with parts.box("legend"):
                self._words = [_legend(name) for name in ("sink", "memory", "window")]
            self._detail = parts.text("", "detail")
        self.show(None)

    def show(self, held: Occupancy | None) -> None:
        """Shows what the cache holds; None: the conversation has no row now."""
        if self._drawn and held == self._held:
            return
        self._held, self._drawn = held, True
        parts.mark(self._section, "vacant", held is None)
        seen = held or empty(self._config)
        drawn = drawing(seen)
        parts.width(self._sink, drawn.sink)
        parts.width(self._memory, drawn.memory_room)
        parts.width(self._notes, 100.0 * drawn.memory / drawn.memory_room if drawn.memory_room else 0.0)
        window = drawn.other + drawn.free + sum(block.share for block in drawn.blocks)
        parts.width(self._window, window)
        parts.width(self._other, 100.0 * drawn.other / window if window else 0.0)
        self._show_blocks(drawn, window)
        for label, told in zip(self._words, _numbers(held, seen), strict=True):
            label.set_text(told)
        self._tell()

    def _show_blocks(self, drawn: Drawing, window: float) -> None:
        present = {block.key for block in drawn.blocks}
        for key in [key for key in self._blocks if key not in present]:
            gone = self._blocks.pop(key).classes("gone")
            with self._section:
                ui.timer(_LEAVES_S, gone.delete, once=True)
        for block in drawn.blocks:
            if block.key not in self._blocks:
                with self._window:
                    made = parts.box("block", "button", type="button")
                made.on("click", lambda _, key=block.key: self._choose(key), [])
                self._blocks[block.key] = made
            element = self._blocks[block.key]
            parts.width(element, 100.0 * block.share / window if window else 0.0)
            parts.call(element, f"{block.held.n_tokens} tokens: {block.held.text}")

    def _choose(self, key: str) -> None:
        self._chosen = None if self._chosen == key else key
        for other, element in self._blocks.items():
            parts.mark(element, "chosen", other == self._chosen)
        self._tell()

    def _tell(self) -> None:
        """Says in words what is chosen, or how things are."""
        held = self._held
        exchanges = held.exchanges if held is not None else ()
        chosen = next((e for e in exchanges if (e.turns[0] if e.turns else e.text) == self._chosen), None)
        if chosen is not None:
            self._detail.set_text(f"{chosen.n_tokens} tokens · {chosen.text}")
        elif held is None:
            self._detail.set_text("This conversation has no row in the cache now; its next turn brings it back.")
        else:
            self._detail.set_text("The oldest exchange leaves first, as a whole. Choose a block to see what it holds.")


def _legend(name: str) -> ui.label:
    with parts.box(f"legend-item {name}"):
        parts.box("dot")
        parts.text(name, "legend-name")
        return parts.text("", "legend-number")


def _numbers(held: Occupancy | None, seen: Occupancy) -> tuple[str, str, str]:
    if held is None:
        return "–", f"– / {seen.memory_room}", f"– / {seen.window_room}"
    n = len(held.exchanges)
    return (
        f"{held.sink_tokens}",
        f"{held.memory_tokens} / {held.memory_room}",
        f"{held.window_tokens} / {held.window_room} tokens, {n} exchange{'s' if n != 1 else ''}",
    )
