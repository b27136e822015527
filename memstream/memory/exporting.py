"""Writing memories as lines: in one order, from one consistent view of the store, a page at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, BinaryIO

from sqlalchemy import ColumnElement, Connection, and_, func, select, true

from memstream.errors import InputError
from memstream.memory import keys
from memstream.memory.portable import (
    FORMAT,
    MOST_LINE_BYTES,
    VERSION,
    Checksum,
    ConversationLine,
    EndLine,
    FactLine,
    HeaderLine,
    Line,
    MadeBy,
    SummaryLine,
    TurnLine,
    WindowLine,
    encode,
)
from memstream.stores import rows, vectors
from memstream.stores import schema as db
from memstream.stores.sql import SqlStore

_PAGE = 500  # rows read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which part of a store: everything, a namespace, a user of a namespace, one conversation.

    Attributes:
        namespace: None for all of them.
        user: None for all of them, and for conversations without a user.
        conversation: None for all of them; the facts of a user are no part of a conversation.

    Raises:
        InputError: a user without a namespace, or a conversation without one.
    """

    namespace: str | None = None
    user: str | None = None
    conversation: str | None = None

    def __post_init__(self) -> None:
        if self.namespace is None and (self.user is not None or self.conversation is not None):
            raise InputError("name the namespace too: users of different namespaces are different people")

    def owners(self) -> ColumnElement[bool]:
        """Which owners, as SQL."""
        namespace = db.Owner.namespace == self.namespace if self.namespace is not None else true()
        if self.user is not None:
            return and_(namespace, db.Owner.user_key == self.user)
        return namespace if self.conversation is None else and_(namespace, db.Owner.user_key == "")

    def conversations(self) -> ColumnElement[bool]:
        """Which conversations, as SQL over conversations joined with owners."""
        if self.conversation is None:
            return self.owners()
        return and_(self.owners(), db.Conversation.name == self.conversation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """How much was written."""

    conversations: int
    turns: int
    facts: int
    summaries: int
    n_bytes: int


def export(store: SqlStore, file: BinaryIO, part: Part, *, with_vectors: bool) -> ExportReport:
    """Writes a part of the store to a file; see ``Memory.export_to``."""
    checksum, counts, n_bytes = Checksum(), dict.fromkeys(("conversation", "turn", "window", "summary", "fact"), 0), 0
    with store.read() as connection:
        for line in _lines(connection, part, with_vectors):
            data = encode(line)
            if len(data) > MOST_LINE_BYTES:
                raise InputError(
                    f"a {line.kind} takes more than {MOST_LINE_BYTES >> 20} MiB as a line and cannot be exported; "
                    "make a backup instead"
                )
            if line.kind in counts:
                counts[line.kind] += 1
            checksum.update(data)
            n_bytes += file.write(data)
    end = EndLine(
        conversations=counts["conversation"],
        turns=counts["turn"],
        windows=counts["window"],
        summaries=counts["summary"],
        facts=counts["fact"],
        checksum=str(checksum),
    )
    n_bytes += file.write(encode(end))
    return ExportReport(
        conversations=end.conversations, turns=end.turns, facts=end.facts, summaries=end.summaries, n_bytes=n_bytes
    )


def _lines(connection: Connection, part: Part, with_vectors: bool) -> Iterator[Line]:
    """Header, then owner by owner: facts in the order of time, conversations in the order of time."""
    yield _header(connection, part, with_vectors)
    owners = select(db.Owner.id, db.Owner.namespace, db.Owner.user_key).where(part.owners())
    for owner in connection.execute(owners.order_by(db.Owner.namespace, db.Owner.user_key)):
        if part.conversation is None:
            yield from _facts(connection, owner, None, with_vectors)
        n_turns = (
            select(func.count())
            .select_from(db.Turn)
            .where(db.Turn.conversation_id == db.Conversation.id, db.Turn.state != "open")
            .scalar_subquery()
        )
        conversations = (
            select(db.Conversation.id, db.Conversation.name, db.Conversation.created, n_turns.label("n_turns"))
            .join(db.Owner, db.Owner.id == db.Conversation.owner_id)
            .where(db.Owner.id == owner.id, part.conversations())
            .order_by(db.Conversation.created, db.Conversation.name)
        )
        for conversation in connection.execute(conversations):
            yield ConversationLine(
                namespace=owner.namespace,
                user=owner.user_key or None,
                name=conversation.name,
                created=conversation.created,
                turns=conversation.n_turns,
            )
            yield from _turns(connection, conversation.id, with_vectors)
            if with_vectors:
                yield from _windows(connection, conversation.id)
            yield from _summaries(connection, conversation.id, with_vectors)
            yield from _facts(connection, owner, conversation, with_vectors)


def _header(connection: Connection, part: Part, with_vectors: bool) -> HeaderLine:
    space = vectors.find_space(connection) if with_vectors else None
    conversations = select(db.Conversation.id).join(db.Owner).where(part.conversations())
    turns = select(db.Turn.id).join(db.Conversation).join(db.Owner).where(part.conversations(), db.Turn.state != "open")
    facts = select(db.Fact.id).join(db.Owner, db.Owner.id == db.Fact.owner_id).where(part.owners())
    if part.conversation is not None:
        named = db.Conversation.name == part.conversation
        facts = facts.join(db.Conversation, db.Conversation.id == db.Fact.conversation_id).where(named)

    def count(statement: Any) -> int:
        return connection.scalar(select(func.count()).select_from(statement.subquery())) or 0

    return HeaderLine(
        format=FORMAT,
        version=VERSION,
        embedder=None
        if space is None
        else MadeBy(name=space.name, fingerprint=space.fingerprint, dimension=space.dimension),
        conversations=count(conversations),
        turns=count(turns),
        facts=count(facts),
    )


def _facts(connection: Connection, owner: Any, conversation: Any, with_vectors: bool) -> Iterator[FactLine]:
    statement = (
        select(db.Fact.text, db.Fact.created, db.Pin.fact_id.label("pin"), db.Embedding.vector)
        .select_from(db.Fact)
        .outerjoin(db.Pin, db.Pin.fact_id == db.Fact.id)
        .outerjoin(db.Chunk, db.Chunk.fact_id == db.Fact.id)
        .outerjoin(db.Embedding, vectors.SERVING)
        .where(
            db.Fact.owner_id == owner.id,
            db.Fact.conversation_id == (None if conversation is None else conversation.id),
        )
        .order_by(db.Fact.created, db.Fact.text, db.Fact.id)
    )
    for fact in connection.execute(statement):
        yield FactLine(
            namespace=owner.namespace,
            user=owner.user_key or None,
            conversation=None if conversation is None else conversation.name,
            text=fact.text,
            created=fact.created,
            pinned=fact.pin is not None,
            vector=fact.vector if with_vectors else None,
        )


def _turns(connection: Connection, conversation_id: int, with_vectors: bool) -> Iterator[TurnLine]:
    """Finished turns; a reply that is still being said is left out."""
    last = -1
    columns = (
        db.Turn.sequence, db.Turn.role, db.Turn.text, db.Turn.n_tokens, db.Turn.created, db.Turn.state,
        db.Turn.superseded,
    )  # fmt: skip
    while True:
        statement = select(*columns).select_from(db.Turn)
        if with_vectors:
            embedded = statement.add_columns(db.TurnEmbedding.vector)
            statement = embedded.outerjoin(db.TurnEmbedding, vectors.SERVING_TURN)
        page = connection.execute(
            statement.where(
                db.Turn.conversation_id == conversation_id, db.Turn.sequence > last, db.Turn.state != "open"
            )
            .order_by(db.Turn.sequence)
            .limit(_PAGE)
        ).all()
        yield from (TurnLine(**row._mapping) for row in page)
        if len(page) < _PAGE:
            return
        last = page[-1].sequence


def _keys(connection: Connection, conversation_id: int, kind: str) -> Iterator[list[Any]]:
    """Pages of the keys of a conversation by the turns they end with; those of equal spans are neighbours."""
    order = (db.Chunk.last_sequence, db.Chunk.first_sequence, db.Chunk.id)
    statement = (
        select(*order, db.Chunk.text, db.Embedding.vector, db.Derived.text.label("summary"), db.Derived.sources)
        .select_from(db.Chunk)
        .outerjoin(db.Embedding, vectors.SERVING)
        .outerjoin(db.Derived, db.Derived.chunk_id == db.Chunk.id)
        .where(db.Chunk.conversation_id == conversation_id, db.Chunk.kind == kind)
        .order_by(*order)
    )
    for page in connection.execute(statement.execution_options(yield_per=_PAGE)).partitions(_PAGE):
        yield list(page)


def _windows(connection: Connection, conversation_id: int) -> Iterator[WindowLine]:
    """Windows that say what their turns say; others are made again by whoever imports."""
    last = None
    for page in _keys(connection, conversation_id, "window"):
        spans = [(key.first_sequence, key.last_sequence) for key in page]
        for key, span, text in zip(page, spans, keys.window_texts(connection, conversation_id, spans), strict=True):
            if key.text == text and span != last:
                yield WindowLine(first=span[0], last=span[1], vector=key.vector)
                last = span


def _summaries(connection: Connection, conversation_id: int, with_vectors: bool) -> Iterator[SummaryLine]:
    """Summaries of live turns, each once; one that was made from a turn that is gone is not passed on."""
    found = (key for page in _keys(connection, conversation_id, "summary") for key in page)
    for _, same in groupby(found, key=lambda key: (key.first_sequence, key.last_sequence)):
        yield from _each_once(connection, conversation_id, same, with_vectors)


def _each_once(
    connection: Connection, conversation_id: int, summaries: Iterable[Any], with_vectors: bool
) -> list[SummaryLine]:
    lines: dict[tuple[tuple[int, ...], str], bytes | None] = {}
    for key in summaries:
        if key.sources is None:
            continue
        turns = rows.live_turns(connection, conversation_id, key.sources)
        if len(turns) == len(key.sources):
            said = (tuple(turn.sequence for turn in turns), key.summary)
            lines[said] = lines.get(said) or key.vector
    return [
        SummaryLine(sources=sources, text=text, vector=vector if with_vectors else None)
        for (sources, text), vector in sorted(lines.items())
    ]
