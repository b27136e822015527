"""One conversation's state: its stored turns, the exchanges in its window, and its row while it is resident."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from memstream.batching import Batch
from memstream.config import GenerationConfig
from memstream.engine import TurnQueue
from memstream.errors import CapacityError, InputError, StoreError
from memstream.memory import ConversationHandle, Memory, Turn
from memstream.report import Evicted, Held, Occupancy, Recalled
from memstream.streaming import snapshot
from memstream.streaming.generate import Decoding
from memstream.streaming.row import Row
from memstream.template import ChatTemplate, Opening

log = logging.getLogger(__name__)

OPENING = -1  # group key of what precedes the first user turn; turns are numbered from 0
NOTES_HEAD = "Notes from earlier in our conversation:"
NOTES_REPLY = "OK."


@dataclass(slots=True)
class Exchange:
    """A user turn and what answered it; ``key``, the first turn's sequence, names its group of tokens."""

    key: int
    turns: list[Turn] = field(default_factory=list)

    @property
    def user(self) -> str:
        return "\n".join(turn.text for turn in self.turns if turn.role == "user")

    @property
    def assistant(self) -> str:
        return "\n".join(turn.text for turn in self.turns if turn.role == "assistant")


def exchanges(turns: Iterable[Turn]) -> list[Exchange]:
    """Groups turns into exchanges: each user turn begins one."""
    found: list[Exchange] = []
    for turn in turns:
        if turn.role == "user" or not found:
            found.append(Exchange(turn.sequence))
        found[-1].turns.append(turn)
    return found


def checked(text: str) -> str:
    """The text as it is stored and as the model sees it: NUL, which no store holds, becomes U+FFFD.

    Raises:
        InputError: not a text, or an empty one.
    """
    if not isinstance(text, str):
        raise InputError(f"a turn must be a str, not {type(text).__name__}")
    if not text.strip():
        raise InputError("the text is empty; say something")
    return text.replace("\0", "\ufffd")


def note_line(text: str) -> str:
    """One recalled text as the model reads it."""
    return f"- {' '.join(text.split())}"


