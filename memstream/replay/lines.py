"""Remembers every line of a replay, and finds lines again by words and by meaning."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection

from memstream.errors import ModelNotFoundError
from memstream.memory.embedder import Embedder, SentenceTransformerEmbedder, embed
from memstream.memory.gate import calibrate
from memstream.replay.events import Answer, Found
from memstream.replay.normalise import MASK, Line
from memstream.replay.templates import Template
from memstream.stores import fulltext, vectors
from memstream.stores import lines as db
from memstream.stores.sql import SqlStore
from memstream.stores.vectors import SpaceInfo

_log = logging.getLogger(__name__)
_LINES_SHOWN = 5
_EMBED_AT_ONCE = 64
_LEAST_OF_BEST = 0.5  # a group that fits less than half as well as the best one is not shown
_ASKING = {"happen", "happened", "happens", "happening", "occur", "occurred", "occurs"}  # in questions, not in lines


class LineMemory:
    """The lines of one store. Texts are embedded once per template, when somebody first asks.

    Args:
        store: where they are kept; closed by its owner.
        embedder: None takes the default one, if it is installed.
    """

    def __init__(self, store: SqlStore, embedder: Embedder | None = None) -> None:
        self._store = store
        self._embedder = embedder
        self._streams: dict[str, int] = {}
        self._stored_until: dict[str, int] = {}  # by stream: lines that an earlier run has stored already
        with store.read() as connection:
            self._before = db.last_line(connection)
        self._known: weakref.WeakKeyDictionary[Template, tuple[int, str]] = weakref.WeakKeyDictionary()

    def count_before(self, template: str) -> int:
        """How many lines of a template the store held when this replay began."""
        with self._store.read() as connection:
            return db.count_of_text(connection, template, self._before)

    def state(self) -> dict[str, Any]:
        """Plain data for ``restore``."""
        return {"streams": self._streams, "before": self._before}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on with the streams of an earlier run; lines that it had stored already are not stored again."""
        self._streams, self._before = dict(state["streams"]), state["before"]
        with self._store.read() as connection:
            self._stored_until = {
                name: db.last_number(connection, stream_id) for name, stream_id in self._streams.items()
            }

    def add(self, lines: Sequence[tuple[Line, Template | None]]) -> None:
        """Stores lines in one transaction, with their templates."""
        lines = [pair for pair in lines if pair[0].number > self._stored_until.get(pair[0].stream, 0)]
        streams = dict(self._streams)
        known: dict[Template, tuple[int, str]] = {}
        with self._store.write() as connection:
            for line, template in lines:
                if line.stream not in streams:
                    streams[line.stream] = db.add_stream(connection, line.stream)
                if template is not None and template not in known:
                    known[template] = self._write_template(connection, template)
            rows = [
                db.NewLine(
                    stream_id=streams[line.stream],
                    number=line.number,
                    offset=line.offset,
                    template_id=None if template is None else known[template][0],
                    time=line.time,
                    level=line.level,
                    text=line.text,
                )
                for line, template in lines
            ]
            db.add_lines(connection, rows)
        self._streams = streams  # only now is it certain that they are there
        self._known.update(known)

    def _write_template(self, connection: Connection, template: Template) -> tuple[int, str]:
        text = template.text
        before = self._known.get(template)
        if before is None:
            return db.ensure_template(connection, text), text
        if before[1] != text:
            db.change_template(connection, before[0], text)
        return before[0], text

    def search(self, question: str, *, limit: int = 5) -> Answer:
        """Finds the lines that fit a question, grouped by template, best first.

        Words that are part of templates rank them, together with the meaning of the question. Words that are not (a
        node, a user, a level) have to be in every line found.
        """
        similar = self._similar(question)
        gate = self._gate() if similar else 1.0
        terms = [term for term in fulltext.query_terms(question) if term not in _ASKING]
        with self._store.read() as connection:
            n_templates = max(1, db.count_templates(connection))
            of_templates = {term: holders for term in terms if (holders := db.templates_with(connection, term))}
            required, ignored = _required(connection, [term for term in terms if term not in of_templates])
            counts = db.count_by_template(connection, required)
            weights = {term: math.log(1 + n_templates / len(holders)) for term, holders in of_templates.items()}
            scores: dict[int, float] = dict.fromkeys(counts, 0.0) if required else {}
            for term, holders in of_templates.items():
                for template_id in holders:
                    scores[template_id] = scores.get(template_id, 0.0) + weights[term] / sum(weights.values())
            for template_id, cosine in similar.items():
                if template_id in scores or cosine >= gate:
                    scores[template_id] = scores.get(template_id, 0.0) + max(0.0, cosine)
            ranked = sorted((-score, template_id) for template_id, score in scores.items() if template_id in counts)
            chosen = [(i, -score) for score, i in ranked[:limit] if score <= ranked[0][0] * _LEAST_OF_BEST]
            texts = db.template_texts(connection, [i for i, _ in chosen])
            found = tuple(_group(connection, i, texts[i], score, counts[i], required) for i, score in chosen)
            searched = db.count_lines(connection)
        return Answer(
            question=question, found=found, required=tuple(required), ignored=tuple(ignored), searched=searched
        )

    def _similar(self, question: str) -> dict[int, float]:
        """Cosine of the question with every template, by template id; none without an embedder."""
        embedder = self._find_embedder()
        if embedder is None:
            return {}
        space = self._space(embedder)
        while True:
            with self._store.read() as connection:
                waiting = db.templates_without_vector(connection, space, _EMBED_AT_ONCE)
            if not waiting:
                break
            matrix = embed(embedder, [_readable(text) for text in waiting.values()])
            with self._store.write() as connection:
                db.set_vectors(connection, space, list(waiting), matrix)
        with self._store.read() as connection:
            ids, matrix = db.template_vectors(connection, space)
        cosines = matrix @ embed(embedder, [question])[0] if ids else np.empty(0)
        return dict(zip(ids, cosines.tolist(), strict=True))

    def _space(self, embedder: Embedder) -> SpaceInfo:
        with self._store.read() as connection:
            space = vectors.find_space(connection)
        if space is None:
            with self._store.write() as connection:
                return vectors.ensure_space(connection, embedder.name, embedder.fingerprint, embedder.dimension)
        vectors.check_space(space, embedder.name, embedder.fingerprint, embedder.dimension)
        return space

    def _find_embedder(self) -> Embedder | None:
        if self._embedder is None:
            try:
                self._embedder = SentenceTransformerEmbedder()
            except ModelNotFoundError as error:
                _log.warning("searching by words only: %s", error)
        return self._embedder

    def _gate(self) -> float:
        """Least cosine that means something in this store's space; kept with it."""
        embedder = self._embedder
        assert embedder is not None
        with self._store.read() as connection:
            space = vectors.find_space(connection)
        assert space is not None
        if space.gate is not None:
            return space.gate
        gate = calibrate(embedder)
        with self._store.write() as connection:
            vectors.set_gate(connection, space.id, gate)
        return gate


def _readable(template: str) -> str:
    """A template as a sentence for the embedder."""
    return " ".join(template.replace(MASK, " ").split()) or template


def _required(connection: Connection, terms: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits words that no template holds into those that lines hold together, and the rest."""
    required: list[str] = []
    ignored: list[str] = []
    for term in terms:
        together = db.any_line_with(connection, [*required, term])
        (required if together else ignored).append(term)
    return required, ignored


def _group(
    connection: Connection, template_id: int, text: str, score: float, count: int, required: Sequence[str]
) -> Found:
    lines = db.lines_of(connection, template_id, required, _LINES_SHOWN)
    last = db.lines_of(connection, template_id, required, 1, newest=True)
    return Found(template=text, score=round(score, 3), count=count, first=lines[0], last=last[0], lines=tuple(lines))
