"""Copying a whole store into an empty one, of another kind of database too, and proving that it arrived."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Table, func, insert, select, text

from memstream.errors import InputError, StoreError
from memstream.stores import lines, schema
from memstream.stores.sql import SqlStore

_PIECE = 1000  # rows
_LEFT_OUT = ("migrations", "index_state", "snapshots")  # of the store itself, or of files beside it
_SCOPED = ("scope", "text")
_WORDS = {"turn_words": _SCOPED, "fact_words": _SCOPED, "passage_words": _SCOPED, "template_words": ("text",)}

Progress = Callable[[str, int], None]


def move(source: SqlStore, target: SqlStore, progress: Progress | None = None) -> dict[str, int]:
    """Copies everything under the numbers it has; the source stays as it is. All of it arrives, or nothing.

    Snapshots of caches are not copied: conversations are read again from their turns.

    Args:
        source: read in one transaction, so that what is said meanwhile is not in the copy.
        target: an empty store.
        progress: called with the name of a table and how many of its rows are copied.

    Returns:
        Rows copied by table.

    Raises:
        InputError: the target is not empty.
        StoreError: what was read back from the target is not what was sent.
    """
    tables = [table for table in schema.Base.metadata.sorted_tables if table.name not in _LEFT_OUT]
    copied: dict[str, int] = {}
    with source.read() as reading, target.write() as writing:
        filled = [table.name for table in tables if writing.execute(select(table).limit(1)).first() is not None]
        if filled:
            raise InputError(f"{target} is not empty (it has {', '.join(filled)}); give a new store")
        for table in tables:
            sent, n = hashlib.sha256(), 0
            for rows in _pieces(reading, table):
                writing.execute(insert(table), rows)
                _digest(sent, rows)
                n += len(rows)
                if progress is not None:
                    progress(table.name, n)
            copied[table.name] = n
            arrived = hashlib.sha256()
            for rows in _pieces(writing, table):
                _digest(arrived, rows)
            if arrived.digest() != sent.digest():
                raise StoreError(f"{table.name} did not arrive as it was sent; nothing was kept in {target}")
            _set_next_id(writing, table, _last_id(reading, table))
        for name, columns in _WORDS.items():
            _copy_words(reading, writing, name, columns)
        lines.index_lines(writing)
    return copied


def _pieces(connection: Connection, table: Table) -> Iterator[list[dict[str, Any]]]:
    """The rows of a table in the order of its key."""
    keys = list(table.primary_key)
    statement = select(table).order_by(*keys).execution_options(yield_per=_PIECE)
    with connection.execute(statement) as result:
        for part in result.mappings().partitions(_PIECE):
            yield [dict(row) for row in part]


def _digest(digest: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        digest.update(repr(sorted(row.items())).encode())


def _copy_words(reading: Connection, writing: Connection, name: str, columns: Sequence[str]) -> None:
    """Full-text rows hold words that were split already, so both databases take the same."""
    fields = ("rowid", *columns)
    taken = text(f"SELECT {', '.join(fields)} FROM {name} ORDER BY rowid").execution_options(yield_per=_PIECE)
    given = text(f"INSERT INTO {name} ({', '.join(fields)}) VALUES ({', '.join(f':{field}' for field in fields)})")
    for part in reading.execute(taken).mappings().partitions():
        writing.execute(given, [dict(row) for row in part])


def _id_column(table: Table) -> str | None:
    """The column that the database numbers by itself."""
    keys = list(table.primary_key)
    return keys[0].name if len(keys) == 1 and not keys[0].foreign_keys else None


def _last_id(connection: Connection, table: Table) -> int:
    """The highest number a row of the table ever had: none is given twice, even after it was deleted."""
    column = _id_column(table)
    if column is None:
        return 0
    highest = connection.scalar(select(func.max(table.c[column]))) or 0
    if connection.dialect.name == "sqlite":
        given = connection.scalar(text("SELECT seq FROM sqlite_sequence WHERE name = :name"), {"name": table.name})
    else:
        sequence = connection.scalar(text(f"SELECT pg_get_serial_sequence('{table.name}', '{column}')"))
        given = connection.scalar(text(f"SELECT last_value FROM {sequence} WHERE is_called"))
    return max(highest, given or 0)


def _set_next_id(connection: Connection, table: Table, last: int) -> None:
    column = _id_column(table)
    if column is None or not last:
        return
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT setval(pg_get_serial_sequence('{table.name}', '{column}'), {last:d})"))
        return
    changed = connection.execute(
        text("UPDATE sqlite_sequence SET seq = :last WHERE name = :name"), {"last": last, "name": table.name}
    )
    if not changed.rowcount and _counts_on(connection, table):
        connection.execute(
            text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :last)"), {"last": last, "name": table.name}
        )


def _counts_on(connection: Connection, table: Table) -> bool:
    """True where SQLite never gives a number of the table twice."""
    made = connection.scalar(text("SELECT sql FROM sqlite_master WHERE name = :name"), {"name": table.name})
    return "AUTOINCREMENT" in (made or "")
