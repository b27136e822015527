"""Evidence recall on LoCoMo: does what a question needs come back, and does nothing come back where nothing is known?

Ten pairs of people talk over months; each question names the turns that answer it. Every session is a conversation of
the pair's scope in one store, so other pairs' memories are there to be mixed up. Weights and limits of the retriever
were chosen on conversations 1 to 3; the figures without a suffix are those of 4 to 10.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common import Results, say

from memstream import RecallConfig
from memstream.memory import Memory, Scope, SentenceTransformerEmbedder, SqlStore
from memstream.stores.fulltext import query_terms, words

CATEGORIES = {1: "multi_hop", 2: "temporal", 3: "open_domain", 4: "single_hop"}
CHOSEN_ON = 3  # conversations the parameters were chosen on
_EVIDENCE = re.compile(r"D:?(\d+):(\d+)")  # nine of them are written "D8:6; D9:17", "D:11:26" or "D30:05"


@dataclass(frozen=True)
class Question:
    """A question, the turns that answer it, and its category."""

    text: str
    evidence: frozenset[str]
    category: int


@dataclass
class Pair:
    """Two people: their sessions as (time, [(id, text)]) and the questions about them."""

    sessions: list[tuple[datetime, list[tuple[str, str]]]] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)


def read(path: Path) -> list[Pair]:
    """The file's pairs. A turn is what was said and what a shared picture shows; ``query`` leaks and is not read."""
    return [_pair(item) for item in json.loads(path.read_text(encoding="utf-8"))]


def _pair(item: dict[str, Any]) -> Pair:
    talk, pair = item["conversation"], Pair()
    numbers = sorted(int(match[1]) for key in talk if (match := re.fullmatch(r"session_(\d+)", key)))
    for number in numbers:
        when = datetime.strptime(talk[f"session_{number}_date_time"], "%I:%M %p on %d %B, %Y").replace(tzinfo=UTC)
        said = []
        for turn in talk[f"session_{number}"]:
            shown = f" [shares {turn['blip_caption']}]" if turn.get("blip_caption") else ""
            said.append((turn["dia_id"], f"{turn['speaker']}: {turn['text']}{shown}"))
        pair.sessions.append((when, said))
    known = {number for _, said in pair.sessions for number, _ in said}
    for asked in item["qa"]:
        named = {f"D{int(a)}:{int(b)}" for text in asked.get("evidence", []) for a, b in _EVIDENCE.findall(text)}
        if asked["category"] in CATEGORIES and named & known:
            pair.questions.append(Question(asked["question"], frozenset(named & known), asked["category"]))
    return pair


class Told:
    """All pairs' sessions in one memory."""

    def __init__(self, pairs: Sequence[Pair], store: str = "memory", embedder: Any = None) -> None:
        self.memory = Memory(SqlStore.open(store), embedder or SentenceTransformerEmbedder(), RecallConfig())
        self.ids: dict[str, str] = {}  # of turns, "turn:17" to "0 D1:3"
        for number, pair in enumerate(pairs):
            for session, (when, said) in enumerate(pair.sessions):
                with self.memory.open_conversation(Scope("locomo", f"pair {number}", f"session {session}")) as handle:
                    for i, (turn, text) in enumerate(said):
                        turn_id = handle.begin_turn("assistant" if i % 2 else "user", text, len(text.split()), when)
                        if i % 2:
                            handle.finish_turn(turn_id, text, len(text.split()), "complete")
                        self.ids[f"turn:{turn_id}"] = f"{number} {turn}"
                if len(said) % 2:  # the last turn got no reply: its window is made when the conversation is opened
                    self.memory.open_conversation(Scope("locomo", f"pair {number}", f"session {session}")).close()
        say(f"embedding {len(self.ids)} turns and their windows")
        self.memory.flush()

    def windows(self, number: int, question: str, n: int) -> set[str]:
        """The turns of the n best windows for a question to a pair."""
        ranked = self.memory._rank(_scope(number), [question], None)
        return {self.ids[f"turn:{turn_id}"] for window in ranked.windows[:n] for turn_id in window.turn_ids}

    def recall(self, number: int, question: str, n_words: int, config: RecallConfig) -> set[str]:
        """The turns recalled for a question to a pair, within a number of words."""
        self.memory.config = config
        found = self.memory.recall(
            _scope(number),
            [question],
            window_from=None,
            budget_tokens=n_words,
            count_tokens=lambda text: len(text.split()),
        )
        return {self.ids[note.id] for note in found.notes}


