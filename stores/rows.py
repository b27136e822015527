"""Reading and writing owners, conversations and turns, inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, and_, bindparam, delete, exists, func, insert, or_, select, update

from memstream.errors import InputError
from memstream.stores import fulltext
from memstream.stores import schema as db
from memstream.stores.base import Scope, storable_text
from memstream.stores.schema import TurnState


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as stored.

    Attributes:
        id: its number, never reused.
        sequence: place in its conversation, from 0; forgotten turns leave gaps.
        role: ``user``, ``assistant``, or another; ``call`` and ``tool``: see ``TOOL_ROLES``.
        text: what was said.
        n_tokens: as counted by whoever wrote it.
        created: UTC.
        state: ``open`` while it is being said; ``cut`` where it was interrupted.
        conversation_id: the conversation it belongs to.
    """

    id: int
    sequence: int
    role: str
    text: str
    n_tokens: int
    created: datetime
    state: TurnState
    conversation_id: int


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """A conversation in a list."""

    id: int
    scope: Scope
    created: datetime
    n_turns: int


TOOL_ROLES = ("call", "tool")  # a model's call of tools, and what they returned: found by a search, never recalled
NO_SEQUENCE = 2**62  # greater than that of any turn

TURN_COLUMNS = (
    db.Turn.id,
    db.Turn.sequence,
    db.Turn.role,
    db.Turn.text,
    db.Turn.n_tokens,
    db.Turn.created,
    db.Turn.state,
    db.Turn.conversation_id,
)


def find_owner(connection: Connection, scope: Scope) -> int | None:
    """The id of a scope's (namespace, user); None where nothing was ever stored for it."""
    namespace, user_key = scope.owner
    return connection.scalar(select(db.Owner.id).where(db.Owner.namespace == namespace, db.Owner.user_key == user_key))


_READABLE = (
    select(db.Owner.id, db.Owner.namespace, exists().where(db.Document.owner_id == db.Owner.id))
    .where(or_(
        and_(db.Owner.namespace == bindparam("namespace"), db.Owner.user_key == bindparam("key")),
        and_(db.Owner.namespace == "", db.Owner.user_key == bindparam("shared")),
    ))
    .order_by(db.Owner.id)
)  # fmt: skip


def readable_owners(connection: Connection, scope: Scope) -> tuple[int | None, list[int]]:
    """The id of a scope's owner, and the owners of the documents it may read: itself and the shared knowledge."""
    namespace, key = scope.owner
    owners = connection.execute(_READABLE, {"namespace": namespace, "key": key, "shared": scope.namespace}).all()
    mine = next((row[0] for row in owners if row[1] == namespace), None)
    return mine, [row[0] for row in owners if row[2]]


def scope_of_owner(connection: Connection, owner_id: int) -> Scope:
    """The scope whose owner it is, without a conversation."""
    namespace, user_key = connection.execute(
        select(db.Owner.namespace, db.Owner.user_key).where(db.Owner.id == owner_id)
    ).one()
    return Scope(namespace, user_key or None) if namespace else Scope(user_key, knowledge=True)


def readers(connection: Connection, owner_id: int) -> list[int]:
    """The owners whose conversations may have read what an owner has: itself, and of shared knowledge the namespace."""
    namespace, user_key = connection.execute(
        select(db.Owner.namespace, db.Owner.user_key).where(db.Owner.id == owner_id)
    ).one()
    if namespace:
        return [owner_id]
    others = select(db.Owner.id).where(db.Owner.namespace == user_key)
    return [owner_id, *connection.scalars(others)]


def ensure_owner(connection: Connection, scope: Scope) -> int:
    """The id of a scope's owner, created if new."""
    found = find_owner(connection, scope)
    if found is None:
        namespace, user_key = scope.owner
        statement = insert(db.Owner).values(namespace=namespace, user_key=user_key)
        found = connection.execute(statement.returning(db.Owner.id)).scalar_one()
    return found


_NAMED = (
    select(db.Conversation.id)
    .join(db.Owner, db.Owner.id == db.Conversation.owner_id)
    .where(
        db.Owner.namespace == bindparam("namespace"),
        db.Owner.user_key == bindparam("key"),
        db.Conversation.name == bindparam("name"),
    )
)


def find_conversation(connection: Connection, scope: Scope) -> int | None:
    """The id of the conversation a scope names; None where there is none."""
    names = {"namespace": scope.namespace, "key": scope.user or "", "name": scope.conversation}
    return connection.scalar(_NAMED, names)


def ensure_conversation(connection: Connection, scope: Scope) -> int:
    """The id of the conversation a scope names, created if new."""
    found = find_conversation(connection, scope)
    if found is None:
        owner = ensure_owner(connection, scope)
        statement = insert(db.Conversation).values(owner_id=owner, name=scope.conversation, created=db.now())
        found = connection.execute(statement.returning(db.Conversation.id)).scalar_one()
    return found


