"""One conversation's state: its stored turns, the exchanges in its window, and its row while it is resident."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from memstream.batching import Batch
from memstream.config import GenerationConfig
from memstream.errors import CapacityError, StoreError
from memstream.exchange import Exchange, exchanges, occupancy, stored_backwards
from memstream.machine import out_of_memory
from memstream.memory import TOOL_ROLES, ConversationHandle, Memory, Turn
from memstream.queues import TurnQueue
from memstream.report import Evicted, Occupancy, Recalled
from memstream.speculation import Speculation
from memstream.streaming import snapshot
from memstream.streaming.generate import Decoding
from memstream.streaming.row import Row
from memstream.swap import Swapped
from memstream.template import ChatTemplate, Opening
from memstream.tools import RESPONSE, Tool, parse_calls, without_frames

log = logging.getLogger(__name__)

OPENING = -1  # group key of what precedes the first user turn; turns are numbered from 0
NOTES_HEAD = "Notes from earlier in our conversation:"
NOTES_REPLY = "OK."


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
        tools: what the model may call.

    Attributes:
        tools: what it may call now.
    """

    def __init__(
        self,
        batch: Batch,
        template: ChatTemplate,
        handle: ConversationHandle,
        memory: Memory,
        *,
        system: str | None,
        tools: tuple[Tool, ...] = (),
    ) -> None:
        self.speculation = Speculation(batch)
        self.engine = batch.engine
        self.template = template
        self.handle = handle
        self.memory = memory
        self.row: Row | None = None
        self.queue = TurnQueue()  # of its turns, and of whoever changes its row
        self.used = 0.0  # when a turn of it last began; monotonic
        self._n_forgotten = handle.n_forgotten()  # when the row was loaded
        self.window: deque[Exchange] = deque()  # exchanges whose tokens are in the window, oldest first
        self.swapped = Swapped(handle)
        self._opening = Opening([], False, "")
        self._begin_with(system, tools)

    @property
    def resident(self) -> Row:
        """The row, which must be loaded."""
        assert self.row is not None
        return self.row

    def _begin_with(self, system: str | None, tools: tuple[Tool, ...]) -> None:
        opening, engine, template = self.template.opening(system, [t.schema for t in tools]), self.engine, self.template
        engine.pinned(len(opening.tokens) if opening.pinned else 0)
        if opening != self._opening:
            self.drop()
        self._system, self.tools, self._opening = system, tools, opening
        told = hashlib.sha256(repr((opening, template.user_prefix, template.user_suffix)).encode()).hexdigest()
        model = f"{engine.model.fingerprint}:{told[:16]}"
        self._fingerprint = snapshot.fingerprint(model, engine.config, engine.cache.dtype)

    def speak_under(self, system: str | None, tools: tuple[Tool, ...]) -> None:
        """Takes another system text or other tools from now on; the latest exchanges are prefilled again behind them.

        Raises:
            CapacityError: they are too long to be pinned.
            ConfigError: the chat template takes none.
        """
        if system != self._system or tools is not self.tools:
            self._begin_with(system, tools)

    # Residence

    def reserve(self) -> None:
        """Takes a free row, for ``load`` to fill."""
        pinned = len(self._opening.tokens) if self._opening.pinned else 0
        self.row = self.engine.admit(pinned_tokens=pinned)

    def load(self) -> None:
        """Fills the row: from the conversation's snapshot, or by prefilling the latest stored exchanges."""
        row, began = self.resident, time.perf_counter()
        try:
            self._n_forgotten = self.handle.n_forgotten()
            state = self.engine.relieved(partial(self.swapped.find, self._state_name))
            if state is not None:
                self.engine.put(row, state)
                keys = [group.key for group in row.layout.closed if isinstance(group.key, int) and group.key != OPENING]
                turns = self.handle.turns(first=min(keys)) if keys else []
                self.window = deque(exchange for exchange in exchanges(turns) if exchange.key in keys)
                self.engine.counts.add(swap_ins=1, swap_in_ms=1e3 * (time.perf_counter() - began))
            else:
                self._rebuild()
                self.engine.counts.add(rebuilds=len(self.window) > 0)
            self.swapped.drop()
            self.handle.window_begins(self.window[0].key if self.window else self.handle.next_sequence())
        except BaseException:
            self.drop()
            raise

    @property
    def _state_name(self) -> str:
        """Names what a state can be put back into, and what had been forgotten by then."""
        return f"{self._fingerprint}:{self._n_forgotten}"

    @property
    def is_cached(self) -> bool:
        """Whether its keys and values are in memory, in a row or without one."""
        return self.row is not None or self.swapped.memory_bytes > 0

    def park(self) -> None:
        """Frees the row and keeps its state in memory, where the next ``load`` finds it bit for bit."""
        began = time.perf_counter()
        try:
            self.check_forgotten()
            if self.row is None:
                return
            self.take_evicted()
            if self.row.logits is not None:
                self.swapped.keep(self._state_name, self.engine.take(self.row))
                self.engine.counts.add(swap_outs=1, swap_out_ms=1e3 * (time.perf_counter() - began))
        except Exception as error:
            if not isinstance(error, StoreError) and not out_of_memory(error):
                raise
            log.warning("%s; the conversation will be rebuilt from its stored turns", error)
        finally:
            self._leave()

    def save(self, room_bytes: int) -> None:
        """Frees the row, and moves the state into the snapshot's file; see ``Swapped.write``."""
        self.park()
        self.swapped.write(self._n_forgotten, room_bytes)

    def check_forgotten(self) -> None:
        """Drops row and state where something of this user was forgotten since it was loaded, by whatever process."""
        if self.handle.n_forgotten() != self._n_forgotten:
            self.drop()

    def take_back(self, first: int) -> None:
        """Takes back the exchange that begins with a turn, and all after it: the row is what it was before, where they
        are all in the window and something is before them; else it is dropped, and rebuilt without them.

        Args:
            first: the turn's sequence.
        """
        undone = [exchange.key for exchange in self.window if exchange.key >= first]
        closed = [group.key for group in self.row.layout.closed] if self.row is not None else []
        if self.row is None or undone[:1] != [first] or len(closed) == len(undone) or closed[-len(undone) :] != undone:
            self.drop()
            return
        self.swapped.drop()
        self.engine.take_back(self.row, len(undone))
        for _ in undone:
            self.window.pop()

    def drop(self) -> None:
        """Frees the row and forgets its state; the next load prefills from what is stored."""
        self.swapped.drop()
        self._leave()

    def _leave(self) -> None:
        if self.row is not None:
            self.take_evicted()
            self.engine.leave(self.row)
            self.row = None
        self.window.clear()

    def _rebuild(self) -> None:
        """Prefills the opening and the latest stored exchanges that fit into the window together."""
        row, engine = self.resident, self.engine
        if self._opening.tokens:
            engine.begin(row, self._opening.tokens, key=OPENING)
        # What the pinned tokens do not take of the opening is window too.
        room = row.layout.window_room - row.layout.window - engine.config.evict_tokens
        chosen: list[tuple[Exchange, list[int]]] = []
        for exchange in stored_backwards(self.handle):
            tokens = self._tokens(exchange, None)
            if len(tokens) > room:
                break
            room -= len(tokens)
            chosen.append((exchange, tokens))
        for i, (exchange, tokens) in enumerate(reversed(chosen)):
            if i == 0 and self._opening.user_prefix != self.template.user_prefix:
                tokens = self._tokens(exchange, self._opening.user_prefix)
            row.layout.open_group(exchange.key)
            engine.feed(row, tokens)
            row.layout.close_group()
            self.window.append(exchange)
        self.take_evicted()
        if chosen:
            log.info("conversation %d rebuilt from %d stored exchanges", self.handle.id, len(chosen))

    # The life of a turn

    def turn_tokens(self, role: str, text: str) -> list[int]:
        """Tokens of a turn that goes in next.

        Args:
            role: ``user``, or ``tool`` for results that ``tools.render_results`` made.
            text: what is said.

        Raises:
            CapacityError: the window cannot hold the turn and the beginning of a reply.
        """
        return self._fitting(self.template.user(self._as_read(role, text), prefix=self._prefix()))

    def exchange_tokens(self, role: str, text: str, assistant: str) -> list[int]:
        """Tokens of a whole exchange that goes in next.

        Raises:
            CapacityError: the window cannot hold it.
        """
        return self._fitting(self.template.exchange(self._as_read(role, text), assistant, prefix=self._prefix()))

    def _tokens(self, exchange: Exchange, prefix: str | None) -> list[int]:
        """Tokens of a stored exchange."""
        said = self._as_read(exchange.turns[0].role, exchange.user)
        return self.template.exchange(said, exchange.assistant, prefix=prefix)

    def _as_read(self, role: str, text: str) -> str:
        """A text as the model reads it: where it has tools, only they can say what a tool says."""
        return without_frames(text) if self.tools and role != "tool" else text

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
        """Opens the exchange that begins with a turn."""
        self.window.append(Exchange(turn.sequence, [turn]))
        self.resident.layout.open_group(turn.sequence)

    def window_from(self, n: int) -> int:
        """Sequence of the first stored turn that is still in the window once the ``n`` tokens of this turn are."""
        leaving = set(self.resident.layout.plan(n))
        return next(exchange.key for exchange in self.window if exchange.key not in leaving)

    def latest(self, n: int) -> list[str]:
        """Texts of the last ``n`` turns, the current one last; what passed between the model and its tools is none."""
        turns = (turn for exchange in self.window for turn in exchange.turns if turn.role not in TOOL_ROLES)
        return [turn.text for turn in turns][-n:]

    def role_of(self, said: str) -> str:
        """Under which role what the model said is stored: ``assistant``, or ``call`` where it calls tools."""
        return "call" if self.tools and parse_calls(said, self.tools)[1] else "assistant"

    def awaits_results(self) -> bool:
        """Whether the model called tools last."""
        last = self.handle.turns_before(self.handle.next_sequence(), 1)
        return bool(last) and last[0].role == "call"

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
        return self.template.exchange(self._as_read("user", "\n".join((NOTES_HEAD, *lines))), NOTES_REPLY)

    def prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> int:
        """Computes a turn's tokens; returns how many, fewer where cancelled."""
        return self.engine.feed(self.resident, tokens, cancelled=cancelled)

    def decode(
        self, config: GenerationConfig, cancelled: Callable[[], bool], processors: Sequence[Any] = ()
    ) -> Decoding:
        """The reply, to be iterated over."""
        row = self.resident
        if self.tools:  # a model that goes on by itself would make up the result
            config = dataclasses.replace(config, stop=(*config.stop, RESPONSE))

        def logits() -> Tensor:
            assert row.logits is not None
            return row.logits

        self.speculation.begin()
        return Decoding(
            self.template.tokenizer,
            config,
            stop_ids=self.template.stop_ids,
            logits=logits,
            advance=lambda token: self.speculation.advance(row, token, config.speculative),
            seen=lambda: row.window_ids,
            cancelled=cancelled,
            processors=processors,
        )

    def end(self, turn: Turn, decoding: Decoding) -> None:
        """Closes the exchange with the assistant's turn, after making the window say what the store says."""
        self.speculation.end(self.resident)
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
        return None if row is None else occupancy(row.layout, list(self.window))

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
