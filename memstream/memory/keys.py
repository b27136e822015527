"""Keeping the keys (windows, summaries) of a conversation in step with its turns, inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, func, insert, select

from memstream.memory.chunker import STRIDE_TURNS, windows
from memstream.stores import rows, vectors
from memstream.stores import schema as db
from memstream.stores.rows import Turn


def add_windows(connection: Connection, conversation_id: int) -> int:
    """Makes windows over the finished turns no window holds yet. Returns how many."""
    covered = connection.scalar(
        select(func.max(db.Chunk.last_sequence)).where(
            db.Chunk.conversation_id == conversation_id, db.Chunk.kind == "window"
        )
    )
    first = 0 if covered is None else covered + 1
    fresh = [turn for turn in rows.turns(connection, conversation_id, first=first) if turn.state != "open"]
    if not fresh:
        return 0
    before = rows.turns_before(connection, conversation_id, fresh[0].sequence, STRIDE_TURNS)
    return _insert_windows(connection, conversation_id, before + fresh)


def _insert_windows(connection: Connection, conversation_id: int, turns: Sequence[Turn]) -> int:
    owner_id = rows.owner_of(connection, conversation_id)
    made = 0
    for window in windows(turns):
        if not window.text:
            continue
        key = {
            "owner_id": owner_id,
            "conversation_id": conversation_id,
            "kind": "window",
            "first_sequence": window.first,
            "last_sequence": window.last,
            "text": window.text,
        }
        there = select(db.Chunk.id).filter_by(**key)
        if connection.scalar(there) is None:
            connection.execute(insert(db.Chunk).values(**key))
            made += 1
    return made


def remove_keys(
    connection: Connection, conversation_id: int, sequences: Iterable[int]
) -> tuple[dict[str, int], list[list[int]]]:
    """Removes every key over turns that are no longer live, and makes new windows over their neighbours.

    Returns:
        Rows removed by table, and the sources of the summaries that were removed.
    """
    removed = {"chunks": 0, "embeddings": 0, "derived": 0}
    lost_summaries: list[list[int]] = []
    for sequence in sequences:
        keys = connection.execute(
            select(db.Chunk.id, db.Chunk.kind, db.Chunk.first_sequence, db.Chunk.last_sequence).where(
                db.Chunk.conversation_id == conversation_id,
                db.Chunk.first_sequence <= sequence,
                db.Chunk.last_sequence >= sequence,
            )
        ).all()
        ids = [key.id for key in keys]
        lost_summaries.extend(connection.scalars(select(db.Derived.sources).where(db.Derived.chunk_id.in_(ids))))
        for table, n in vectors.delete_chunks(connection, ids).items():
            removed[table] += n
        spans = [(key.first_sequence, key.last_sequence) for key in keys if key.kind == "window"]
        if spans:
            low, high = min(span[0] for span in spans), max(span[1] for span in spans)
            left = rows.turns(connection, conversation_id, first=low, last=high)
            _insert_windows(connection, conversation_id, [turn for turn in left if turn.state != "open"])
    return removed, lost_summaries


def is_held_whole(connection: Connection, turns: Sequence[Turn]) -> bool:
    """True where each of a conversation's turns is in a window uncut: a summary of them would say nothing new."""
    windows = _keys(connection, "window", turns[0].conversation_id, turns[0].sequence, turns[-1].sequence)
    return all(
        any(first <= turn.sequence <= last and turn.text.strip() in text for first, last, text in windows)
        for turn in turns
    )


def is_summarised(connection: Connection, turns: Sequence[Turn]) -> bool:
    """True where there is a summary of a conversation's turns, from the first to the last."""
    begin, end = turns[0].sequence, turns[-1].sequence
    summaries = _keys(connection, "summary", turns[0].conversation_id, begin, end)
    return any(first <= begin and end <= last for first, last, _ in summaries)


def _keys(connection: Connection, kind: str, conversation_id: int, first: int, last: int) -> list[tuple[int, int, str]]:
    """Keys of a kind that reach into sequences ``first`` to ``last``."""
    statement = select(db.Chunk.first_sequence, db.Chunk.last_sequence, db.Chunk.text).where(
        db.Chunk.conversation_id == conversation_id,
        db.Chunk.kind == kind,
        db.Chunk.last_sequence >= first,
        db.Chunk.first_sequence <= last,
    )
    return [(first or 0, last or 0, text) for first, last, text in connection.execute(statement)]


def left_exchanges(connection: Connection, conversation_id: int, before: int, limit: int) -> list[tuple[int, ...]]:
    """The exchanges among the last ``limit`` finished live turns before a sequence, oldest first, as ids of turns."""
    found: list[list[int]] = []
    for turn in rows.turns_before(connection, conversation_id, before, limit):
        if turn.role == "user" or not found:
            found.append([])
        found[-1].append(turn.id)
    return [tuple(ids) for ids in found]


def add_summary(connection: Connection, conversation_id: int, turns: Sequence[Turn], text: str) -> None:
    """Stores a summary as one more key to its turns (in order)."""
    chunk = insert(db.Chunk).values(
        owner_id=rows.owner_of(connection, conversation_id),
        conversation_id=conversation_id,
        kind="summary",
        first_sequence=turns[0].sequence,
        last_sequence=turns[-1].sequence,
        text=text,
    )
    chunk_id = connection.execute(chunk.returning(db.Chunk.id)).scalar_one()
    sources = [turn.id for turn in turns]
    connection.execute(insert(db.Derived).values(chunk_id=chunk_id, kind="summary", text=text, sources=sources))