def conversations(connection: Connection, scope: Scope) -> list[ConversationInfo]:
    """The conversations of (namespace, user), oldest first; only the one that the scope names, where it names one."""
    n_turns = (
        select(func.count()).select_from(db.Turn).where(db.Turn.conversation_id == db.Conversation.id).scalar_subquery()
    )
    statement = (
        select(db.Conversation.id, db.Conversation.name, db.Conversation.created, n_turns)
        .join(db.Owner, db.Owner.id == db.Conversation.owner_id)
        .where(db.Owner.namespace == scope.namespace, db.Owner.user_key == (scope.user or ""))
        .order_by(db.Conversation.id)
    )
    if scope.conversation is not None:
        statement = statement.where(db.Conversation.name == scope.conversation)
    return [
        ConversationInfo(row[0], Scope(scope.namespace, scope.user, row[1]), row[2], row[3])
        for row in connection.execute(statement)
    ]


def users(connection: Connection, namespace: str) -> list[str]:
    """The users of a namespace that have anything stored."""
    talked = select(db.Conversation.id).where(db.Conversation.owner_id == db.Owner.id).exists()
    told = select(db.Fact.id).where(db.Fact.owner_id == db.Owner.id).exists()
    read = select(db.Document.id).where(db.Document.owner_id == db.Owner.id).exists()
    mine = (db.Owner.namespace == namespace, db.Owner.user_key != "", or_(talked, told, read))
    statement = select(db.Owner.user_key).where(*mine)
    return list(connection.scalars(statement.order_by(db.Owner.user_key)))


def insert_turn(
    connection: Connection,
    conversation_id: int,
    role: str,
    text: str,
    n_tokens: int,
    state: TurnState,
    said: datetime | None = None,
) -> int:
    """Appends a turn; a turn that is not open gets its full-text row at once. Returns its id.

    Args:
        said: when; None means now. Once in the past, so is the conversation.
    """
    text = storable_text(text)
    statement = insert(db.Turn).values(
        conversation_id=conversation_id,
        sequence=next_sequence(connection, conversation_id),
        role=storable_text(role),
        text=text,
        n_tokens=n_tokens,
        created=said or db.now(),
        state=state,
        superseded=False,
    )
    turn_id = connection.execute(statement.returning(db.Turn.id)).scalar_one()
    if said is not None:
        later = and_(db.Conversation.id == conversation_id, db.Conversation.created > said)
        connection.execute(update(db.Conversation).where(later).values(created=said))
    if state != "open":
        fulltext.add_turn(connection, turn_id, owner_of(connection, conversation_id), conversation_id, text)
    return turn_id


def next_sequence(connection: Connection, conversation_id: int) -> int:
    """The sequence of a conversation's next turn."""
    last = connection.scalar(select(func.max(db.Turn.sequence)).where(db.Turn.conversation_id == conversation_id))
    return 0 if last is None else last + 1


def finish_turn(
    connection: Connection,
    conversation_id: int,
    turn_id: int,
    text: str | None,
    n_tokens: int | None,
    state: TurnState,
    role: str | None = None,
) -> None:
    """Closes an open turn and writes its full-text row; where text, number of tokens or role is None, it stays.

    Raises:
        InputError: the turn is not an open turn of this conversation.
    """
    found = connection.execute(
        select(db.Turn.text, db.Turn.n_tokens, db.Turn.role).where(
            db.Turn.id == turn_id, db.Turn.conversation_id == conversation_id, db.Turn.state == "open"
        )
    ).one_or_none()
    if found is None:
        raise InputError(f"turn:{turn_id} is not an open turn of this conversation")
    text = found.text if text is None else storable_text(text)
    n_tokens = found.n_tokens if n_tokens is None else n_tokens
    values = {"text": text, "state": state, "n_tokens": n_tokens, "role": role or found.role}
    connection.execute(update(db.Turn).where(db.Turn.id == turn_id).values(**values))
    fulltext.add_turn(connection, turn_id, owner_of(connection, conversation_id), conversation_id, text)


def owner_of(connection: Connection, conversation_id: int) -> int:
    """The owner of a conversation that is known to exist."""
    return connection.execute(
        select(db.Conversation.owner_id).where(db.Conversation.id == conversation_id)
    ).scalar_one()


def n_forgotten(connection: Connection, conversation_id: int) -> int:
    """How often something of a conversation's owner was forgotten."""
    owner = select(db.Conversation.owner_id).where(db.Conversation.id == conversation_id).scalar_subquery()
    return connection.scalar(select(db.Owner.n_forgotten).where(db.Owner.id == owner)) or 0


