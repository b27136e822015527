"""What is said and what answers it: the unit that enters the window, and leaves it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from memstream.errors import InputError
from memstream.memory import ConversationHandle, Turn, storable_text
from memstream.privacy import Redactor
from memstream.report import Held, Occupancy, ToolCall
from memstream.streaming.layout import Layout

Said = str | Sequence[ToolCall]  # by a user; or the calls of the reply before, with their results


@dataclass(slots=True)
class Exchange:
    """A user turn, or the results of tools, and what answered it; ``key``, the first turn's sequence, names its group
    of tokens."""

    key: int
    turns: list[Turn] = field(default_factory=list)

    @property
    def user(self) -> str:
        """What the model answered: a user's words, or the results of tools."""
        return "\n".join(turn.text for turn in self.turns if turn.role in ("user", "tool"))

    @property
    def assistant(self) -> str:
        """What the model said, calls included."""
        return "\n".join(turn.text for turn in self.turns if turn.role in ("assistant", "call"))


def exchanges(turns: Iterable[Turn]) -> list[Exchange]:
    """Groups turns into exchanges: each user turn begins one, and so do results of tools."""
    found: list[Exchange] = []
    for turn in turns:
        if turn.role in ("user", "tool") or not found:
            found.append(Exchange(turn.sequence))
        found[-1].turns.append(turn)
    return found


def stored_backwards(handle: ConversationHandle) -> Iterator[Exchange]:
    """A conversation's stored exchanges, newest first, read in pages."""
    before = handle.next_sequence()
    while page := handle.turns_before(before, 64):
        found = exchanges(page)
        if len(page) == 64:  # the oldest exchange of a full page may have begun before it
            found = found[1:] or found
        yield from reversed(found)
        before = found[0].key


def occupancy(layout: Layout, window: Sequence[Exchange]) -> Occupancy:
    """What a row with these exchanges in its window holds."""
    groups = [*layout.closed, *([layout.open] if layout.open is not None else [])]
    said = {exchange.key: exchange for exchange in window}
    return Occupancy(
        sink_tokens=layout.sinks,
        memory_tokens=layout.memory,
        memory_room=layout.memory_room,
        window_tokens=layout.window,
        window_room=layout.window_room,
        exchanges=tuple(
            Held(
                turns=tuple(f"turn:{turn.id}" for turn in said[group.key].turns),
                n_tokens=group.n_tokens,
                text=said[group.key].user[:120],
            )
            for group in groups
            if group.key in said
        ),
    )


def checked(text: str) -> str:
    """The text as it is stored and as the model sees it: NUL, which no store holds, becomes U+FFFD.

    Raises:
        InputError: not a text, or an empty one.
    """
    if not isinstance(text, str):
        raise InputError(f"a text must be a str, not {type(text).__name__}")
    if not text.strip():
        raise InputError("the text is empty; say something")
    return text.replace("\0", "\ufffd")


def taken(text: str, redact: Redactor | None) -> str:
    """A text that comes in, without what must not be kept.

    Raises:
        InputError: not a text, or an empty one.
    """
    text = checked(text)
    return text if redact is None else checked(redact(text))


def taken_results(calls: Sequence[ToolCall], redact: Redactor | None) -> list[ToolCall]:
    """Calls with results and errors that may be stored, without what must not be kept.

    Raises:
        InputError: something else.
    """
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, ToolCall) for call in calls):
        raise InputError(f"a turn must be a str, or a list of ToolCall with results, not {type(calls).__name__}")

    def kept(text: str | None) -> str | None:
        text = text and storable_text(text)
        return redact(text) if text and redact is not None else text

    return [dataclasses.replace(call, result=kept(call.result), error=kept(call.error)) for call in calls]
