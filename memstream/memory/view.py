"""What a search may see: documents, and the memories of one owner or one conversation outside the asking window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import BigInteger, BindParameter, ColumnElement, Connection, and_, bindparam, func, or_, select

from memstream.errors import ConfigError
from memstream.stores import rows
from memstream.stores import schema as db
from memstream.stores.base import Scope

_NO_WINDOW = 2**62
_NOBODY = 0  # numbers of rows begin at 1


@dataclass(frozen=True, slots=True)
class View:
    """What one search may see: an owner or a single conversation, minus the asking conversation's window.

    ``documents`` are the owners whose documents it may read as well: those of the two, the asking owner and the shared
    knowledge of the namespace, that have any.
    """

    owner_id: int
    conversation_id: int | None
    asking_id: int = -1
    window_from: int = _NO_WINDOW
    documents: tuple[int, ...] = ()

    @property
    def scope(self) -> int:
        """The number under which the vector index holds these memories; see ``vectors.SCOPE``."""
        return self.owner_id if self.conversation_id is None else -self.conversation_id

    @property
    def knowledge(self) -> list[int]:
        """The numbers of the other scopes that hold passages for it."""
        return [owner_id for owner_id in self.documents if owner_id != self.scope]

    @property
    def scope_term(self) -> str:
        """The full-text term every visible row carries."""
        return f"o{self.owner_id}" if self.conversation_id is None else f"c{self.conversation_id}"

    def values(self, ids: Sequence[int] = (), **others: int) -> dict[str, Any]:
        """What the conditions below compare with, ``IDS``, and others."""
        return {
            "owner_id": self.owner_id,
            "only_id": self.conversation_id or _NOBODY,
            "asking_id": self.asking_id,
            "window_from": self.window_from,
            "ids": ids,
            **others,
        }

    def turns(self) -> ColumnElement[bool]:
        """Which turns are visible, as SQL over turns joined with conversations."""
        if self.conversation_id is None:
            return and_(db.Conversation.owner_id == self.owner_id, RECALLABLE_TURNS)
        return and_(db.Turn.conversation_id == self.conversation_id, RECALLABLE_TURNS)


def _value(name: str) -> BindParameter[int]:
    return bindparam(name, type_=BigInteger)


IDS: BindParameter[Any] = bindparam("ids", expanding=True)
_LIVE = and_(db.Turn.superseded.is_(False), db.Turn.state != "open")

# What a view sees, as SQL over keys or turns that were found by something else. Made once: putting a condition together
# takes longer than looking it up. A sum is in no index: else SQLite would read all keys of the owner, for each of them.
VISIBLE_KEYS = and_(
    db.Chunk.owner_id + 0 == _value("owner_id"),
    or_(_value("only_id") == _NOBODY, db.Chunk.conversation_id == _value("only_id")),
    or_(
        db.Chunk.conversation_id.is_(None),
        db.Chunk.conversation_id != _value("asking_id"),
        db.Chunk.last_sequence.is_(None),
        db.Chunk.last_sequence < _value("window_from"),
    ),
)
KEYS_IN_WINDOW = and_(db.Chunk.conversation_id == _value("asking_id"), db.Chunk.last_sequence >= _value("window_from"))
TURNS_IN_WINDOW = and_(db.Turn.conversation_id == _value("asking_id"), db.Turn.sequence >= _value("window_from"), _LIVE)
RECALLABLE_TURNS = and_(
    or_(db.Turn.conversation_id != _value("asking_id"), db.Turn.sequence < _value("window_from")), _LIVE
)

_OLDEST = select(func.min(db.Conversation.created)).where(db.Conversation.owner_id == _value("owner_id"))


def view_of(connection: Connection, scope: Scope, window_from: int | None) -> View | None:
    """What a scope sees; None where nothing is stored for it.

    Raises:
        ConfigError: the scope names neither a user nor a conversation.
    """
    if scope.user is None and scope.conversation is None and not scope.knowledge:
        raise ConfigError("a scope without a user needs a conversation: without either it would be everybody's memory")
    owner_id, documents = rows.readable_owners(connection, scope)
    conversation_id = None
    if owner_id is not None and scope.conversation is not None:
        conversation_id = rows.find_conversation(connection, scope)
    if owner_id is None or (conversation_id is None and scope.user is None and not scope.knowledge):
        return View(_NOBODY, None, documents=tuple(documents)) if documents else None
    return View(
        owner_id,
        conversation_id if scope.user is None else None,
        -1 if conversation_id is None else conversation_id,
        _NO_WINDOW if window_from is None else window_from,
        tuple(documents),
    )


def oldest_day(connection: Connection, view: View) -> date:
    """The day of the owner's first conversation; today where there is none."""
    found = connection.scalar(_OLDEST, {"owner_id": view.owner_id})
    return (db.now() if found is None else found).date()
