"""What a search may see: documents, and the memories of one owner or one conversation outside the asking window."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from sqlalchemy import ColumnElement, Connection, and_, func, or_, select

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

    def chunks(self) -> ColumnElement[bool]:
        """Which keys are visible, as SQL."""
        mine = db.Chunk.owner_id == self.owner_id
        if self.conversation_id is not None:
            mine = and_(mine, db.Chunk.conversation_id == self.conversation_id)
        outside = or_(
            db.Chunk.conversation_id.is_(None),
            db.Chunk.conversation_id != self.asking_id,
            db.Chunk.last_sequence.is_(None),
            db.Chunk.last_sequence < self.window_from,
        )
        return and_(mine, outside)

    def window(self) -> ColumnElement[bool]:
        """Which keys reach into the asking conversation's window, as SQL: all of the scope but these are visible."""
        return and_(db.Chunk.conversation_id == self.asking_id, db.Chunk.last_sequence >= self.window_from)

    def facts(self) -> ColumnElement[bool]:
        """Which facts are visible, as SQL."""
        mine = db.Fact.owner_id == self.owner_id
        return mine if self.conversation_id is None else and_(mine, db.Fact.conversation_id == self.conversation_id)

    def turns(self) -> ColumnElement[bool]:
        """Which turns are visible, as SQL over turns joined with conversations."""
        mine = db.Conversation.owner_id == self.owner_id
        if self.conversation_id is not None:
            mine = and_(mine, db.Turn.conversation_id == self.conversation_id)
        return and_(mine, self.recallable_turns())

    def recallable_turns(self) -> ColumnElement[bool]:
        """Which turns under a visible key may be recalled, as SQL over turns alone."""
        outside = or_(db.Turn.conversation_id != self.asking_id, db.Turn.sequence < self.window_from)
        return and_(outside, db.Turn.superseded.is_(False), db.Turn.state != "open")


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
    found = connection.scalar(
        select(func.min(db.Conversation.created)).where(db.Conversation.owner_id == view.owner_id)
    )
    return (db.now() if found is None else found).date()
