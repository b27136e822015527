"""The tables, typed. Migrations create them; a test holds both against each other.

Full-text rows live in the FTS5 tables ``turn_words``, ``fact_words`` and ``passage_words`` (see fulltext.py).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    LargeBinary,
    String,
    Text,
    TypeDecorator,
    true,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeEngine

TurnState = Literal["open", "complete", "cut"]


class HalfVector(TypeDecorator[bytes]):
    """Little-endian float16 numbers: a blob in SQLite, pgvector's ``halfvec`` in PostgreSQL."""

    impl = LargeBinary
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name != "postgresql":
            return dialect.type_descriptor(LargeBinary())
        from memstream.stores.postgres import HalfVec

        return dialect.type_descriptor(HalfVec())


class UtcTime(TypeDecorator[datetime]):
    """Timezone-aware UTC times in a column that knows no zones."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


def now() -> datetime:
    """The time of a row, UTC."""
    return datetime.now(UTC)


class Base(DeclarativeBase):
    """Base of every table; whole numbers have 64 bits."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {int: BigInteger()}


class Migration(Base):
    """A migration that was applied."""

    __tablename__ = "migrations"
    name: Mapped[str] = mapped_column(String, primary_key=True)
    applied: Mapped[datetime] = mapped_column(UtcTime)


class Owner(Base):
    """A (namespace, user); ``user_key`` is ``""`` for conversations without a user.

    The shared knowledge of namespace N is the row (``""``, N): no scope can be given an empty namespace.

    ``n_forgotten`` counts what was forgotten: a cache loaded at another count has seen words that must be gone.
    """

    __tablename__ = "owners"
    id: Mapped[int] = mapped_column(primary_key=True)
    namespace: Mapped[str] = mapped_column(String)
    user_key: Mapped[str] = mapped_column(String)
    n_forgotten: Mapped[int] = mapped_column(default=0, server_default="0")


class Conversation(Base):
    """A named conversation of one owner."""

    __tablename__ = "conversations"
    id: Mapped[int] = mapped_column(primary_key=True)
    owner_id: Mapped[int] = mapped_column(ForeignKey("owners.id"))
    name: Mapped[str] = mapped_column(String)
    created: Mapped[datetime] = mapped_column(UtcTime)


