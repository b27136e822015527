"""Reading an export into a store: checked as a whole first, then stored conversation by conversation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from typing import BinaryIO

from sqlalchemy import Connection, func, insert, select

from memstream.errors import InputError
from memstream.memory import facts, keys
from memstream.memory.checking import check, scope_of
from memstream.memory.portable import (
    ConversationLine,
    EndLine,
    FactLine,
    HeaderLine,
    Line,
    SummaryLine,
    TurnLine,
    WindowLine,
    decode,
    read_lines,
)
from memstream.stores import fulltext, rows, vectors
from memstream.stores import schema as db
from memstream.stores.base import Scope
from memstream.stores.sql import SqlStore
from memstream.stores.vectors import Pending, SpaceInfo

_BATCH = 500  # lines stored with one statement; even, so that windows begin where they always do
_Numbered = tuple[int, Line]


@dataclass(slots=True, kw_only=True)
class ImportReport:
    """What an import changed.

    Attributes:
        conversations: made.
        continued: conversations that were there and got the turns that follow.
        unchanged: conversations that held every turn of the file already.
        turns: stored.
        facts: stored.
        summaries: stored.
        vectors: taken from the file.
        reembedded: True where the file's vectors were made by another embedder than the store's and were left aside.
        pending: texts of the whole store whose vectors are still to be made in the background.
    """

    conversations: int = 0
    continued: int = 0
    unchanged: int = 0
    turns: int = 0
    facts: int = 0
    summaries: int = 0
    vectors: int = 0
    reembedded: bool = False
    pending: int = 0


def load(store: SqlStore, file: BinaryIO, *, name: str | None) -> ImportReport:
    """Stores an export; see ``Memory.import_from``."""
    file.seek(0)
    header = check(file)
    if name is not None and header.conversations != 1:
        raise InputError(f"another name is for an export of one conversation; this one holds {header.conversations}")
    file.seek(0)
    lines = ((number, decode(number, data)) for number, data in read_lines(file))
    next(lines)
    return _Import(store, _Lines(lines), header, name).run()


@dataclass(slots=True)
class _Lines:
    """Lines that can be looked at before they are taken."""

    source: Iterator[_Numbered]
    ahead: list[_Numbered] = field(default_factory=list)

    def take(self, kind: type[Line] | tuple[type[Line], ...]) -> Iterator[_Numbered]:
        """The lines up to the first of another kind, which stays."""
        while self.peek() is not None and isinstance(self.ahead[0][1], kind):
            yield self.ahead.pop()

    def peek(self) -> Line | None:
        """The next line; None at the end."""
        if not self.ahead:
            self.ahead.extend(islice(self.source, 1))
        return self.ahead[0][1] if self.ahead else None


class _Import:
    """One run over the lines of a checked export."""

    def __init__(self, store: SqlStore, lines: _Lines, header: HeaderLine, name: str | None) -> None:
        self._store, self._lines, self._name = store, lines, name
        self._report = ImportReport()
        self._space = self._find_space(header)

    def _find_space(self, header: HeaderLine) -> SpaceInfo | None:
        """The store's space where the file's vectors are of it; a store without one takes the file's."""
        made = header.embedder
        if made is None:
            return None
        with self._store.write() as connection:
            space = vectors.find_space(connection)
            if space is None:
                return vectors.ensure_space(connection, made.name, made.fingerprint, made.dimension)
        self._report.reembedded = (space.fingerprint, space.dimension) != (made.fingerprint, made.dimension)
        return None if self._report.reembedded else space

    def run(self) -> ImportReport:
        while (line := self._lines.peek()) is not None and not isinstance(line, EndLine):
            self._facts_of_user() if isinstance(line, FactLine) else self._conversation()
        with self._store.write() as connection:  # durable, and with it everything before
            self._report.pending = vectors.n_pending(connection)
        return self._report

    def _facts_of_user(self) -> None:
        with self._store.write(durable=False) as connection:
            for number, line in islice(self._lines.take(FactLine), _BATCH):
                assert isinstance(line, FactLine)
                self._fact(connection, line, rows.ensure_owner(connection, scope_of(number, line)), None)

    def _fact(self, connection: Connection, line: FactLine, owner_id: int, conversation_id: int | None) -> None:
        """Stores a fact, unless the same was told at the same time before."""
        same = select(db.Fact.id).where(
            db.Fact.owner_id == owner_id,
            db.Fact.conversation_id == conversation_id,
            db.Fact.created == line.created,
            db.Fact.text == line.text,
        )
        if connection.scalar(same.limit(1)) is not None:
            return
        _, chunk_id = facts.add(
            connection, owner_id, conversation_id, line.text, created=line.created, pinned=line.pinned
        )
        self._embed(connection, [(Pending("chunk", chunk_id, line.text), line.vector)])
        self._report.facts += 1

    def _conversation(self) -> None:
        """Stores one conversation in one transaction, or nothing of it."""
        ((number, line),) = islice(self._lines.take(ConversationLine), 1)
        assert isinstance(line, ConversationLine)
        scope = scope_of(number, line if self._name is None else replace(line, name=self._name))
        with ExitStack() as owned, self._store.write(durable=False) as connection:
            conversation_id = rows.find_conversation(connection, scope)
            new = conversation_id is None
            if conversation_id is None:
                owner_id = rows.ensure_owner(connection, scope)
                made = insert(db.Conversation).values(owner_id=owner_id, name=scope.conversation, created=line.created)
                conversation_id = connection.execute(made.returning(db.Conversation.id)).scalar_one()
            place = _Place(scope, conversation_id, rows.owner_of(connection, conversation_id), new, owned)
            grown = self._turns(connection, place)
            self._keys(connection, place, grown or new)
            while isinstance(fact := self._lines.peek(), FactLine) and fact.conversation is not None:
                self._lines.ahead.clear()
                self._fact(connection, fact, place.owner_id, conversation_id)
        self._report.conversations += new
        self._report.continued += grown and not new
        self._report.unchanged += not grown and not new

    def _turns(self, connection: Connection, place: _Place) -> bool:
        """Compares turns with those that are there and stores what follows them. Returns whether anything was."""
        last = connection.scalar(
            select(func.max(db.Turn.sequence)).where(db.Turn.conversation_id == place.conversation_id)
        )
        last, low, grown = -1 if last is None else last, 0, False
        lines = self._lines.take(TurnLine)
        while batch := [(number, line) for number, line in islice(lines, _BATCH) if isinstance(line, TurnLine)]:
            known = [(number, line) for number, line in batch if line.sequence <= last]
            if known or low <= last:
                high = batch[-1][1].sequence
                self._compare(connection, place, known, low, high)
            low = batch[-1][1].sequence + 1
            if len(known) < len(batch):
                if not place.new and not grown:
                    place.own(self._store)
                grown = True
                self._insert(connection, place, [line for _, line in batch[len(known) :]])
        return grown

    def _compare(
        self, connection: Connection, place: _Place, known: list[tuple[int, TurnLine]], low: int, high: int
    ) -> None:
        """Refuses a conversation whose turns are others than those of the file.

        Raises:
            InputError: naming the first that differs.
        """
        columns = [getattr(db.Turn, name.name) for name in fields(TurnLine) if name.name != "vector"]
        between = (db.Turn.sequence >= low, db.Turn.sequence <= high)
        statement = select(*columns).where(db.Turn.conversation_id == place.conversation_id, *between)
        there = {row.sequence: TurnLine(**row._mapping) for row in connection.execute(statement)}
        for number, line in known:
            if there.pop(line.sequence, None) != replace(line, vector=None):
                raise InputError(
                    f"line {number}: conversation {place.scope.conversation!r} ({place.scope}) is in the store with "
                    f"other turns; turn {line.sequence} differs or was forgotten there. Nothing of it was stored: "
                    "delete or rename the one in the store, or import it under another name (--as NAME)"
                )
        if there:
            raise InputError(
                f"conversation {place.scope.conversation!r} ({place.scope}) is in the store with other turns; turn "
                f"{min(there)} is not in the file. Nothing of it was stored: delete or rename the one in the store, "
                "or import it under another name (--as NAME)"
            )

    def _insert(self, connection: Connection, place: _Place, lines: list[TurnLine]) -> None:
        values = [{**asdict(line), "conversation_id": place.conversation_id} for line in lines]
        for value in values:
            del value["vector"]
        connection.execute(insert(db.Turn), values)
        of_batch = (
            db.Turn.conversation_id == place.conversation_id,
            db.Turn.sequence >= lines[0].sequence,
            db.Turn.sequence <= lines[-1].sequence,
        )
        ids = dict(connection.execute(select(db.Turn.sequence, db.Turn.id).where(*of_batch)).all())
        live = [line for line in lines if not line.superseded]
        texts = {ids[line.sequence]: line.text for line in live}
        fulltext.add_turns(connection, place.owner_id, place.conversation_id, texts)
        self._embed(connection, [(Pending("turn", ids[line.sequence], line.text), line.vector) for line in live])
        if self._space is None:
            keys.add_windows(connection, place.conversation_id)
        self._report.turns += len(lines)

    def _keys(self, connection: Connection, place: _Place, changed: bool) -> None:
        """Stores windows and summaries; of a conversation that was there as it is, none."""
        windows = self._lines.take(WindowLine)
        while batch := [line for _, line in islice(windows, _BATCH) if isinstance(line, WindowLine)]:
            if changed and self._space is not None:
                made = keys.put_windows(connection, place.conversation_id, [(line.first, line.last) for line in batch])
                items = zip(made, batch, strict=True)
                self._embed(
                    connection, [(Pending("chunk", *key), line.vector) for key, line in items if key is not None]
                )
        if changed:
            keys.cover(connection, place.conversation_id)
        for _, line in self._lines.take(SummaryLine):
            if changed and isinstance(line, SummaryLine):
                self._summary(connection, place, line)

    def _summary(self, connection: Connection, place: _Place, line: SummaryLine) -> None:
        turns = rows.turns_by_sequence(connection, place.conversation_id, line.sources)
        if len(turns) != len(line.sources) or not line.text.strip():
            return
        same = (
            select(db.Derived.sources)
            .join(db.Chunk)
            .where(
                db.Chunk.conversation_id == place.conversation_id,
                db.Chunk.first_sequence == line.sources[0],
                db.Chunk.last_sequence == line.sources[-1],
                db.Derived.text == line.text,
            )
        )
        if [turn.id for turn in turns] in connection.scalars(same).all():
            return
        chunk_id = keys.add_summary(connection, place.conversation_id, turns, line.text)
        self._embed(connection, [(Pending("chunk", chunk_id, line.text), line.vector)])
        self._report.summaries += 1

    def _embed(self, connection: Connection, items: list[tuple[Pending, bytes | None]]) -> None:
        """Stores the vectors that the file brought, where they are of the store's space."""
        given = [(item, vector) for item, vector in items if vector is not None]
        if self._space is None or not given:
            return
        matrix = vectors.unpack([vector for _, vector in given], self._space.dimension)
        vectors.store(connection, self._space, [item for item, _ in given], matrix)
        self._report.vectors += len(given)


@dataclass(slots=True)
class _Place:
    """Where turns go."""

    scope: Scope
    conversation_id: int
    owner_id: int
    new: bool
    owned: ExitStack

    def own(self, store: SqlStore) -> None:
        """Takes the conversation until it is stored, so that nobody speaks in it meanwhile.

        Raises:
            ConversationBusyError: somebody does.
        """
        name = self.scope.conversation or ""
        self.owned.callback(store.lock_conversation(self.conversation_id, name=name, wait_s=0.0))
