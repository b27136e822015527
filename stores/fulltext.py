"""Words of a text, and the full-text rows that find them.

Texts are split here, not by the database, so that any text can be indexed and searched without a syntax error: words
are case-folded and freed of accents; Chinese, Japanese, Korean, Thai and the like, which set no spaces, become single
characters and bigrams. FTS5 (SQLite) or a ``tsvector`` (PostgreSQL) then only splits at spaces and stems English words.
Each row also holds scope terms (``o<owner> c<conversation>``), so that a search walks the words of one scope only; how
many rows carry each is kept in the table ``sizes``, so that nobody need count them.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, TextClause, bindparam, text

_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003ffff"  # Japanese, Chinese, Korean
)
_WORD = re.compile(rf"(?P<run>[{_UNSPACED}]+)|(?:(?![{_UNSPACED}_])[\w\u0900-\u0dff])+")
_ACCENTS = re.compile("[\u0300-\u036f]")
_MAX_WORD = 60  # the Porter stemmer leaves longer words alone; longer still is no word

_STOP = """
    a about after again all also am an and any are as at be because been before being but by can cannot could did do
    does doing don done down each else ever few for from get got had has have having he her here hers him his how i if
    in into is isn it its just know let ll lot made make many may me might mine more most much must my myself no nor
    not now of off oh ok okay on once one only or other our out over own please re really s said same say she should so
    some such t tell than thank thanks that the their them then there these they thing this those through to too under
    until up us ve very was we well were what when where which while who whom whose why will with would yeah yes you
    your yours called name named remember remind told think want