def _scope(number: int) -> Scope:
    return Scope("locomo", f"pair {number}", "asking")


WHOLE_BUDGET = RecallConfig(max_notes=64, gate=-1.0)  # what is returned where the model has room for it all


def evidence(results: Results, path: Path) -> None:
    """Evidence recall at 10 windows and within words, the gate, and BM25 alone beside them."""
    pairs = read(path)
    say(f"{len(pairs)} pairs, {sum(len(pair.questions) for pair in pairs)} questions")
    told = Told(pairs)
    found: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        bm25 = Bm25([said for _, said in pair.sessions])
        for question in results.progress(pair.questions, f"pair {number + 1}"):
            needed = {f"{number} {turn}" for turn in question.evidence}
            alone = {f"{number} {turn}" for turn in bm25.windows(question.text, 10)}
            notes = told.recall(number, question.text, 600, RecallConfig())
            unrelated = told.recall((number + 1) % len(pairs), question.text, 600, RecallConfig())
            got = {
                "r_at_10": told.windows(number, question.text, 10),
                "within_600_words": told.recall(number, question.text, 600, WHOLE_BUDGET),
                "within_300_words": told.recall(number, question.text, 300, WHOLE_BUDGET),
                "as_configured": notes,
                "bm25_r_at_10": alone,
            }
            for name, turns in got.items():
                found[name].append((number, question.category, len(needed & turns) / len(needed)))
            found["injection_rate_answerable"].append((number, question.category, float(bool(notes))))
            found["injection_rate_unrelated"].append((number, question.category, float(bool(unrelated))))
    told.memory.close()
    for name, rows in found.items():
        case = "gate" if name.startswith("injection") else "evidence"
        by_category = {
            label: round(_mean([v for n, c, v in rows if c == category and n >= CHOSEN_ON]), 4)
            for category, label in CATEGORIES.items()
        }
        for suffix, low, high in (("", CHOSEN_ON, len(pairs)), ("_all", 0, len(pairs)), ("_chosen_on", 0, CHOSEN_ON)):
            values = [value for n, _, value in rows if low <= n < high]
            extra = {"by_category": by_category} if not suffix else {}
            results.add(case, f"{name}{suffix}", _mean(values), "share", n=len(values), **extra)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


class Bm25:
    """The floor: SQLite's own BM25 (k1 = 1.2, b = 0.75, Porter stems) alone over windows of 4 turns, stride 2."""

    def __init__(self, sessions: Sequence[Sequence[tuple[str, str]]]) -> None:
        self._turns: list[list[str]] = []
        self._windows = sqlite3.connect(":memory:")
        self._windows.execute("CREATE VIRTUAL TABLE windows USING fts5(text, tokenize = 'porter ascii')")
        for said in sessions:
            for start in range(0, max(1, len(said) - 2), 2):
                part = said[start : start + 4]
                text = " ".join(word for _, value in part for word in words(value))
                self._windows.execute("INSERT INTO windows (rowid, text) VALUES (?, ?)", (len(self._turns), text))
                self._turns.append([turn for turn, _ in part])

    def windows(self, question: str, n: int) -> set[str]:
        """The turns of the n best windows."""
        match = " OR ".join(f'"{term}"' for term in query_terms(question)) or '"-"'
        query = "SELECT rowid FROM windows WHERE windows MATCH ? ORDER BY bm25(windows) LIMIT ?"
        return {turn for (i,) in self._windows.execute(query, (match, n)) for turn in self._turns[i]}
