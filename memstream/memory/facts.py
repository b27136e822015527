"""Writing facts with their key and full-text row, inside the caller's transaction."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, insert

from memstream.stores import fulltext
from memstream.stores import schema as db


def add(
    connection: Connection,
    owner_id: int,
    conversation_id: int | None,
    text: str,
    *,
    created: datetime,
    pinned: bool,
) -> tuple[int, int]:
    """Stores a fact of an owner, or of a conversation where there is no user. Returns its id and its chunk's."""
    values = {"owner_id": owner_id, "conversation_id": conversation_id, "text": text}
    fact = insert(db.Fact).values(**values, created=created)
    fact_id = connection.execute(fact.returning(db.Fact.id)).scalar_one()
    if pinned:
        connection.execute(insert(db.Pin).values(fact_id=fact_id, created=created))
    fulltext.add_fact(connection, fact_id, owner_id, conversation_id, text)
    return fact_id, add_key(connection, fact_id, owner_id, conversation_id, text)


def add_key(connection: Connection, fact_id: int, owner_id: int, conversation_id: int | None, text: str) -> int:
    """Makes the key of a fact. Returns its chunk's id."""
    values = {"owner_id": owner_id, "conversation_id": conversation_id, "text": text}
    chunk = insert(db.Chunk).values(**values, kind="fact", fact_id=fact_id)
    return connection.execute(chunk.returning(db.Chunk.id)).scalar_one()