"""
STOP_WORDS = frozenset(_STOP.split())
_SIZES = text("SELECT words, scope, n FROM sizes WHERE scope IN :scopes").bindparams(
    bindparam("scopes", expanding=True)
)
ALL = "*"
_TABLES = ("turn_words", "fact_words", "passage_words")
_STRUCTURE = 10  # id of the record that says what an FTS5 index consists of
_MOST_LEVELS = 500


def words(value: str) -> list[str]:
    """The searchable words of a text, in order."""
    folded = _ACCENTS.sub("", unicodedata.normalize("NFKD", value.casefold()))
    found: list[str] = []
    for match in _WORD.finditer(unicodedata.normalize("NFC", folded)):
        run = match["run"]
        if run is None:
            found.append(match[0][:_MAX_WORD])
        else:
            found.extend(run)
            found.extend(run[i : i + 2] for i in range(len(run) - 1))
    return found


def query_terms(value: str, limit: int = 32) -> list[str]:
    """The distinct words of a query that carry meaning, at most ``limit``; of unspaced runs only the bigrams."""
    folded = words(value)
    bigrams = {word for word in folded if len(word) == 2 and _is_unspaced(word)}
    covered = {char for bigram in bigrams for char in bigram}
    kept = dict.fromkeys(w for w in folded if w not in STOP_WORDS and not (len(w) == 1 and w in covered))
    return list(kept)[:limit]


def _is_unspaced(word: str) -> bool:
    match = _WORD.match(word)
    return match is not None and match["run"] is not None


def scope_words(owner_id: int, conversation_id: int | None) -> str:
    """The scope terms of a row."""
    return f"o{owner_id}" if conversation_id is None else f"o{owner_id} c{conversation_id}"


def add_turn(connection: Connection, turn_id: int, owner_id: int, conversation_id: int, value: str) -> None:
    """Writes the full-text row of a turn."""
    add_turns(connection, owner_id, conversation_id, {turn_id: value})


def add_turns(connection: Connection, owner_id: int, conversation_id: int, values: Mapping[int, str]) -> None:
    """Writes the full-text rows of turns of one conversation: texts by id."""
    _add(connection, "turn_words", scope_words(owner_id, conversation_id), values)


def add_fact(connection: Connection, fact_id: int, owner_id: int, conversation_id: int | None, value: str) -> None:
    """Writes the full-text row of a fact."""
    _add(connection, "fact_words", scope_words(owner_id, conversation_id), {fact_id: value})


def add_passage(connection: Connection, passage_id: int, owner_id: int, value: str) -> None:
    """Writes the full-text row of a passage: of its headings and its text."""
    _add(connection, "passage_words", scope_words(owner_id, None), {passage_id: value})


def _add(connection: Connection, table: str, scope: str, values: Mapping[int, str]) -> None:
    if values:
        connection.execute(
            text(f"INSERT INTO {table} (rowid, scope, text) VALUES (:id, :scope, :text)"),
            [{"id": row_id, "scope": scope, "text": " ".join(words(value))} for row_id, value in values.items()],
        )
        _resize(connection, table, Counter({scope: len(values)}))


def drop_turns(connection: Connection, turn_ids: Iterable[int]) -> int:
    """Removes the full-text rows of turns; returns how many there were."""
    return _drop(connection, "turn_words", turn_ids)


def drop_facts(connection: Connection, fact_ids: Iterable[int]) -> int:
    """Removes the full-text rows of facts; returns how many there were."""
    return _drop(connection, "fact_words", fact_ids)


def drop_passages(connection: Connection, passage_ids: Iterable[int]) -> int:
    """Removes the full-text rows of passages; returns how many there were."""
    return _drop(connection, "passage_words", passage_ids)


def _drop(connection: Connection, table: str, ids: Iterable[int]) -> int:
    scope_of, statement = (text(f"{what} FROM {table} WHERE rowid = :id") for what in ("SELECT scope", "DELETE"))
    dropped: Counter[str] = Counter()
    for row_id in ids:
        dropped.update(connection.scalars(scope_of, {"id": row_id}))
        connection.execute(statement, {"id": row_id})
    _resize(connection, table, Counter({scope: -n for scope, n in dropped.items()}))
    return dropped.total()


def _resize(connection: Connection, table: str, changes: Counter[str]) -> None:
    """Notes that so many more rows of a table, or fewer, have each scope; ``ALL`` stands for the whole table."""
    by_term = [{"words": table, "scope": t, "n": n} for scope, n in changes.items() for t in (*scope.split(), ALL)]
    if by_term:
        connection.execute(
            text(
                "INSERT INTO sizes (words, scope, n) VALUES (:words, :scope, :n) "
                "ON CONFLICT (words, scope) DO UPDATE SET n = sizes.n + excluded.n"
            ),
            by_term,
        )


def sizes(connection: Connection, scopes: Collection[str]) -> Counter[tuple[str, str]]:
    """How many rows each full-text table has for each of the scope terms."""
    found = connection.execute(_SIZES, {"scopes": list(scopes)})
    return Counter({(table, scope): n for table, scope, n in found})


def count(connection: Connection) -> Counter[tuple[str, str]]:
    """How many rows of each full-text table carry each scope term, by looking at all of them."""
    found: Counter[tuple[str, str]] = Counter()
    for table in _TABLES:
        for scope, n in connection.execute(text(f"SELECT scope, count(*) FROM {table} GROUP BY scope")):
            found.update({(table, term): n for term in (*scope.split(), ALL)})
    return found


def recount(connection: Connection) -> None:
    """Makes the sizes anew."""
    connection.execute(text("DELETE FROM sizes"))
    found = [{"words": table, "scope": scope, "n": n} for (table, scope), n in count(connection).items()]
    if found:
        connection.execute(text("INSERT INTO sizes (words, scope, n) VALUES (:words, :scope, :n)"), found)


def holds(connection: Connection, table: str, scopes: Sequence[str], term: str) -> tuple[str, dict[str, Any]]:
    """A condition on rows of a full-text table, and its values: those of any of the scopes with a word."""
    if connection.dialect.name == "sqlite":
        any_scope = " OR ".join(f'"{scope}"' for scope in scopes)
        return f"{table} MATCH :match", {"match": f'scope : ({any_scope}) AND text : "{term}"'}
    query = "CAST(:scopes AS tsquery) && plainto_tsquery('pg_catalog.english', :term)"
    return f"{table}.words @@ ({query})", {"scopes": " | ".join(f"':{scope}'" for scope in scopes), "term": term}


def holds_all(connection: Connection, table: str, terms: Sequence[str]) -> TextClause:
    """A condition on rows of a full-text table without scopes: those with all the terms (as ``words`` made them)."""
    if connection.dialect.name == "sqlite":
        return text(f"{table} MATCH :terms").bindparams(terms=" AND ".join(f'"{term}"' for term in terms))
    return text(f"{table}.words @@ plainto_tsquery('pg_catalog.english', :terms)").bindparams(terms=" ".join(terms))


def newest_with(
    connection: Connection, table: str, scopes: Sequence[str], term: str, limit: int, *, most: bool = False
) -> list[int]:
    """Ids of the newest ``limit`` rows of any of the scopes that hold a term (as ``words`` made it), newest first.

    Args:
        connection: to the store.
        table: of which kind of text.
        scopes: scope terms.
        term: a word.
        limit: how many.
        most: the scopes have many rows, and a good part of all: SQLite then asks of each row that holds the term whose
            it is, which is faster than finding it among the many that hold the scope term. What is found is the same.
    """
    condition, values = holds(connection, table, scopes, term)
    if most and connection.dialect.name == "sqlite" and len(scopes) == 1 and scopes[0].startswith("o"):
        condition = (
            f"{table} MATCH :match AND EXISTS (SELECT 1 FROM {_WHOSE[table]} = {table}.rowid AND owner_id = :owner)"
        )
        values = {"match": f'text : "{term}"', "owner": int(scopes[0][1:])}
    statement = _prepared(f"SELECT rowid FROM {table} WHERE {condition} ORDER BY rowid DESC LIMIT :limit")
    return list(connection.scalars(statement, {**values, "limit": limit}))


_WHOSE = {
    "turn_words": "turns JOIN conversations ON conversations.id = conversation_id WHERE turns.id",
    "fact_words": "facts INDEXED BY facts_by_owner WHERE facts.id",
    "passage_words": "passages JOIN documents ON documents.id = document_id WHERE passages.id",
}
_prepared = lru_cache(maxsize=16)(text)  # reading a statement for its parameters takes longer than many a search


def rows(connection: Connection, table: str) -> dict[int, str]:
    """Everything a full-text table holds: row id to its words."""
    return {row.rowid: row.text for row in connection.execute(text(f"SELECT rowid, text FROM {table}"))}


def optimize(connection: Connection) -> None:
    """Merges the FTS5 indexes, so that deleted words leave their shadow tables.

    Older releases of SQLite put the merged index one level higher each time and call it malformed above 2,000 levels;
    making an index anew begins at the lowest.
    """
    for table in _TABLES:
        how = "optimize" if _n_levels(connection, table) < _MOST_LEVELS else "rebuild"
        connection.execute(text(f"INSERT INTO {table} ({table}) VALUES ('{how}')"))


def _n_levels(connection: Connection, table: str) -> int:
    """How many levels an FTS5 index has: a varint behind the four bytes that its structure record begins with."""
    record = connection.scalar(text(f"SELECT block FROM {table}_data WHERE id = {_STRUCTURE}"))
    n = 0
    for byte in record[4:]:
        n = n << 7 | byte & 127
        if byte < 128:
            break
    return n


def check(connection: Connection) -> None:
    """Compares the FTS5 indexes with their contents; FTS5 raises when they differ."""
    for table in _TABLES:
        connection.execute(text(f"INSERT INTO {table} ({table}) VALUES ('integrity-check')"))


def rebuild(connection: Connection) -> None:
    """Makes the FTS5 indexes anew from their contents, also where their structure records cannot be read."""
    for table in _TABLES:
        connection.execute(
            text(f"UPDATE {table}_data SET block = :nothing WHERE id = {_STRUCTURE}"), {"nothing": bytes(7)}
        )
        connection.execute(text(f"INSERT INTO {table} ({table}) VALUES ('rebuild')"))
