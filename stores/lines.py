"""Log lines and their templates in SQL, inside the caller's transaction.

Words of whole lines are in the full-text table ``line_words``, in SQLite without a second copy of the text; words of
templates, without what varies, in ``template_words``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    ForeignKey,
    LargeBinary,
    Select,
    String,
    Text,
    column,
    func,
    insert,
    or_,
    select,
    table,
    text,
    update,
)
from sqlalchemy.orm import Mapped, mapped_column

from memstream.stores import fulltext, vectors
from memstream.stores.base import Vectors, storable_text
from memstream.stores.schema import Base, UtcTime, now
from memstream.stores.vectors import SpaceInfo


class StreamRow(Base):
    """One reading of one source of lines."""

    __tablename__ = "streams"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String)
    started: Mapped[datetime] = mapped_column(UtcTime)


class TemplateRow(Base):
    """What lines of one kind have in common, and its vector, float16 [dimension], once it has one."""

    __tablename__ = "templates"
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str] = mapped_column(Text)
    space_id: Mapped[int | None] = mapped_column(ForeignKey("spaces.id"))
    vector: Mapped[bytes | None] = mapped_column(LargeBinary)


class LineRow(Base):
    """One line; without a template where it has no message."""

    __tablename__ = "lines"
    id: Mapped[int] = mapped_column(primary_key=True)
    stream_id: Mapped[int] = mapped_column(ForeignKey("streams.id"))
    number: Mapped[int]
    template_id: Mapped[int | None] = mapped_column(ForeignKey("templates.id"))
    time: Mapped[datetime | None] = mapped_column(UtcTime)
    level: Mapped[str | None] = mapped_column(String)
    text: Mapped[str] = mapped_column(Text)
    offset: Mapped[int | None] = mapped_column(BigInteger)  # of its first byte; None for lines of an older store


_PIECE = 1000  # lines indexed at once
_LINE_WORD = table("line_words", column("rowid", BigInteger)).c.rowid
_TEMPLATE_WORD = table("template_words", column("rowid", BigInteger)).c.rowid


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLine:
    """A line to store."""

    stream_id: int
    number: int
    offset: int
    template_id: int | None
    time: datetime | None
    level: str | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLine:
    """A line that was found: name of its stream, number from 1 and first byte within it, time (UTC), level and text.

    The offset is None for a line that was stored before offsets were.
    """

    stream: str
    line: int
    offset: int | None
    time: datetime | None
    level: str | None
    text: str


def add_stream(connection: Connection, name: str) -> int:
    """Begins a stream; returns its id."""
    statement = insert(StreamRow).values(name=storable_text(name), started=now())
    return connection.execute(statement.returning(StreamRow.id)).scalar_one()


def ensure_template(connection: Connection, value: str) -> int:
    """The id of the template with this text, created if new."""
    value = storable_text(value)
    found = connection.scalar(select(func.min(TemplateRow.id)).where(TemplateRow.text == value))
    if found is None:
        found = connection.execute(insert(TemplateRow).values(text=value).returning(TemplateRow.id)).scalar_one()
        _index_template(connection, found, value)
    return found


def change_template(connection: Connection, template_id: int, value: str) -> None:
    """Gives a template a new text; its vector stays, that of its first line."""
    value = storable_text(value)
    connection.execute(update(TemplateRow).where(TemplateRow.id == template_id).values(text=value))
    connection.execute(text("DELETE FROM template_words WHERE rowid = :id"), {"id": template_id})
    _index_template(connection, template_id, value)


def _index_template(connection: Connection, template_id: int, value: str) -> None:
    connection.execute(
        text("INSERT INTO template_words (rowid, text) VALUES (:id, :text)"),
        {"id": template_id, "text": " ".join(fulltext.words(value))},
    )


def add_lines(connection: Connection, lines: Sequence[NewLine]) -> None:
    """Stores lines with their full-text rows."""
    if not lines:
        return
    first = 1 + (connection.scalar(select(func.max(LineRow.id))) or 0)
    values = [
        {
            "id": first + i,
            "stream_id": line.stream_id,
            "number": line.number,
            "offset": line.offset,
            "template_id": line.template_id,
            "time": line.time,
            "level": line.level,
            "text": storable_text(line.text),
        }
        for i, line in enumerate(lines)
    ]
    connection.execute(insert(LineRow), values)
    _index_lines(connection, [(first + i, line.text) for i, line in enumerate(lines)])


def _index_lines(connection: Connection, lines: Sequence[tuple[int, str]]) -> None:
    connection.execute(
        text("INSERT INTO line_words (rowid, text) VALUES (:id, :text)"),
        [{"id": line_id, "text": " ".join(fulltext.words(value))} for line_id, value in lines],
    )


def index_lines(connection: Connection) -> None:
    """Makes the full-text rows of all lines, where there are none yet."""
    result = connection.execute(select(LineRow.id, LineRow.text).execution_options(yield_per=_PIECE))
    for part in result.partitions():
        _index_lines(connection, [(row[0], row[1]) for row in part])


def count_lines(connection: Connection) -> int:
    """Number of lines stored."""
    return connection.scalar(select(func.count()).select_from(LineRow)) or 0


def last_line(connection: Connection) -> int:
    """Id of the line stored last; 0 for none."""
    return connection.scalar(select(func.max(LineRow.id))) or 0


def last_number(connection: Connection, stream_id: int) -> int:
    """Highest number of a stored line of a stream; 0 for none."""
    return connection.scalar(select(func.max(LineRow.number)).where(LineRow.stream_id == stream_id)) or 0


def count_of_text(connection: Connection, template: str, until: int) -> int:
    """How many lines up to an id are of the template with this text."""
    statement = (
        select(func.count())
        .select_from(LineRow)
        .join(TemplateRow, TemplateRow.id == LineRow.template_id)
        .where(TemplateRow.text == storable_text(template), LineRow.id <= until)
    )
    return connection.scalar(statement) or 0


def count_templates(connection: Connection) -> int:
    """Number of templates stored."""
    return connection.scalar(select(func.count()).select_from(TemplateRow)) or 0


def templates_with(connection: Connection, term: str) -> list[int]:
    """Ids of the templates that hold a term (as ``fulltext.words`` made it)."""
    statement = select(_TEMPLATE_WORD).where(fulltext.holds_all(connection, "template_words", [term]))
    return list(connection.scalars(statement.order_by(_TEMPLATE_WORD)))


def any_line_with(connection: Connection, terms: Sequence[str]) -> bool:
    """True where some line holds all the terms."""
    return connection.scalar(_lines_with(connection, terms).limit(1)) is not None


def count_by_template(connection: Connection, terms: Sequence[str]) -> dict[int, int]:
    """How many lines hold all the terms, by template."""
    statement = (
        select(LineRow.template_id, func.count())
        .where(*_holding(connection, terms), LineRow.template_id.is_not(None))
        .group_by(LineRow.template_id)
    )
    return {row[0]: row[1] for row in connection.execute(statement) if row[0] is not None}


def lines_of(
    connection: Connection, template_id: int, terms: Sequence[str], limit: int, *, newest: bool = False
) -> list[StoredLine]:
    """The first (or the newest) lines of a template that hold all the terms, in the order they were read."""
    statement = (
        select(StreamRow.name, LineRow.number, LineRow.offset, LineRow.time, LineRow.level, LineRow.text)
        .join(StreamRow, StreamRow.id == LineRow.stream_id)
        .where(LineRow.template_id == template_id, *_holding(connection, terms))
        .order_by(LineRow.id.desc() if newest else LineRow.id)
        .limit(limit)
    )
    found = [
        StoredLine(stream=row[0], line=row[1], offset=row[2], time=row[3], level=row[4], text=row[5])
        for row in connection.execute(statement)
    ]
    return found[::-1] if newest else found


def _holding(connection: Connection, terms: Sequence[str]) -> list[ColumnElement[bool]]:
    return [LineRow.id.in_(_lines_with(connection, terms))] if terms else []


def _lines_with(connection: Connection, terms: Sequence[str]) -> Select[int]:
    return select(_LINE_WORD).where(fulltext.holds_all(connection, "line_words", terms))


def template_texts(connection: Connection, template_ids: Sequence[int]) -> dict[int, str]:
    """Texts of templates by id."""
    statement = select(TemplateRow.id, TemplateRow.text).where(TemplateRow.id.in_(template_ids))
    return {row[0]: row[1] for row in connection.execute(statement)}


def templates_without_vector(connection: Connection, space: SpaceInfo, limit: int) -> dict[int, str]:
    """Texts of the oldest templates that have no vector in a space yet, by id."""
    elsewhere = or_(TemplateRow.vector.is_(None), TemplateRow.space_id != space.id)
    statement = select(TemplateRow.id, TemplateRow.text).where(elsewhere)
    return {row[0]: row[1] for row in connection.execute(statement.order_by(TemplateRow.id).limit(limit))}


def set_vectors(connection: Connection, space: SpaceInfo, template_ids: Sequence[int], matrix: Vectors) -> None:
    """Keeps the vectors [n, d] of templates."""
    for template_id, vector in zip(template_ids, matrix, strict=True):
        values = {"space_id": space.id, "vector": vectors.pack(vector)}
        connection.execute(update(TemplateRow).where(TemplateRow.id == template_id).values(**values))


def drop_vectors(connection: Connection, space_id: int) -> None:
    """Takes the vectors of a space off the templates; they are made again when they are asked for."""
    statement = update(TemplateRow).where(TemplateRow.space_id == space_id)
    connection.execute(statement.values(space_id=None, vector=None))


def template_vectors(connection: Connection, space: SpaceInfo) -> tuple[list[int], Vectors]:
    """Ids [n] and vectors [n, d] of all templates that have one in a space."""
    statement = select(TemplateRow.id, TemplateRow.vector).where(TemplateRow.space_id == space.id)
    rows = connection.execute(statement.order_by(TemplateRow.id)).all()
    return [row[0] for row in rows], vectors.unpack([row[1] for row in rows if row[1] is not None], space.dimension)
