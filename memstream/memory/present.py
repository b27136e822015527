"""Hits as the reports that callers see."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sqlalchemy import Connection, select

from memstream.memory.hits import Hit
from memstream.memory.view import View
from memstream.report import Citation, DocumentInfo, Recalled, Why
from memstream.stores import documents, rows
from memstream.stores import schema as db
from memstream.stores.documents import StoredDocument, StoredPassage


def unscored(
    *, turn: rows.Turn | None = None, fact: tuple[int, str] | None = None, passage: StoredPassage | None = None
) -> Hit:
    """A memory that was looked up rather than searched."""
    return Hit(turn, fact, 0.0, None, None, (), 0.0, passage=passage)


def recalled(connection: Connection, hits: Sequence[Hit]) -> list[Recalled]:
    """Hits with their times, conversations and reasons, in the same order."""
    conversation_ids = {hit.turn.conversation_id for hit in hits if hit.turn is not None}
    names: dict[int, str] = {}
    for part in rows.batches(conversation_ids):
        named = select(db.Conversation.id, db.Conversation.name).where(db.Conversation.id.in_(part))
        names.update(connection.execute(named).all())
    fact_ids = [hit.fact[0] for hit in hits if hit.fact is not None]
    timed = select(db.Fact.id, db.Fact.created).where(db.Fact.id.in_(fact_ids))
    created = dict(connection.execute(timed).all())
    pinned = set(connection.scalars(select(db.Pin.fact_id).where(db.Pin.fact_id.in_(fact_ids))))
    found = []
    for hit in hits:
        why = Why(
            score=round(hit.score, 4),
            dense=None if hit.dense is None else round(hit.dense, 4),
            lexical=None if hit.lexical is None else round(hit.lexical, 4),
            dense_rank=hit.dense_rank,
            lexical_rank=hit.lexical_rank,
            terms=hit.terms,
            boosts=hit.boosts,
            rerank=None if hit.rerank is None else round(hit.rerank, 4),
            pinned=hit.fact is not None and hit.fact[0] in pinned,
        )
        if hit.turn is not None:
            turn = hit.turn
            name = names.get(turn.conversation_id)
            note = Recalled(
                id=f"turn:{turn.id}", role=turn.role, text=turn.text, time=turn.created, conversation=name, why=why
            )
            found.append(note)
        elif hit.passage is not None:
            found.append(_passage(hit.passage, why))
        elif hit.fact is not None and hit.fact[0] in created:
            number, text = hit.fact
            note = Recalled(
                id=f"fact:{number}", role="fact", text=text, time=created[number], conversation=None, why=why
            )
            found.append(note)
    return found


def _passage(passage: StoredPassage, why: Why) -> Recalled:
    citation = Citation(
        document=f"document:{passage.document_id}",
        name=passage.name,
        path=passage.path or None,
        title=passage.title,
        heading=passage.heading,
        first=passage.first,
        last=passage.last,
        first_line=passage.first_line,
        last_line=passage.last_line,
    )
    return Recalled(
        id=f"passage:{passage.id}",
        role="document",
        text=passage.text,
        time=passage.updated,
        conversation=None,
        why=why,
        citation=citation,
    )


def whole(connection: Connection, memory: rows.Turn | db.Fact | StoredPassage | StoredDocument) -> Recalled:
    """A memory in full; of a document its passages, one after the other."""
    if isinstance(memory, StoredDocument):
        texts = [passage.text for passage in documents.passages(connection, document_id=memory.id)]
        return dataclasses.replace(listed(memory), text="\n\n".join(texts))
    if isinstance(memory, rows.Turn):
        hit = unscored(turn=memory)
    elif isinstance(memory, StoredPassage):
        hit = unscored(passage=memory)
    else:
        hit = unscored(fact=(memory.id, memory.text))
    return recalled(connection, [hit])[0]


def listed(document: StoredDocument) -> Recalled:
    """A document among other memories: its name and title stand for it."""
    return Recalled(
        id=f"document:{document.id}",
        role="document",
        text=f"{document.name}: {document.title}" if document.title else document.name,
        time=document.updated,
        conversation=None,
        why=Why(score=0.0),
    )


def info(document: StoredDocument) -> DocumentInfo:
    """A document in a list."""
    return DocumentInfo(
        id=f"document:{document.id}",
        name=document.name,
        path=document.path or None,
        title=document.title,
        n_passages=document.n_passages,
        added=document.added,
        updated=document.updated,
    )


def pinned_facts(connection: Connection, view: View, *, limit: int | None = None) -> list[Recalled]:
    """The newest ``limit`` pinned facts a view sees, or all, newest first."""
    statement = (
        select(db.Fact.id, db.Fact.text)
        .join(db.Pin, db.Pin.fact_id == db.Fact.id)
        .where(db.Fact.owner_id == view.owner_id)
        .order_by(db.Fact.id.desc())
        .limit(limit)
    )
    if view.conversation_id is not None:
        statement = statement.where(db.Fact.conversation_id == view.conversation_id)
    return recalled(connection, [unscored(fact=(row.id, row.text)) for row in connection.execute(statement)])
