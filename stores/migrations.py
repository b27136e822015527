"""Ordered migrations of SQLite; PostgreSQL's are in postgres_schema.py.

Applied names are kept in the table ``migrations``; a name this code does not know is newer.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, insert, inspect, select, text
from sqlalchemy.schema import CreateTable

from memstream.errors import StoreVersionError
from memstream.stores import fulltext, postgres_schema
from memstream.stores.schema import Migration, now

APPLICATION_ID = 0x6D656D73  # "mems", in the SQLite header: how a memstream store is told from other databases

_BASE = """
CREATE TABLE owners (id INTEGER PRIMARY KEY, namespace VARCHAR NOT NULL, user_key VARCHAR NOT NULL,
    UNIQUE (namespace, user_key));
CREATE TABLE conversations (id INTEGER PRIMARY KEY AUTOINCREMENT, owner_id INTEGER NOT NULL REFERENCES owners (id),
    name VARCHAR NOT NULL, created DATETIME NOT NULL, UNIQUE (owner_id, name));
CREATE TABLE turns (id INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation_id INTEGER NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    sequence INTEGER NOT NULL, role VARCHAR NOT NULL, text TEXT NOT NULL, n_tokens INTEGER NOT NULL,
    created DATETIME NOT NULL, state VARCHAR NOT NULL CHECK (state IN ('open', 'complete', 'cut')),
    superseded BOOLEAN NOT NULL, UNIQUE (conversation_id, sequence));
CREATE TABLE facts (id INTEGER PRIMARY KEY AUTOINCREMENT, owner_id INTEGER NOT NULL REFERENCES owners (id),
    conversation_id INTEGER REFERENCES conversations (id) ON DELETE CASCADE,
    text TEXT NOT NULL, created DATETIME NOT NULL);
CREATE INDEX facts_by_owner ON facts (owner_id);
CREATE TABLE pins (fact_id INTEGER PRIMARY KEY REFERENCES facts (id) ON DELETE CASCADE, created DATETIME NOT NULL);
CREATE TABLE chunks (id INTEGER PRIMARY KEY AUTOINCREMENT, owner_id INTEGER NOT NULL REFERENCES owners (id),
    conversation_id INTEGER REFERENCES conversations (id) ON DELETE CASCADE,
    fact_id INTEGER REFERENCES facts (id) ON DELETE CASCADE,
    kind VARCHAR NOT NULL CHECK (kind IN ('window', 'summary', 'fact')),
    first_sequence INTEGER, last_sequence INTEGER, text TEXT NOT NULL);
CREATE INDEX chunks_by_owner ON chunks (owner_id);
CREATE INDEX chunks_by_range ON chunks (conversation_id, last_sequence, first_sequence);
CREATE INDEX chunks_by_fact ON chunks (fact_id);
CREATE TABLE derived (id INTEGER PRIMARY KEY AUTOINCREMENT,
    chunk_id INTEGER NOT NULL REFERENCES chunks (id) ON DELETE CASCADE,
    kind VARCHAR NOT NULL, text TEXT NOT NULL, sources JSON NOT NULL);
CREATE INDEX derived_by_chunk ON derived (chunk_id);
CREATE TABLE spaces (id INTEGER PRIMARY KEY, name VARCHAR NOT NULL, fingerprint VARCHAR NOT NULL UNIQUE,
    dimension INTEGER NOT NULL, normalised BOOLEAN NOT NULL);
CREATE TABLE embeddings (chunk_id INTEGER PRIMARY KEY REFERENCES chunks (id) ON DELETE CASCADE,
    space_id INTEGER NOT NULL REFERENCES spaces (id), vector BLOB NOT NULL);
CREATE TABLE events (sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    action VARCHAR NOT NULL CHECK (action IN ('add', 'delete')), chunk_id INTEGER NOT NULL);
CREATE TABLE index_state (space_id INTEGER PRIMARY KEY REFERENCES spaces (id), last_sequence INTEGER NOT NULL,
    count INTEGER NOT NULL, checksum VARCHAR NOT NULL);
CREATE TABLE snapshots (conversation_id INTEGER PRIMARY KEY REFERENCES conversations (id) ON DELETE CASCADE,
    fingerprint VARCHAR NOT NULL, last_sequence INTEGER NOT NULL, file VARCHAR NOT NULL, created DATETIME NOT NULL);
CREATE VIRTUAL TABLE turn_words USING fts5(scope, text, tokenize = 'porter ascii');
CREATE VIRTUAL TABLE fact_words USING fts5(scope, text, tokenize = 'porter ascii')
"""

_TURN_VECTORS = """
CREATE TABLE turn_embeddings (turn_id INTEGER PRIMARY KEY REFERENCES turns (id) ON DELETE CASCADE,
    space_id INTEGER NOT NULL REFERENCES spaces (id), vector BLOB NOT NULL);