class Conversation:
    """One conversation on an engine.

    Args:
        batch: steps its row together with others; its engine computes the rest.
        template: renders its turns.
        handle: its stored turns, owned by this process.
        memory: what its turns recall from.
        system: the system text, or None.
    """

    def __init__(
        self, batch: Batch, template: ChatTemplate, handle: ConversationHandle, memory: Memory, *, system: str | None
    ) -> None:
        self._batch = batch
        self.engine = batch.engine
        self.template = template
        self.handle = handle
        self.memory = memory
        self.row: Row | None = None
        self.queue = TurnQueue()  # of its turns, and of whoever changes its row
        self.used = 0.0  # when a turn of it last began; monotonic
        self._n_forgotten = handle.n_forgotten()  # when the row was loaded
        self.window: deque[Exchange] = deque()  # exchanges whose tokens are in the window, oldest first
        self._parked: tuple[dict[str, Tensor], dict[str, Any]] | None = None  # state of a store that keeps no files
        self._system = system
        self._begins_with(template.opening(system))

    @property
    def resident(self) -> Row:
        """The row, which must be loaded."""
        assert self.row is not None
        return self.row

    def _begins_with(self, opening: Opening) -> None:
        self._opening, engine, template = opening, self.engine, self.template
        told = hashlib.sha256(repr((opening, template.user_prefix, template.user_suffix)).encode()).hexdigest()
        model = f"{engine.model.fingerprint}:{told[:16]}"
        self._fingerprint = snapshot.fingerprint(model, engine.config, engine.cache.dtype)

    def speak_under(self, system: str | None) -> None:
        """Takes another system text from now on; the latest exchanges are prefilled again behind it.

        Raises:
            CapacityError: it is too long to be pinned.
            ConfigError: the chat template takes none.
        """
        if system == self._system:
            return
        opening = self.template.opening(system)
        self.engine.pinned(len(opening.tokens) if opening.pinned else 0)
        self.drop()
        self._system = system
        self._begins_with(opening)

    # Residence

    def load(self) -> None:
        """Brings the conversation into a row: from its snapshot, or by prefilling the latest stored exchanges."""
        if self.row is not None:
            return
        self._n_forgotten = self.handle.n_forgotten()
        saved = self._parked or self._saved()
        self._parked = None
        pinned = len(self._opening.tokens) if self._opening.pinned else 0
        self.row = self.engine.admit(pinned_tokens=pinned)
        try:
            if saved is not None:
                snapshot.put(self.engine.cache, self.row, *saved)
                keys = [
                    group.key for group in self.row.layout.closed if isinstance(group.key, int) and group.key != OPENING
                ]
                turns = self.handle.turns(first=min(keys)) if keys else []
                self.window = deque(exchange for exchange in exchanges(turns) if exchange.key in keys)
            else:
                self._rebuild()
            self.handle.window_begins(self.window[0].key if self.window else self.handle.next_sequence())
        except BaseException:
            self.drop()
            raise

    def unload(self) -> None:
        """Saves the row as a snapshot and frees it; where the store refuses, the next load prefills what is stored."""
        try:
            self.check_forgotten()
            if self.row is None:
                return
            self.take_evicted()
            if self.row.logits is not None:
                self._save(snapshot.take(self.engine.cache, self.row))
        except StoreError as error:
            log.warning("%s; the conversation will be rebuilt from its stored turns", error)
        finally:
            self._leave()

    def _save(self, state: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
        path = self.handle.snapshot_path
        if path is None:
            self._parked = state
        else:
            name = f"{self._fingerprint}:{self._n_forgotten}"
            snapshot.save(path, *state, fingerprint=name)
            self.handle.record_snapshot(name, self.handle.next_sequence() - 1, self._n_forgotten)

    def check_forgotten(self) -> None:
        """Drops the row where something of this user was forgotten since it was loaded, by whatever process."""
        if self.handle.n_forgotten() != self._n_forgotten:
            self.drop()

    def drop(self) -> None:
        """Frees the row and forgets its state; the next load prefills from what is stored."""
        self._parked = None
        self._leave()

    def _leave(self) -> None:
        if self.row is not None:
            self.take_evicted()
            self.engine.leave(self.row)
            self.row = None
        self.window.clear()

    def _saved(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        name = f"{self._fingerprint}:{self._n_forgotten}"
        path: Path | None = self.handle.find_snapshot(name, self.handle.next_sequence() - 1)
        return snapshot.load(path, fingerprint=name) if path else None

    def _rebuild(self) -> None:
        """Prefills the opening and the latest stored exchanges that fit into the window together."""
        row, engine = self.resident, self.engine
        if self._opening.tokens:
            engine.begin(row, self._opening.tokens, key=OPENING)
        # What the pinned tokens do not take of the opening is window too.
        room = row.layout.window_room - row.layout.window - engine.config.evict_tokens
        chosen: list[tuple[Exchange, list[int]]] = []
        for exchange in self._stored_backwards():
            tokens = self.template.exchange(exchange.user, exchange.assistant)
            if len(tokens) > room:
                break
            room -= len(tokens)
            chosen.append((exchange, tokens))
        for i, (exchange, tokens) in enumerate(reversed(chosen)):
            if i == 0 and self._opening.user_prefix != self.template.user_prefix:
                tokens = self.template.exchange(exchange.user, exchange.assistant, prefix=self._opening.user_prefix)
            row.layout.open_group(exchange.key)
            engine.feed(row, tokens)
            row.layout.close_group()
            self.window.append(exchange)
        self.take_evicted()
        if chosen:
            log.info("conversation %d rebuilt from %d stored exchanges", self.handle.id, len(chosen))

    def _stored_backwards(self) -> Iterator[Exchange]:
        """Stored exchanges, newest first, read in pages."""
        before = self.handle.next_sequence()
        while page := self.handle.turns_before(before, 64):
            found = exchanges(page)
            if len(page) == 64:  # the oldest exchange of a full page may have begun before it
                found = found[1:] or found
            yield from reversed(found)
            before = found[0].key

    # The life of a turn

    def user_tokens(self, text: str) -> list[int]:
        """Tokens of a user turn that goes in next.

        Raises:
            CapacityError: the window cannot hold the turn and the beginning of a reply.
        """
        return self._fitting(self.template.user(text, prefix=self._prefix()))

    def exchange_tokens(self, user: str, assistant: str) -> list[int]:
        """Tokens of a whole exchange that goes in next.

        Raises:
            CapacityError: the window cannot hold it.
        """
        return self._fitting(self.template.exchange(user, assistant, prefix=self._prefix()))

    def _prefix(self) -> str | None:
        """Some templates begin a conversation's first user turn in another way."""
        return self._opening.user_prefix if not self.window else None

    def _fitting(self, tokens: list[int]) -> list[int]:
        room = self.resident.layout.window_room - self.engine.config.evict_tokens
        if len(tokens) > room:
            raise CapacityError(
                f"the text takes {len(tokens)} tokens, but the window has room for {room}; shorten it, or raise "
                "cache_tokens"
            )
        return tokens

    def begin(self, turn: Turn) -> None:
        """Opens the exchange that begins with a user turn."""
        self.window.append(Exchange(turn.sequence, [turn]))
        self.resident.layout.open_group(turn.sequence)

    def window_from(self, n: int) -> int:
        """Sequence of the first stored turn that is still in the window once the ``n`` tokens of this turn are."""
        leaving = set(self.resident.layout.plan(n))
        return next(exchange.key for exchange in self.window if exchange.key not in leaving)

    def latest(self, n: int) -> list[str]:
        """Texts of the last ``n`` turns, the current one last."""
        turns = [turn.text for exchange in list(self.window)[-n:] for turn in exchange.turns]
        return turns[-n:]

    def takes_notes(self, n: int) -> bool:
        """Whether there is room for notes, and sinks in front of them once a turn of ``n`` tokens has begun."""
        layout = self.resident.layout
        return self.note_budget() > 0 and layout.sink_tokens - layout.sinks < n

    def note_budget(self) -> int:
        """Tokens left for notes once their frame is counted."""
        return self.engine.config.memory_tokens - len(self._frame([""]))

    def count_note(self, text: str) -> int:
        """Tokens a note takes in the memory segment."""
        return len(self.template.plain(note_line(text) + "\n"))

    def set_notes(self, notes: Sequence[Recalled], ahead: Sequence[int]) -> tuple[int, int]:
        """Puts notes into the memory segment, where they replace what is there unless it is the same.

        Args:
            notes: none empties the segment.
            ahead: tokens of the coming turn; where the sinks are not full yet, the first of them are computed now.

        Returns:
            How many tokens of the turn and of the notes were computed.
        """
        # A small model uses best what it read last, and what it read twice (docs/log.md).
        found = sorted((note for note in notes if not note.why.pinned), key=lambda note: note.why.order)
        best = [note_line(note.note) for note in found[-1:]]
        pinned = [note_line(note.note) for note in notes if note.why.pinned]
        lines = [*(note_line(note.note) for note in found[:-1]), *pinned, *best]
        for chosen in (lines + best, *(lines[i:] for i in range(len(lines) + 1))):
            tokens = self._frame(chosen) if chosen else []
            if len(tokens) <= self.resident.layout.memory_room:
                break
        missing = self.resident.layout.sink_tokens - self.resident.layout.sinks if tokens else 0
        done = self.engine.feed(self.resident, ahead[:missing]) if missing else 0
        return done, self.engine.set_memory(self.resident, tokens)

    def _frame(self, lines: Sequence[str]) -> list[int]:
        """Notes as an exchange: data that the model is shown, never part of the system turn."""
        return self.template.exchange("\n".join((NOTES_HEAD, *lines)), NOTES_REPLY)

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> int:
        """Computes the user turn's tokens; returns how many, fewer where cancelled."""
        return self.engine.feed(self.resident, tokens, cancelled=cancelled)

    def decode(
        self, config: GenerationConfig, cancelled: Callable[[], bool], processors: Sequence[Any] = ()
    ) -> Decoding:
        """The reply, to be iterated over."""
        row = self.resident

        def logits() -> Tensor:
            assert row.logits is not None
            return row.logits

        return Decoding(
            self.template.tokenizer,
            config,
            stop_ids=self.template.stop_ids,
            logits=logits,
            advance=lambda token: self._batch.step(row, token),
            seen=lambda: row.window_ids,
            cancelled=cancelled,
            processors=processors,
        )

    def end(self, turn: Turn, decoding: Decoding) -> None:
        """Closes the exchange with the assistant's turn, after making the window say what the store says."""
        if decoding.unsaid:
            self.engine.retract(self.resident, decoding.n_tokens)
            self.engine.feed(self.resident, self.template.plain(turn.text))
        self._close(turn)

    def take_in(self, user: Turn, assistant: Turn, tokens: Sequence[int]) -> None:
        """Prefills a whole exchange that happened elsewhere."""
        self.begin(user)
        self.engine.feed(self.resident, tokens[: -len(self.template.closing)])
        self._close(assistant)

    def _close(self, assistant: Turn) -> None:
        self.engine.feed(self.resident, self.template.closing)
        layout, exchange = self.resident.layout, self.window[-1]
        layout.close_group()
        exchange.turns.append(assistant)
        if not layout.closed or layout.closed[-1].key != exchange.key:
            self.window.pop()  # all of it lies among the sinks

    def occupancy(self) -> Occupancy | None:
        """What the row holds now; None where there is none. From any thread: at worst as it was a moment ago."""
        row = self.row
        if row is None:
            return None
        layout = row.layout
        groups = [*layout.closed, *([layout.open] if layout.open is not None else [])]
        said = {exchange.key: exchange for exchange in list(self.window)}
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

    def take_evicted(self) -> list[Evicted]:
        """Exchanges that left the window since the last call; those that left whole are summarised by memory."""
        evicted = []
        for gone in self.resident.take_gone():
            exchange = next((e for e in self.window if e.key == gone.key), None)
            if exchange is None:  # the opening
                continue
            in_window = any(group.key == gone.key for group in self.resident.layout.closed)
            still_open = self.resident.layout.open is not None and self.resident.layout.open.key == gone.key
            if not in_window and not still_open:
                self.window.remove(exchange)
                self.handle.evicted([turn.id for turn in exchange.turns])
            evicted.append(
                Evicted(
                    turns=tuple(f"turn:{turn.id}" for turn in exchange.turns),
                    n_tokens=gone.n_tokens,
                    text=exchange.user[:120],
                    whole=gone.whole,
                )
            )
        return evicted