class Turn(Base):
    """What was said. ``state`` is open, complete or cut; superseded turns are kept, never recalled."""

    __tablename__ = "turns"
    __table_args__ = (CheckConstraint("state IN ('open', 'complete', 'cut')"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    conversation_id: Mapped[int] = mapped_column(ForeignKey("conversations.id", ondelete="CASCADE"))
    sequence: Mapped[int]
    role: Mapped[str] = mapped_column(String)
    text: Mapped[str] = mapped_column(Text)
    n_tokens: Mapped[int]
    created: Mapped[datetime] = mapped_column(UtcTime)
    state: Mapped[TurnState] = mapped_column(String)
    superseded: Mapped[bool]


class Fact(Base):
    """A remembered fact of an owner; of one conversation where there is no user."""

    __tablename__ = "facts"
    id: Mapped[int] = mapped_column(primary_key=True)
    owner_id: Mapped[int] = mapped_column(ForeignKey("owners.id"))
    conversation_id: Mapped[int | None] = mapped_column(ForeignKey("conversations.id", ondelete="CASCADE"))
    text: Mapped[str] = mapped_column(Text)
    created: Mapped[datetime] = mapped_column(UtcTime)


class Pin(Base):
    """A fact that is recalled every time."""

    __tablename__ = "pins"
    fact_id: Mapped[int] = mapped_column(ForeignKey("facts.id", ondelete="CASCADE"), primary_key=True)
    created: Mapped[datetime] = mapped_column(UtcTime)


class Document(Base):
    """A file, a record of one, or a text that was handed in, of the owner who may recall it.

    ``path`` is the file's, absolute, or ``""``; with ``name`` it tells the owner's documents apart.
    """

    __tablename__ = "documents"
    id: Mapped[int] = mapped_column(primary_key=True)
    owner_id: Mapped[int] = mapped_column(ForeignKey("owners.id"))
    path: Mapped[str] = mapped_column(String)
    name: Mapped[str] = mapped_column(String)
    title: Mapped[str] = mapped_column(String)
    checksum: Mapped[str] = mapped_column(String)
    added: Mapped[datetime] = mapped_column(UtcTime)
    updated: Mapped[datetime] = mapped_column(UtcTime)


class Passage(Base):
    """A piece of a document: its characters ``first`` to ``last`` (exclusive), on lines counted from 1."""

    __tablename__ = "passages"
    id: Mapped[int] = mapped_column(primary_key=True)
    document_id: Mapped[int] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"))
    position: Mapped[int]
    first: Mapped[int]
    last: Mapped[int]
    first_line: Mapped[int]
    last_line: Mapped[int]
    heading: Mapped[str] = mapped_column(Text)
    text: Mapped[str] = mapped_column(Text)


class Size(Base):
    """How many rows of a full-text table carry a scope term; see fulltext.py. A scope of none may be without a row."""

    __tablename__ = "sizes"
    words: Mapped[str] = mapped_column(String, primary_key=True)
    scope: Mapped[str] = mapped_column(String, primary_key=True)
    n: Mapped[int]


class Chunk(Base):
    """A key: a window of turns, a summary of turns, a fact, or a passage. Its id is the vector's id, never reused."""

    __tablename__ = "chunks"
    __table_args__ = (CheckConstraint("kind IN ('window', 'summary', 'fact', 'passage')"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    owner_id: Mapped[int] = mapped_column(ForeignKey("owners.id"))
    conversation_id: Mapped[int | None] = mapped_column(ForeignKey("conversations.id", ondelete="CASCADE"))
    fact_id: Mapped[int | None] = mapped_column(ForeignKey("facts.id", ondelete="CASCADE"))
    passage_id: Mapped[int | None] = mapped_column(ForeignKey("passages.id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String)
    first_sequence: Mapped[int | None]
    last_sequence: Mapped[int | None]
    text: Mapped[str] = mapped_column(Text)


class Derived(Base):
    """A text made from turns (a summary, or a sentence: ``fact``): a key that points to its sources, never recalled."""

    __tablename__ = "derived"
    id: Mapped[int] = mapped_column(primary_key=True)
    chunk_id: Mapped[int] = mapped_column(ForeignKey("chunks.id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String)
    text: Mapped[str] = mapped_column(Text)
    sources: Mapped[list[int]] = mapped_column(JSON)


class Space(Base):
    """An embedding space; ``gate`` is the calibrated least cosine of a hit.

    One space serves; a second one is there while its vectors are being made, or until those of the first are gone.
    """

    __tablename__ = "spaces"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String)
    fingerprint: Mapped[str] = mapped_column(String)
    dimension: Mapped[int]
    normalised: Mapped[bool]
    gate: Mapped[float | None]
    serving: Mapped[bool] = mapped_column(default=True, server_default=true())


class Embedding(Base):
    """The vector of a chunk, float16 [dimension], in a space; ``scope`` says in whose search, see ``vectors.SCOPE``."""

    __tablename__ = "embeddings"
    chunk_id: Mapped[int] = mapped_column(ForeignKey("chunks.id", ondelete="CASCADE"), primary_key=True)
    space_id: Mapped[int] = mapped_column(ForeignKey("spaces.id"), primary_key=True)
    scope: Mapped[int]
    vector: Mapped[bytes] = mapped_column(HalfVector)


class TurnEmbedding(Base):
    """The vector of a single turn, float16 [dimension]: scores turns inside the windows that were found."""

    __tablename__ = "turn_embeddings"
    turn_id: Mapped[int] = mapped_column(ForeignKey("turns.id", ondelete="CASCADE"), primary_key=True)
    space_id: Mapped[int] = mapped_column(ForeignKey("spaces.id"), primary_key=True)
    vector: Mapped[bytes] = mapped_column(LargeBinary)


class Event(Base):
    """A change of the set of vectors, in order; written in the transaction that makes the change."""

    __tablename__ = "events"
    __table_args__ = (CheckConstraint("action IN ('add', 'delete')"),)
    sequence: Mapped[int] = mapped_column(primary_key=True)
    action: Mapped[str] = mapped_column(String)
    chunk_id: Mapped[int]


class IndexState(Base):
    """What the newest index file must say about itself."""

    __tablename__ = "index_state"
    space_id: Mapped[int] = mapped_column(ForeignKey("spaces.id"), primary_key=True)
    last_sequence: Mapped[int]
    count: Mapped[int]
    checksum: Mapped[str] = mapped_column(String)


class Snapshot(Base):
    """A saved cache of a conversation, a file beside the store."""

    __tablename__ = "snapshots"
    conversation_id: Mapped[int] = mapped_column(ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String)
    last_sequence: Mapped[int]
    file: Mapped[str] = mapped_column(String)
    created: Mapped[datetime] = mapped_column(UtcTime)
