"""Rows of one model: admit a conversation, feed it tokens, step several at once, leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from memstream.config import CacheConfig
from memstream.counts import Counts
from memstream.errors import CapacityError
from memstream.machine import out_of_memory
from memstream.streaming import snapshot
from memstream.streaming.decode import Decode
from memstream.streaming.layout import Layout, Piece
from memstream.streaming.model import StreamingModel
from memstream.streaming.row import Row

T = TypeVar("T")
Compute = Callable[[Sequence[Row], Sequence[Piece], Sequence[Sequence[int]]], Tensor]


class Beginning(NamedTuple):
    """What a row held after its first tokens."""

    tokens: list[int]
    state: snapshot.State


class Engine:
    """One model and its fixed cache of R rows, one conversation each.

    Rows are ragged: each has its own lengths, starts and shifts. Safe to use from several threads as long as each row
    is used by one at a time; forwards take turns. A forward that finds no memory is tried once more, with fewer rows
    and after ``relieve``.

    Args:
        model: the model.
        cache: size and shape of each row.
        rows: how many conversations are resident at once.
        lock: of another engine of the same model, so that their forwards take turns too.

    Attributes:
        lock: held for one forward, of a piece or a token, at a time.
        places: held while rows are given, copied or moved, none of which waits for a forward; taken before ``lock``.
        counts: what was done so far.
        rows: of the cache.
        rows_allowed: how many of them may be taken; fewer where memory is short.
        relieve: called where memory ran out, and must give some back or raise; None: nothing is tried again.

    Raises:
        ConfigError: the cache is larger than the model allows.
    """

    def __init__(
        self, model: StreamingModel, cache: CacheConfig, *, rows: int = 1, lock: threading.RLock | None = None
    ) -> None:
        self.model = model
        self.config = cache
        self.limit = model.position_limit(cache)
        self.cache = model.new_cache(cache, rows=rows)
        self._decoders: dict[tuple[int, int], Decode] = {}  # by how many rows they decode at once, and tokens in each
        self._beginning: Beginning | None = None
        self.rows = self.rows_allowed = rows
        self._free = list(range(rows))
        self._taken: dict[int, Row] = {}  # by index
        self.lock = lock or threading.RLock()
        self.places = threading.RLock()
        self.counts = Counts()
        self.relieve: Callable[[], None] | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.cache.bytes

    @property
    def has_free_row(self) -> bool:
        """Whether ``admit`` would find a row."""
        return bool(self._free) and len(self._taken) < self.rows_allowed

    @property
    def n_taken(self) -> int:
        """Rows that were admitted and have not left."""
        return len(self._taken)

    def pinned(self, pinned_tokens: int) -> int:
        """How many tokens are pinned for a system turn of this length.

        Raises:
            CapacityError: the system turn is too long to be pinned.
        """
        config = self.config
        sinks = max(config.sink_tokens, pinned_tokens)
        most = max(
            config.sink_tokens, min(config.max_pinned, config.total - config.memory_tokens - config.evict_tokens)
        )
        if sinks > most:
            raise CapacityError(
                f"the system turn takes {pinned_tokens} tokens, but at most {most} can be pinned in a cache of "
                f"{config.total}; shorten it, or raise max_pinned_tokens or cache_tokens"
            )
        return sinks

    def admit(self, *, pinned_tokens: int = 0) -> Row:
        """Gives a conversation a row; its first tokens become the sinks.

        Args:
            pinned_tokens: length of the system turn, pinned whole; the sinks are at least ``sink_tokens`` long.

        Raises:
            CapacityError: no row is free, or the system turn is too long to be pinned.
        """
        sinks = self.pinned(pinned_tokens)
        with self.places:
            if not self.has_free_row:
                raise CapacityError("all rows are taken; another conversation has to leave first")
            config, index = self.config, self._free.pop(0)
            layout = Layout(
                cache_tokens=config.total,
                sink_tokens=sinks,
                memory_tokens=config.memory_tokens,
                evict_tokens=config.evict_tokens,
                memory_position=config.memory_position,
            )
            self._taken[index] = Row(index, layout)
            return self._taken[index]

    def leave(self, row: Row) -> None:
        """Frees the row for another conversation."""
        with self.places:
            del self._taken[row.index]
            self._free.append(row.index)

    def resize(self, rows: int) -> None:
        """Makes the cache anew with another number of rows, though no fewer than are taken, and what decodes in it.

        Rows that are taken get other numbers and keep what they hold, so that running turns do not notice.

        Raises:
            Exception: there is no memory for it; every row that is taken is as it was.
        """
        with self.places, self.lock:
            rows = max(rows, len(self._taken), 1)
            free = [index for index in range(rows) if index not in self._taken]
            for index in [index for index in self._taken if index >= rows]:
                row = self._taken.pop(index)
                self.cache.move(index, free[0])
                row.index = free.pop(0)
                self._taken[row.index] = row
            self._decoders.clear()
            before, self.rows = self.rows, min(rows, self.rows)
            self._free = [index for index in free if index < before]
            self.cache.resize(rows)
            self.rows, self._free = rows, free
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def take(self, row: Row) -> snapshot.State:
        """Copies a row's whole state into host memory; ``put`` goes on with it bit for bit."""
        with self.places:
            tensors, plain = snapshot.take(self.cache, row)
        return {name: tensor.cpu() for name, tensor in tensors.items()}, plain

    def put(self, row: Row, state: snapshot.State) -> None:
        """Puts what ``take`` returned into a row that was just admitted, with as many pinned tokens."""
        with self.places:
            snapshot.put(self.cache, row, *state)

    def step(self, rows: Sequence[Row], tokens: Sequence[int]) -> None:
        """Feeds one token to each of several rows in one forward, and renews their ``logits``."""
        try:
            self._step(rows, tokens)
        except (MemoryError, RuntimeError) as error:
            if self.relieve is None or not out_of_memory(error):
                raise
        else:
            return
        self.relieve()
        half = -(-len(rows) // 2)
        for first in range(0, len(rows), half):
            self._step(rows[first : first + half], tokens[first : first + half])

    def _step(self, rows: Sequence[Row], tokens: Sequence[int]) -> None:
        with self.lock:
            for row in rows:
                self._make_room(row)
            logits = self._forward(rows, [[token] for token in tokens], self._decode)
        for row, of_row in zip(rows, logits, strict=True):
            row.logits = of_row[-1]

    def spare(self, row: Row) -> int:
        """How many tokens can be fed along with the next one and taken back: nothing has to leave or move for them."""
        layout = row.layout
        if layout.sinks < layout.sink_tokens:
            return 0
        return max(0, min(layout.room(), self.limit - layout.position(layout.end)) - 1)

    def verify(self, row: Row, tokens: Sequence[int]) -> Tensor:
        """Feeds a row its next token and up to ``spare`` drafted ones in one forward, and renews its ``logits``.

        What turns out not to follow has to be taken back: see ``retract``.

        Returns:
            [n, V] float32 logits after each token.
        """
        assert len(tokens) <= 1 + self.spare(row)
        logits = self.relieved(partial(self._verify, row, tokens))
        row.logits = logits[-1]
        return logits

    def _verify(self, row: Row, tokens: Sequence[int]) -> Tensor:
        with self.lock:
            return self._forward([row], [tokens], self._decode)[0]

    def feed(self, row: Row, tokens: Sequence[int], *, cancelled: Callable[[], bool] | None = None) -> int:
        """Prefills tokens piece by piece, evicting where needed, and renews the row's ``logits``.

        Args:
            row: the row; a group must be open for tokens that go into the window.
            tokens: ids.
            cancelled: asked between pieces; True stops there.

        Returns:
            How many tokens were computed.
        """
        if len(tokens) == 1:
            self.step([row], tokens)
            return 1
        done = 0
        for piece, hidden in self._pieces(row, tokens):
            done += len(piece)
            if done == len(tokens) or (cancelled and cancelled()):
                row.logits = self.model.head(hidden[-1]).float()
                break
        return done

    def begin(self, row: Row, tokens: Sequence[int], *, key: Hashable) -> None:
        """Prefills what a conversation begins with, as a group of its own, and keeps it: the next one that begins so
        copies its keys and values.

        Args:
            row: just admitted.
            tokens: ids.
            key: of the group.
        """
        known = self._beginning
        if known is not None and known.tokens == list(tokens):
            self.put(row, known.state)
            return
        row.layout.open_group(key)
        self.feed(row, tokens)
        row.layout.close_group()
        with self.places:
            self._beginning = Beginning(list(tokens), snapshot.take(self.cache, row))

    def retract(self, row: Row, n: int) -> None:
        """Takes back the last ``n`` tokens of the open group, or as many as it still has in the window.

        The row's ``logits`` are those of a token that is gone: feed something next.
        """
        assert row.layout.open is not None
        n = min(n, row.layout.open.n_tokens)
        row.layout.retract(n)
        for _ in range(n):
            row.window_ids.pop()

    def take_back(self, row: Row, n_groups: int) -> None:
        """Takes back the newest closed groups; the row has no ``logits`` until something is fed."""
        for _ in range(row.layout.take_back(n_groups)):
            row.window_ids.pop()
        row.logits = None

    def score(self, row: Row, tokens: Sequence[int]) -> Tensor:
        """Feeds tokens and returns the log-probability that the stream gave each of them.

        Returns:
            [n] float32 on the model's device; NaN for the very first token of a stream.
        """
        if len(tokens) == 1:
            score = self._first_score(row, tokens)
            self.step([row], tokens)
            return score
        scores: list[Tensor] = []
        for piece, hidden in self._pieces(row, tokens):
            ids = torch.tensor(piece, device=hidden.device)
            scores.append(self._first_score(row, piece))
            scores.append(-self.model.token_nll(hidden[:-1], ids[1:]))
            row.logits = self.model.head(hidden[-1]).float()
        return torch.cat(scores) if scores else torch.empty(0)

    def _first_score(self, row: Row, tokens: Sequence[int]) -> Tensor:
        """[1] the log-probability of the first token, before it is fed."""
        if row.logits is None:
            return torch.full((1,), torch.nan, device=self.model.device)
        return torch.log_softmax(row.logits, dim=-1)[list(tokens[:1])]

    def set_memory(self, row: Row, tokens: Sequence[int]) -> int:
        """Replaces the memory segment by recalled text, prefilled with only the sinks in front of it.

        Nothing else is recomputed. When it fails, the segment is left empty.

        Returns:
            How many tokens were computed: 0 where the segment already holds these tokens.

        Raises:
            CapacityError: more tokens than the segment has room for.
        """
        layout = row.layout
        if list(tokens) == row.memory_ids:
            return 0
        if len(tokens) > layout.memory_room:
            raise CapacityError(
                f"recalled text takes {len(tokens)} tokens, but the memory segment holds {layout.memory_room}"
            )
        layout.memory, row.memory_ids = 0, []
        done = 0
        while done < len(tokens):
            n = min(self.config.chunk_tokens, len(tokens) - done)
            self.relieved(partial(self._memory_piece, row, done, tokens[done : done + n]))
            done += n
        layout.memory, row.memory_ids = len(tokens), list(tokens)
        return done

    def _pieces(self, row: Row, tokens: Sequence[int]) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Computes tokens piece by piece; yields each piece's ids and hidden states [n, E]."""
        done = 0
        while done < len(tokens):
            piece, hidden = self.relieved(partial(self._piece, row, tokens, done))
            yield piece, hidden
            done += len(piece)

    def _piece(self, row: Row, tokens: Sequence[int], done: int) -> tuple[Sequence[int], Tensor]:
        with self.lock:
            self._make_room(row)
            n = min(row.layout.room(), self.config.chunk_tokens, len(tokens) - done)
            piece = tokens[done : done + n]
            return piece, self._forward([row], [piece], self._prefill)[0]

    def _memory_piece(self, row: Row, done: int, tokens: Sequence[int]) -> None:
        with self.lock:
            self._prefill([row], [row.layout.memory_piece(done, len(tokens))], [tokens])

    def relieved(self, compute: Callable[[], T]) -> T:
        """What is computed; where memory ran out, once more after some was given back."""
        try:
            return compute()
        except (MemoryError, RuntimeError) as error:
            if self.relieve is None or not out_of_memory(error):
                raise
        self.relieve()
        return compute()

    def _make_room(self, row: Row) -> None:
        if n := row.make_room():
            self.counts.add(evictions=n)

    def _forward(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], compute: Compute) -> Tensor:
        """Appends a piece of equal length to each row, which has room for it, and computes it."""
        for row, ids in zip(rows, tokens, strict=True):
            self._rebase(row, len(ids))
        pieces = [row.layout.append(len(ids)) for row, ids in zip(rows, tokens, strict=True)]
        try:
            computed = compute(rows, pieces, tokens)
        except BaseException:
            for row, piece in zip(rows, pieces, strict=True):
                row.layout.retract(piece.n)
            raise
        for row, piece, ids in zip(rows, pieces, tokens, strict=True):
            row.note(ids, piece.position)
        return computed

    def _rebase(self, row: Row, n: int) -> None:
        back, arcs = row.layout.rebase(self.limit, n)
        if not back:
            return
        try:
            self.model.rebase(self.cache, row.index, arcs, back)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise CapacityError("memory ran out while keys were turned back; the row has to be filled anew") from error

    def _prefill(self, rows: Sequence[Row], pieces: Sequence[Piece], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states [B, n, E] of a piece in each row."""
        hidden = self.model.forward(self.cache, [row.index for row in rows], pieces, tokens)
        self.counts.add(prefill_tokens=sum(map(len, tokens)))
        return hidden

    def _decode(self, rows: Sequence[Row], pieces: Sequence[Piece], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Logits [B, n, V] float32 after each token of a few in each row."""
        shape = len(rows), len(tokens[0])
        if shape not in self._decoders:
            self._decoders[shape] = Decode(self.model, self.cache, rows=shape[0], n=shape[1])
        logits = self._decoders[shape]([row.index for row in rows], pieces, tokens)
        self.counts.add(steps=1, tokens=len(rows))
        return logits