ALTER TABLE spaces ADD COLUMN gate FLOAT
"""

_LINES = """
CREATE TABLE streams (id INTEGER PRIMARY KEY AUTOINCREMENT, name VARCHAR NOT NULL, started DATETIME NOT NULL);
CREATE TABLE templates (id INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT NOT NULL,
    space_id INTEGER REFERENCES spaces (id), vector BLOB);
CREATE INDEX templates_by_text ON templates (text);
CREATE TABLE lines (id INTEGER PRIMARY KEY AUTOINCREMENT, stream_id INTEGER NOT NULL REFERENCES streams (id),
    number INTEGER NOT NULL, template_id INTEGER REFERENCES templates (id),
    time DATETIME, level VARCHAR, text TEXT NOT NULL, UNIQUE (stream_id, number));
CREATE INDEX lines_by_template ON lines (template_id, id);
CREATE VIRTUAL TABLE template_words USING fts5(text, tokenize = 'porter ascii');
CREATE VIRTUAL TABLE line_words USING fts5(text, tokenize = 'porter ascii', content = '')
"""

# Another CHECK means another table. Dropping the old one would delete what points to it, so that is copied as well, and
# so is how far each table has counted: ids are never used again.
_DOCUMENTS = """
CREATE TABLE documents (id INTEGER PRIMARY KEY AUTOINCREMENT, owner_id INTEGER NOT NULL REFERENCES owners (id),
    path VARCHAR NOT NULL, name VARCHAR NOT NULL, title VARCHAR NOT NULL, checksum VARCHAR NOT NULL,
    added DATETIME NOT NULL, updated DATETIME NOT NULL, UNIQUE (owner_id, path, name));
CREATE TABLE passages (id INTEGER PRIMARY KEY AUTOINCREMENT,
    document_id INTEGER NOT NULL REFERENCES documents (id) ON DELETE CASCADE, position INTEGER NOT NULL,
    first INTEGER NOT NULL, last INTEGER NOT NULL, first_line INTEGER NOT NULL, last_line INTEGER NOT NULL,
    heading TEXT NOT NULL, text TEXT NOT NULL);
CREATE INDEX passages_by_document ON passages (document_id, position);
CREATE VIRTUAL TABLE passage_words USING fts5(scope, text, tokenize = 'porter ascii');
CREATE TABLE new_chunks (id INTEGER PRIMARY KEY AUTOINCREMENT, owner_id INTEGER NOT NULL REFERENCES owners (id),
    conversation_id INTEGER REFERENCES conversations (id) ON DELETE CASCADE,
    fact_id INTEGER REFERENCES facts (id) ON DELETE CASCADE,
    passage_id INTEGER REFERENCES passages (id) ON DELETE CASCADE,
    kind VARCHAR NOT NULL CHECK (kind IN ('window', 'summary', 'fact', 'passage')),
    first_sequence INTEGER, last_sequence INTEGER, text TEXT NOT NULL);
CREATE TABLE new_derived (id INTEGER PRIMARY KEY AUTOINCREMENT,
    chunk_id INTEGER NOT NULL REFERENCES new_chunks (id) ON DELETE CASCADE,
    kind VARCHAR NOT NULL, text TEXT NOT NULL, sources JSON NOT NULL);
CREATE TABLE new_embeddings (chunk_id INTEGER PRIMARY KEY REFERENCES new_chunks (id) ON DELETE CASCADE,
    space_id INTEGER NOT NULL REFERENCES spaces (id), vector BLOB NOT NULL);
INSERT INTO new_chunks (id, owner_id, conversation_id, fact_id, kind, first_sequence, last_sequence, text)
    SELECT id, owner_id, conversation_id, fact_id, kind, first_sequence, last_sequence, text FROM chunks;
INSERT INTO new_derived SELECT id, chunk_id, kind, text, sources FROM derived;
INSERT INTO new_embeddings SELECT chunk_id, space_id, vector FROM embeddings;
DELETE FROM sqlite_sequence WHERE name IN ('new_chunks', 'new_derived');
INSERT INTO sqlite_sequence (name, seq)
    SELECT 'new_' || name, seq FROM sqlite_sequence WHERE name IN ('chunks', 'derived');
DROP TABLE embeddings;
DROP TABLE derived;
DROP TABLE chunks;
ALTER TABLE new_chunks RENAME TO chunks;
ALTER TABLE new_derived RENAME TO derived;
ALTER TABLE new_embeddings RENAME TO embeddings;
CREATE INDEX chunks_by_owner ON chunks (owner_id);
CREATE INDEX chunks_by_range ON chunks (conversation_id, last_sequence, first_sequence);
CREATE INDEX chunks_by_fact ON chunks (fact_id);
CREATE INDEX chunks_by_passage ON chunks (passage_id) WHERE passage_id IS NOT NULL;
CREATE INDEX derived_by_chunk ON derived (chunk_id)
"""

_SPACES = """
ALTER TABLE spaces ADD COLUMN serving BOOLEAN NOT NULL DEFAULT TRUE;
CREATE TABLE embeddings_new (chunk_id INTEGER NOT NULL REFERENCES chunks (id) ON DELETE CASCADE,
    space_id INTEGER NOT NULL REFERENCES spaces (id), scope INTEGER NOT NULL, vector BLOB NOT NULL,
    PRIMARY KEY (chunk_id, space_id));