def open_turns(connection: Connection, conversation_id: int) -> list[int]:
    """Ids of turns that a killed process left open."""
    statement = select(db.Turn.id).where(db.Turn.conversation_id == conversation_id, db.Turn.state == "open")
    return list(connection.scalars(statement.order_by(db.Turn.sequence)))


def turns(
    connection: Connection,
    conversation_id: int,
    *,
    live_only: bool = True,
    first: int | None = None,
    last: int | None = None,
) -> list[Turn]:
    """Turns of a conversation in order, of sequences ``first`` to ``last`` inclusive; live are not superseded."""
    statement = select(*TURN_COLUMNS).where(db.Turn.conversation_id == conversation_id)
    if live_only:
        statement = statement.where(db.Turn.superseded.is_(False))
    if first is not None:
        statement = statement.where(db.Turn.sequence >= first)
    if last is not None:
        statement = statement.where(db.Turn.sequence <= last)
    return [Turn(*row) for row in connection.execute(statement.order_by(db.Turn.sequence))]


def turns_after(connection: Connection, conversation_id: int, sequence: int, n: int) -> list[Turn]:
    """The next ``n`` finished live turns after a sequence, in order."""
    statement = (
        select(*TURN_COLUMNS)
        .where(
            db.Turn.conversation_id == conversation_id,
            db.Turn.superseded.is_(False),
            db.Turn.state != "open",
            db.Turn.sequence > sequence,
        )
        .order_by(db.Turn.sequence)
        .limit(n)
    )
    return [Turn(*row) for row in connection.execute(statement)]


def turns_before(connection: Connection, conversation_id: int, sequence: int, n: int) -> list[Turn]:
    """The last ``n`` finished live turns before a sequence, in order."""
    statement = (
        select(*TURN_COLUMNS)
        .where(
            db.Turn.conversation_id == conversation_id,
            db.Turn.superseded.is_(False),
            db.Turn.state != "open",
            db.Turn.sequence < sequence,
        )
        .order_by(db.Turn.sequence.desc())
        .limit(n)
    )
    return [Turn(*row) for row in connection.execute(statement)][::-1]


def turns_by_id(connection: Connection, ids: Collection[int]) -> dict[int, Turn]:
    """Turns by their ids; unknown ids are left out."""
    found: dict[int, Turn] = {}
    for part in batches(ids):
        for row in connection.execute(select(*TURN_COLUMNS).where(db.Turn.id.in_(part))):
            found[row.id] = Turn(*row)
    return found


def turns_by_sequence(connection: Connection, conversation_id: int, sequences: Collection[int]) -> list[Turn]:
    """Those of the turns at these sequences that are finished and live, in order."""
    found: list[Turn] = []
    for part in batches(sorted(set(sequences))):
        statement = select(*TURN_COLUMNS).where(
            db.Turn.conversation_id == conversation_id,
            db.Turn.sequence.in_(part),
            db.Turn.superseded.is_(False),
            db.Turn.state != "open",
        )
        found.extend(Turn(*row) for row in connection.execute(statement.order_by(db.Turn.sequence)))
    return found


def live_turns(connection: Connection, conversation_id: int, turn_ids: Collection[int]) -> list[Turn]:
    """Those of the turns that are finished, live and of this conversation, in order."""
    found: list[Turn] = []
    for part in batches(turn_ids):
        statement = select(*TURN_COLUMNS).where(
            db.Turn.id.in_(part),
            db.Turn.conversation_id == conversation_id,
            db.Turn.superseded.is_(False),
            db.Turn.state != "open",
        )
        found.extend(Turn(*row) for row in connection.execute(statement))
    return sorted(found, key=lambda turn: turn.sequence)


def supersede(connection: Connection, conversation_id: int, turn_ids: Collection[int]) -> list[int]:
    """Marks turns as superseded and removes their full-text rows and vectors. Returns their sequences."""
    mine = [turn for turn in turns_by_id(connection, turn_ids).values() if turn.conversation_id == conversation_id]
    missing = sorted(set(turn_ids) - {turn.id for turn in mine})
    if missing:
        raise InputError(f"turn:{missing[0]} is not a turn of this conversation")
    unfinished = [turn.id for turn in mine if turn.state == "open"]
    if unfinished:
        raise InputError(f"turn:{unfinished[0]} is still being said; finish or stop it first")
    for turn in mine:
        connection.execute(update(db.Turn).where(db.Turn.id == turn.id).values(superseded=True))
        connection.execute(delete(db.TurnEmbedding).where(db.TurnEmbedding.turn_id == turn.id))
    fulltext.drop_turns(connection, [turn.id for turn in mine])
    return sorted(turn.sequence for turn in mine)


def batches(ids: Iterable[int], size: int = 500) -> Iterable[Sequence[int]]:
    """Ids in pieces small enough for one statement."""
    values = list(ids)
    return (values[i : i + size] for i in range(0, len(values), size))
