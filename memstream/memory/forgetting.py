"""Complete forgetting: the memory, every key to it, its vectors and words, and the snapshots that have seen it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

from sqlalchemy import Connection, delete, select, update

from memstream.errors import InputError, StoreError
from memstream.memory import keys
from memstream.memory.view import View, view_of
from memstream.stores import documents, fulltext, rows, vectors
from memstream.stores import schema as db
from memstream.stores.base import Scope
from memstream.stores.documents import StoredDocument, StoredPassage
from memstream.stores.sql import SqlStore

_ECHO_SHARE = 0.6  # of the forgotten words: a text with so many of them quotes it
_ECHO_POSTINGS = 100_000
_KINDS = ("turn", "fact", "passage", "document")

Stored = rows.Turn | db.Fact | StoredPassage | StoredDocument


@dataclass(slots=True)
class Forgotten:
    """What one transaction removed: the texts, and the ids under which they were found.

    ``owed_more`` where something was still to be wiped from the files before it.
    """

    texts: list[str]
    ids: set[str]
    owed_more: bool = False
    removed: dict[str, int] = field(default_factory=dict)
    chunk_ids: list[int] = field(default_factory=list)
    echoes: tuple[str, ...] = ()
    n_snapshots: int = 0
    summaries: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


def parse_id(memory_id: str) -> tuple[str, int]:
    """Splits ``turn:17``, ``fact:3``, ``passage:5`` or ``document:2``.

    Raises:
        InputError: it is none of them.
    """
    match = re.fullmatch(rf"({'|'.join(_KINDS)}):(\d{{1,18}})", memory_id)
    if match is None:
        raise InputError(
            f"{memory_id!r} is not the id of a memory; ids look like turn:17, fact:3, passage:5 or document:2"
        )
    return match[1], int(match[2])


def find(connection: Connection, scope: Scope, memory_id: str, *, reading: bool = False) -> tuple[View, Stored]:
    """A memory the scope owns; for ``reading`` also one of the documents it may recall.

    Raises:
        InputError: there is none under that id, or it is somebody else's: the message is the same.
    """
    kind, number = parse_id(memory_id)
    view = view_of(connection, scope, None)
    if view is not None and kind in ("passage", "document"):
        text = _find_text(connection, kind, number)
        if text is not None and text.owner_id in (view.documents if reading else (view.owner_id,)):
            return view, text
        view = None
    found: rows.Turn | db.Fact | None = None
    if view is not None and kind == "turn":
        turn = rows.turns_by_id(connection, [number]).get(number)
        if turn is not None and rows.owner_of(connection, turn.conversation_id) == view.owner_id:
            found = turn
    elif view is not None:
        row = connection.execute(
            select(db.Fact.id, db.Fact.text, db.Fact.created, db.Fact.conversation_id).where(
                db.Fact.id == number, db.Fact.owner_id == view.owner_id
            )
        ).one_or_none()
        found = None if row is None else db.Fact(**row._mapping)
    if view is None or found is None or view.conversation_id not in (None, found.conversation_id):
        raise InputError(f"there is no {memory_id} for {scope}")
    return view, found


def _find_text(connection: Connection, kind: str, number: int) -> StoredPassage | StoredDocument | None:
    if kind == "document":
        return documents.by_id(connection, number)
    return next(iter(documents.passages(connection, ids=[number])), None)


def scope_of(connection: Connection, memory_id: str) -> Scope | None:
    """The scope a memory belongs to; None where there is none under that id.

    Raises:
        InputError: it is not an id.
    """
    kind, number = parse_id(memory_id)
    if kind in ("passage", "document"):
        found = _find_text(connection, kind, number)
        return None if found is None else rows.scope_of_owner(connection, found.owner_id)
    columns = select(db.Owner.namespace, db.Owner.user_key, db.Conversation.name)
    if kind == "turn":
        said = columns.select_from(db.Turn).join(db.Conversation, db.Conversation.id == db.Turn.conversation_id)
        place = said.join(db.Owner, db.Owner.id == db.Conversation.owner_id).where(db.Turn.id == number)
    else:
        told = columns.select_from(db.Fact).join(db.Owner, db.Owner.id == db.Fact.owner_id)
        place = told.outerjoin(db.Conversation, db.Conversation.id == db.Fact.conversation_id)
        place = place.where(db.Fact.id == number)
    row = connection.execute(place).one_or_none()
    return None if row is None else Scope(row[0], row[1] or None, row[2])


def forget(store: SqlStore, scope: Scope, memory_id: str) -> Forgotten:
    """Removes a memory and everything made from it, in one transaction; the caller purges the files afterwards.

    Snapshots of all conversations of the owner go first: any of them may have recalled it, and a crash in between
    must not leave one behind.

    Raises:
        InputError: no such memory in this scope, or a turn that is still being said.
        StoreError: the disk refused; everything else is as it was.
    """
    with store.write() as connection:
        view, memory = find(connection, scope, memory_id)
        if isinstance(memory, rows.Turn) and memory.state == "open":
            raise InputError(f"{memory_id} is still being said; finish or stop it first")
        texts = (
            {memory_id: memory.text}
            if not isinstance(memory, StoredDocument)
            else {
                f"passage:{passage.id}": passage.text
                for passage in documents.passages(connection, document_id=memory.id)
            }
        )
        done = Forgotten(list(texts.values()), set(texts), echoes=_echoes(connection, view, texts))
        done.owed_more = store.owe_purge(connection)
        done.n_snapshots = drop_snapshots(store, connection, view.owner_id)
        if isinstance(memory, rows.Turn):
            _forget_turn(connection, memory, done)
        elif isinstance(memory, db.Fact):
            _forget_fact(connection, memory.id, done)
        else:
            whole = isinstance(memory, StoredDocument)
            remove = documents.remove if whole else documents.remove_passages
            change = remove(connection, [memory.id])
            done.removed, done.chunk_ids = change.removed, change.chunk_ids
    return done


def _forget_turn(connection: Connection, turn: rows.Turn, done: Forgotten) -> None:
    covering = (
        db.Chunk.conversation_id == turn.conversation_id,
        db.Chunk.first_sequence <= turn.sequence,
        db.Chunk.last_sequence >= turn.sequence,
    )
    done.chunk_ids = list(connection.scalars(select(db.Chunk.id).where(*covering)))
    words = fulltext.drop_turns(connection, [turn.id])
    own = connection.execute(delete(db.TurnEmbedding).where(db.TurnEmbedding.turn_id == turn.id)).rowcount
    gone = connection.execute(delete(db.Turn).where(db.Turn.id == turn.id)).rowcount
    removed, lost = keys.remove_keys(connection, turn.conversation_id, [turn.sequence])
    done.removed = {"turns": gone, "words": words, "turn_embeddings": own, **removed}
    done.summaries = [
        (turn.conversation_id, tuple(source for source in sources if source != turn.id)) for sources in lost
    ]


def _forget_fact(connection: Connection, fact_id: int, done: Forgotten) -> None:
    done.chunk_ids = list(connection.scalars(select(db.Chunk.id).where(db.Chunk.fact_id == fact_id)))
    done.removed = remove_fact(connection, fact_id)


def remove_fact(connection: Connection, fact_id: int) -> dict[str, int]:
    """Removes a fact with its pin, words and key. Returns rows removed by table."""
    chunk_ids = list(connection.scalars(select(db.Chunk.id).where(db.Chunk.fact_id == fact_id)))
    removed = vectors.delete_chunks(connection, chunk_ids)
    words = fulltext.drop_facts(connection, [fact_id])
    pins = connection.execute(delete(db.Pin).where(db.Pin.fact_id == fact_id)).rowcount
    gone = connection.execute(delete(db.Fact).where(db.Fact.id == fact_id)).rowcount
    return {"facts": gone, "pins": pins, "words": words, **removed}


def drop_snapshots(store: SqlStore, connection: Connection, owner_id: int) -> int:
    """Deletes the snapshot files of all conversations that an owner's memories may have reached, then their rows.

    Files are found by name, so that one whose writer was killed before it was recorded goes too; caches and snapshots
    of before are known by the count. Returns how many were recorded.
    """
    of_readers = db.Conversation.owner_id.in_(rows.readers(connection, owner_id))
    mine = connection.scalars(select(db.Conversation.id).where(of_readers))
    names, folder = {str(conversation_id) for conversation_id in mine}, store.snapshot_path("")
    for file in folder.iterdir() if folder is not None else ():
        if file.name.partition(".snapshot")[0] not in names:
            continue
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot delete the snapshot {file}: {error.strerror}; nothing was forgotten") from error
    recorded = db.Snapshot.conversation_id.in_(select(db.Conversation.id).where(of_readers))
    n = connection.execute(delete(db.Snapshot).where(recorded)).rowcount
    count_on(connection, owner_id)
    return n


def count_on(connection: Connection, owner_id: int) -> None:
    """Has every cache that something of an owner may have reached made anew before it is used again."""
    reached = db.Owner.id.in_(rows.readers(connection, owner_id))
    connection.execute(update(db.Owner).where(reached).values(n_forgotten=db.Owner.n_forgotten + 1))


def delete_conversation(store: SqlStore, connection: Connection, conversation_id: int) -> None:
    """Removes a conversation with all its turns, facts, keys, words and the owner's snapshots."""
    store.owe_purge(connection)
    drop_snapshots(store, connection, rows.owner_of(connection, conversation_id))
    chunks = select(db.Chunk.id).where(db.Chunk.conversation_id == conversation_id)
    vectors.delete_chunks(connection, list(connection.scalars(chunks)))
    turns = select(db.Turn.id).where(db.Turn.conversation_id == conversation_id)
    fulltext.drop_turns(connection, list(connection.scalars(turns)))
    facts = select(db.Fact.id).where(db.Fact.conversation_id == conversation_id)
    fulltext.drop_facts(connection, list(connection.scalars(facts)))
    connection.execute(delete(db.Conversation).where(db.Conversation.id == conversation_id))  # the rest cascades


def _echoes(connection: Connection, view: View, texts: Mapping[str, str]) -> tuple[str, ...]:
    """Other memories of the owner that quote one of the texts (by id): they hold most of its words."""
    found = {other for text in texts.values() for other in _quoting(connection, view, text)} - texts.keys()
    return tuple(sorted(found, key=lambda other: (other.partition(":")[0], int(other.partition(":")[2]))))


def _quoting(connection: Connection, view: View, text: str) -> list[str]:
    terms = fulltext.query_terms(text, 64)
    shared: Counter[str] = Counter()
    kinds = ("turn", "fact", "passage") if view.owner_id in view.documents else ("turn", "fact")
    for term, kind in product(terms, kinds):
        scope = view.scope_term if kind != "passage" else fulltext.scope_words(view.owner_id, None)
        quoting = fulltext.newest_with(connection, f"{kind}_words", [scope], term, _ECHO_POSTINGS)
        shared.update(f"{kind}:{number}" for number in quoting)
    enough = len(terms) if len(terms) <= 2 else _ECHO_SHARE * len(terms)
    return [other for other, n in shared.items() if n >= enough]