INSERT INTO embeddings_new SELECT embeddings.chunk_id, embeddings.space_id,
    CASE WHEN owners.user_key <> '' THEN chunks.owner_id ELSE -chunks.conversation_id END, embeddings.vector
    FROM embeddings JOIN chunks ON chunks.id = embeddings.chunk_id JOIN owners ON owners.id = chunks.owner_id
    ORDER BY embeddings.chunk_id;
DROP TABLE embeddings;
ALTER TABLE embeddings_new RENAME TO embeddings;
CREATE TABLE turn_embeddings_new (turn_id INTEGER NOT NULL REFERENCES turns (id) ON DELETE CASCADE,
    space_id INTEGER NOT NULL REFERENCES spaces (id), vector BLOB NOT NULL, PRIMARY KEY (turn_id, space_id));
INSERT INTO turn_embeddings_new SELECT turn_id, space_id, vector FROM turn_embeddings ORDER BY turn_id;
DROP TABLE turn_embeddings;
ALTER TABLE turn_embeddings_new RENAME TO turn_embeddings
"""


_SEARCH = """
CREATE TABLE sizes (words VARCHAR NOT NULL, scope VARCHAR NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (words, scope));
CREATE INDEX turns_by_time ON turns (conversation_id, created)
"""

_OFFSETS = 'ALTER TABLE lines ADD COLUMN "offset" BIGINT'


def _run(connection: Connection, script: str) -> None:
    for statement in script.split(";\n"):
        connection.execute(text(statement))


def _base(connection: Connection) -> None:
    """The first schema."""
    _run(connection, _BASE)


def _turn_vectors(connection: Connection) -> None:
    """Vectors of single turns, and the gate of a space."""
    _run(connection, _TURN_VECTORS)


def _lines(connection: Connection) -> None:
    """Log lines and their templates."""
    _run(connection, _LINES)


def _forgotten(connection: Connection) -> None:
    """How often something of an owner was forgotten."""
    _run(connection, "ALTER TABLE owners ADD COLUMN n_forgotten INTEGER NOT NULL DEFAULT 0")


def _documents(connection: Connection) -> None:
    """Documents, their passages, and chunks that may be of a passage."""
    _run(connection, _DOCUMENTS)


def _spaces(connection: Connection) -> None:
    """Vectors of two spaces side by side while one is being made, each with the scope it is searched in."""
    _run(connection, _SPACES)


def _search(connection: Connection) -> None:
    """How many memories each scope has, and when turns were said."""
    _run(connection, _SEARCH)
    fulltext.recount(connection)


def _offsets(connection: Connection) -> None:
    """At which byte of its stream a line begins."""
    _run(connection, _OFFSETS)


MIGRATIONS: list[tuple[str, Callable[[Connection], None]]] = [
    ("0001-base", _base),
    ("0002-turn-vectors", _turn_vectors),
    ("0003-lines", _lines),
    ("0004-forgotten", _forgotten),
    ("0005-documents", _documents),
    ("0006-spaces", _spaces),
    ("0007-search", _search),
    ("0008-offsets", _offsets),
]


def _known(connection: Connection) -> list[tuple[str, Callable[[Connection], None]]]:
    return postgres_schema.MIGRATIONS if connection.dialect.name == "postgresql" else MIGRATIONS


def is_current(connection: Connection) -> bool:
    """True where there is nothing to migrate."""
    if not inspect(connection).has_table("migrations"):
        return False
    return set(connection.scalars(select(Migration.name))) == {name for name, _ in _known(connection)}


def migrate(connection: Connection) -> list[str]:
    """Applies what is missing, inside the caller's transaction. Returns the names applied now.

    Raises:
        StoreVersionError: the store knows a migration this code does not.
    """
    if not inspect(connection).has_table("migrations"):
        connection.execute(CreateTable(Migration.__table__))  # type: ignore[arg-type]
        if connection.dialect.name == "sqlite":
            connection.execute(text(f"PRAGMA application_id = {APPLICATION_ID}"))
    applied = set(connection.scalars(select(Migration.name)))
    unknown = sorted(applied - {name for name, _ in _known(connection)})
    if unknown:
        raise StoreVersionError(
            f"the store was written by a newer memstream (it has migration {unknown[-1]!r}); upgrade memstream"
        )
    fresh = []
    for name, step in _known(connection):
        if name not in applied:
            step(connection)
            connection.execute(insert(Migration).values(name=name, applied=now()))
            fresh.append(name)
    return fresh
