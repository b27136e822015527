"""Keeping the keys of a conversation (windows, summaries, particulars) in step with its turns.

Inside the caller's transaction.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, func, insert, select

from memstream.memory.chunker import STRIDE_TURNS, WINDOW_TURNS, Window, window_text, windows
from memstream.memory.particulars import particulars
from memstream.stores import rows, vectors
from memstream.stores import schema as db
from memstream.stores.rows import Turn

_PAGE = 500  # turns looked at together


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
    _put_particulars(connection, conversation_id, turns)
    return _put(connection, conversation_id, [window for window in windows(turns) if window.text])


def _put_particulars(connection: Connection, conversation_id: int, turns: Sequence[Turn]) -> None:
    """Makes keys to those of the turns that tell something particular, each once."""
    said = [turn for turn in turns if turn.role not in rows.TOOL_ROLES]
    told = [(turn, text) for turn in said for text in particulars(turn)]
    if not told:
        return
    there = {(first, text) for first, _, text in _keys(connection, "fact", conversation_id, *_span(turns))}
    place = {"owner_id": rows.owner_of(connection, conversation_id), "conversation_id": conversation_id}
    for turn, text in told:
        if (turn.sequence, text) not in there:
            there.add((turn.sequence, text))
            ends = {"first_sequence": turn.sequence, "last_sequence": turn.sequence}
            chunk = insert(db.Chunk).values(**place, **ends, kind="fact", text=text).returning(db.Chunk.id)
            chunk_id = connection.execute(chunk).scalar_one()
            connection.execute(insert(db.Derived).values(chunk_id=chunk_id, kind="fact", text=text, sources=[turn.id]))


def _span(turns: Sequence[Turn]) -> tuple[int, int]:
    return turns[0].sequence, turns[-1].sequence


def _put(connection: Connection, conversation_id: int, said: Sequence[Window]) -> int:
    """Makes those of the windows that are not there. Returns how many."""
    there = _window_ids(connection, conversation_id, said)
    fresh = [window for window in dict.fromkeys(said) if window not in there]
    if fresh:
        place = {"owner_id": rows.owner_of(connection, conversation_id), "conversation_id": conversation_id}
        values = [{"kind": "window", "first_sequence": w.first, "last_sequence": w.last, "text": w.text} for w in fresh]
        connection.execute(insert(db.Chunk), [{**place, **value} for value in values])
    return len(fresh)


def _window_ids(connection: Connection, conversation_id: int, said: Sequence[Window]) -> dict[Window, int]:
    """The chunks of those of the windows that are there."""
    if not said:
        return {}
    firsts, lasts = [window.first for window in said], [window.last for window in said]
    statement = select(db.Chunk.first_sequence, db.Chunk.last_sequence, db.Chunk.text, db.Chunk.id).where(
        db.Chunk.conversation_id == conversation_id,
        db.Chunk.kind == "window",
        db.Chunk.last_sequence >= min(lasts),
        db.Chunk.last_sequence <= max(lasts),
        db.Chunk.first_sequence >= min(firsts),
    )
    there: Sequence[Any] = connection.execute(statement).all()
    wanted = set(said)
    return {window: row.id for row in there if (window := Window(*row[:3])) in wanted}


def cover(connection: Connection, conversation_id: int) -> int:
    """Makes windows over the finished live turns that no window holds, wherever they are. Returns how many.

    What was said last and has no reply yet gets its window with the reply.
    """
    made, last = 0, -1
    newest = rows.turns_before(connection, conversation_id, rows.NO_SEQUENCE, 1)
    while page := rows.turns_after(connection, conversation_id, last, _PAGE):
        last = page[-1].sequence
        beyond = rows.turns_after(connection, conversation_id, last, WINDOW_TURNS)  # no window reaches further
        spans: Sequence[Any] = connection.execute(
            select(db.Chunk.first_sequence, db.Chunk.last_sequence).where(
                db.Chunk.conversation_id == conversation_id,
                db.Chunk.kind == "window",
                db.Chunk.first_sequence <= last,
                db.Chunk.last_sequence >= page[0].sequence,
                db.Chunk.last_sequence <= (beyond[-1].sequence if beyond else last),
            )
        ).all()
        bare = [not any(span[0] <= turn.sequence <= span[1] for span in spans) for turn in page]
        for missing, run in groupby(zip(bare, page, strict=True), key=lambda pair: pair[0]):
            turns = [turn for _, turn in run]
            waiting = turns[-1] in newest and all(turn.role != "assistant" for turn in turns)
            if missing and not waiting:
                before = rows.turns_before(connection, conversation_id, turns[0].sequence, STRIDE_TURNS)
                made += _insert_windows(connection, conversation_id, before + turns)
    return made


def window_texts(connection: Connection, conversation_id: int, spans: Sequence[tuple[int, int]]) -> list[str]:
    """What windows over these first and last sequences must say, made from the finished live turns."""
    low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    turns = [t for t in rows.turns(connection, conversation_id, first=low, last=high) if t.state != "open"]
    at = [turn.sequence for turn in turns]
    return [
        window_text([turn.text for turn in turns[bisect_left(at, first) : bisect_right(at, last)]])
        for first, last in spans
    ]


def put_windows(
    connection: Connection, conversation_id: int, spans: Sequence[tuple[int, int]]
) -> list[tuple[int, str] | None]:
    """Makes windows over these first and last sequences, where they are not there yet.

    Returns:
        The chunk and text of each; None where a span does not begin and end with a live turn, or says nothing.
    """
    ends = [sequence for span in spans for sequence in span]
    live = {turn.sequence for turn in rows.turns_by_sequence(connection, conversation_id, ends)}
    texts = window_texts(connection, conversation_id, spans)
    made = [Window(*span, text) for span, text in zip(spans, texts, strict=True)]
    good = [window for window in made if {window.first, window.last} <= live and window.text]
    _put(connection, conversation_id, good)
    if good:
        low, high = min(window.first for window in good), max(window.last for window in good)
        turns = [turn for turn in rows.turns(connection, conversation_id, first=low, last=high) if turn.state != "open"]
        _put_particulars(connection, conversation_id, turns)
    ids = _window_ids(connection, conversation_id, good)
    return [(ids[window], window.text) if window in ids else None for window in made]


def remove_keys(
    connection: Connection, conversation_id: int, sequences: Iterable[int]
) -> tuple[dict[str, int], list[list[int]]]:
    """Removes every key over turns that are no longer live, and makes new windows over their neighbours.

    Returns:
        Rows removed by table, and the sources of the summaries that were removed.
    """
    gone = sorted(set(sequences))
    if not gone:
        return {"chunks": 0, "embeddings": 0, "derived": 0}, []
    keys: Sequence[Any] = connection.execute(
        select(db.Chunk.id, db.Chunk.kind, db.Chunk.first_sequence, db.Chunk.last_sequence)
        .where(
            db.Chunk.conversation_id == conversation_id,
            db.Chunk.first_sequence <= gone[-1],
            db.Chunk.last_sequence >= gone[0],
        )
        .order_by(db.Chunk.first_sequence, db.Chunk.last_sequence)
    ).all()
    keys = [key for key in keys if _any_between(gone, key.first_sequence, key.last_sequence)]
    lost_summaries: list[list[int]] = []
    for part in rows.batches(key.id for key in keys):
        summaries = select(db.Derived.sources).where(db.Derived.chunk_id.in_(part), db.Derived.kind == "summary")
        lost_summaries.extend(connection.scalars(summaries))
    removed = vectors.delete_chunks(connection, [key.id for key in keys])
    for low, high in _joined((key.first_sequence, key.last_sequence) for key in keys if key.kind == "window"):
        left = rows.turns(connection, conversation_id, first=low, last=high)
        _insert_windows(connection, conversation_id, [turn for turn in left if turn.state != "open"])
    return removed, lost_summaries


def is_held_whole(connection: Connection, turns: Sequence[Turn]) -> bool:
    """True where each of a conversation's turns is in a window uncut: a summary of them would say nothing new."""
    windows = _keys(connection, "window", turns[0].conversation_id, *_span(turns))
    return all(
        any(first <= turn.sequence <= last and turn.text.strip() in text for first, last, text in windows)
        for turn in turns
    )


def is_summarised(connection: Connection, turns: Sequence[Turn]) -> bool:
    """True where there is a summary of a conversation's turns, from the first to the last."""
    begin, end = _span(turns)
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
        if turn.role in ("user", "tool") or not found:
            found.append([])
        found[-1].append(turn.id)
    return [tuple(ids) for ids in found]


def _any_between(ordered: Sequence[int], first: int, last: int) -> bool:
    """Whether any of the numbers in order is from first to last."""
    at = bisect_left(ordered, first)
    return at < len(ordered) and ordered[at] <= last


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that overlap as one."""
    joined: list[tuple[int, int]] = []
    for first, last in spans:
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


def add_summary(connection: Connection, conversation_id: int, turns: Sequence[Turn], text: str) -> int:
    """Stores a summary as one more key to its turns (in order). Returns its chunk's id."""
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
    return chunk_id
