"""A store as plain dictionaries, and a world that does everything to both and compares what they say.

The model knows what was said and works out by brute force what must be found. A step is a name and a seed: what it
picks depends on nothing else but the state, so any subset of a history is a history, and shrinks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from memstream.config import RecallConfig
from memstream.errors import InputError
from memstream.memory import ConversationHandle, Memory, Scope, SqlStore
from memstream.report import Recalled
from memstream.stores import rows
from memstream.stores import schema as db
from tests.stores.tiny import WORDS, TinyEmbedder, count_words

NAMESPACES, USERS, NAMES = ("n", "m"), ("u", "v", "w", "x", None), ("a", "b", "c", "d", "e")
SCOPES = [Scope(namespace, user, name) for namespace in NAMESPACES for user in USERS for name in NAMES]
MOST_LEXICAL = 96  # turns or facts with a word that one search looks at
MAX_NOTES = 64


@dataclass
class Turn:
    id: int
    sequence: int
    role: str
    text: str
    state: str
    superseded: bool = False

    @property
    def live(self) -> bool:
        return not self.superseded and self.state != "open"


def joined(turns: Sequence[Any]) -> str:
    """A summary that leaves nothing out."""
    return " ".join(turn.text for turn in turns if turn.text)


@dataclass
class Key:
    """A window or summary of a conversation."""

    kind: str
    first: int
    last: int
    text: str
    sources: tuple[int, ...] = ()


@dataclass
class Talk:
    """A conversation."""

    scope: Scope
    turns: list[Turn] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    n_said: int = 0

    def finished(self, first: int = 0, last: int = 10**9) -> list[Turn]:
        return [turn for turn in self.turns if turn.live and first <= turn.sequence <= last]

    def append(self, turn_id: int, role: str, text: str, state: str) -> Turn:
        sequence = self.turns[-1].sequence + 1 if self.turns else 0
        self.turns.append(Turn(turn_id, sequence, role, text, state))
        return self.turns[-1]

    def cover(self) -> None:
        """Windows over what no window reaches yet, with the two turns before it."""
        reached = max((key.last for key in self.keys if key.kind == "window"), default=-1)
        fresh = self.finished(reached + 1)
        if fresh:
            self._windows(self.finished(last=fresh[0].sequence - 1)[-2:] + fresh)

    def _windows(self, turns: list[Turn]) -> None:
        for start in range(0, max(len(turns) - 2, 1), 2):
            part = turns[start : start + 4]
            key = Key("window", part[0].sequence, part[-1].sequence, "\n".join(turn.text for turn in part).strip())
            if key.text and key not in self.keys:
                self.keys.append(key)

    def uncover(self, gone: list[Turn]) -> None:
        """Takes away what was made from turns that are no longer live, and makes it again from the others."""
        lost = [key for key in self.keys if any(key.first <= turn.sequence <= key.last for turn in gone)]
        self.keys = [key for key in self.keys if key not in lost]
        spans: list[list[int]] = []
        for key in sorted((key for key in lost if key.kind == "window"), key=lambda key: (key.first, key.last)):
            if spans and key.first <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], key.last)
            else:
                spans.append([key.first, key.last])
        for first, last in spans:
            left = self.finished(first, last)
            if left:
                self._windows(left)
        for key in lost:
            self.summarise([i for i in key.sources if i not in [turn.id for turn in gone]])

    @staticmethod
    def _holds(key: Key, turns: list[Turn]) -> bool:
        return key.kind == "summary" and key.first <= turns[0].sequence and turns[-1].sequence <= key.last

    def summarise(self, turn_ids: list[int]) -> None:
        turns = [turn for turn in self.finished() if turn.id in turn_ids]
        text = joined(turns)
        if text and not any(self._holds(key, turns) for key in self.keys):
            sources = tuple(turn.id for turn in turns)
            self.keys.append(Key("summary", turns[0].sequence, turns[-1].sequence, text, sources))


class Model:
    """Everything that is stored, by conversation and by owner."""

    def __init__(self) -> None:
        self.talks: dict[Scope, Talk] = {}
        self.facts: dict[int, tuple[Scope, str]] = {}  # a user's fact: the scope without its conversation
        self.last_ids = {"turn": 0, "fact": 0}

    def talk(self, scope: Scope) -> Talk:
        return self.talks.setdefault(scope, Talk(scope))

    def fresh_id(self, kind: str, number: int) -> int:
        assert number > self.last_ids[kind], "an id was used again"
        self.last_ids[kind] = number
        return number

    def seen_by(self, scope: Scope) -> list[Talk]:
        """The conversations whose memories a scope sees."""
        if scope.user is None:
            return [self.talks[scope]] if scope in self.talks else []
        owner = (scope.namespace, scope.user)
        return [talk for talk in self.talks.values() if (talk.scope.namespace, talk.scope.user) == owner]

    def facts_of(self, scope: Scope) -> dict[int, str]:
        return {i: text for i, (owner, text) in self.facts.items() if owner == fact_owner(scope)}

    def visible(self, scope: Scope, window_from: int = 10**9) -> dict[str, str]:
        """What may be recalled, by id."""
        found = {f"fact:{i}": text for i, text in self.facts_of(scope).items()}
        for talk in self.seen_by(scope):
            for turn in talk.finished(last=window_from - 1 if talk.scope == scope else 10**9):
                found[f"turn:{turn.id}"] = turn.text
        return found

    def key_texts(self, scope: Scope) -> list[str]:
        """The texts that are embedded for a scope."""
        return [key.text for talk in self.seen_by(scope) for key in talk.keys] + list(self.facts_of(scope).values())

    def echoes(self, scope: Scope, memory_id: str, text: str) -> set[str]:
        """Other memories that hold three fifths of a text's words, or all of one or two."""
        words = set(text.split())
        enough = len(words) if len(words) <= 2 else 0.6 * len(words)
        return {
            i
            for i, other in self.visible(scope).items()
            if words and i != memory_id and len(words & set(other.split())) >= enough
        }


def fact_owner(scope: Scope) -> Scope:
    return scope if scope.user is None else Scope(scope.namespace, scope.user)


class World:
    """A memory and its model."""

    def __init__(self, path: Path, backend: str) -> None:
        self.path, self.backend = path, backend
        self.model, self.embedder = Model(), TinyEmbedder()
        self.n_texts = 0
        self.n_operations = 0  # calls that change the store or look into it
        self.memory = self._open()
        self._vectors: dict[str, Any] = {}

    def _open(self) -> Memory:
        config = RecallConfig(gate=0.3, max_notes=MAX_NOTES)
        store = SqlStore.open(self.path)
        return Memory(store, self.embedder, config, index=self.backend, summarizer=joined)  # type: ignore[arg-type]

    def close(self) -> None:
        self.memory.close()

    def step(self, name: str, seed: int) -> None:
        """Takes one step; raises where store and model differ."""
        self.n_operations += 1
        STEPS[name][1](self, random.Random(seed))

    # --- what steps pick

    def text(self, rng: random.Random) -> str:
        """Random words, and one that no other text holds."""
        self.n_texts += 1
        words = [rng.choice(WORDS) for _ in range(rng.choice((0, 2, 5, 9)))]
        return " ".join([*words, f"k{self.n_texts}z"])

    def some_talk(self, rng: random.Random) -> Talk | None:
        talks = list(self.model.talks.values())
        return rng.choice(talks) if talks else None

    def open(self, scope: Scope) -> ConversationHandle:
        """Opens a conversation; what was left open in it is cut."""
        self.n_operations += 1
        handle = self.memory.open_conversation(scope)
        talk = self.model.talk(scope)
        for turn in talk.turns:
            if turn.state == "open":
                turn.state = "cut"
        talk.cover()
        return handle

    # --- steps that change something

    def say(self, rng: random.Random) -> None:
        scope = rng.choice(SCOPES)
        with self.open(scope) as handle:
            talk = self.model.talks[scope]
            for _ in range(rng.randint(1, 3)):
                asked = self._begin(handle, talk, "user", self.text(rng))
                assert asked.state == "complete"
                begun = rng.choice(("", "", self.text(rng)))
                turn = self._begin(handle, talk, "assistant", begun)
                how = rng.choice(("complete", "complete", "cut", "open"))
                if how == "open":  # as a killed process leaves it
                    return
                turn.text, turn.state = rng.choice((self.text(rng), begun)), how
                handle.finish_turn(turn.id, turn.text, count_words(turn.text), how)  # type: ignore[arg-type]
                talk.cover()

    def _begin(self, handle: ConversationHandle, talk: Talk, role: str, text: str) -> Turn:
        self.n_operations += 1
        turn_id = self.model.fresh_id("turn", handle.begin_turn(role, text, count_words(text)))
        return talk.append(turn_id, role, text, "open" if role == "assistant" else "complete")

    def supersede(self, rng: random.Random) -> None:
        talk = self.some_talk(rng)
        if talk is None:
            return
        with self.open(talk.scope) as handle:
            chosen = rng.sample(talk.turns, min(len(talk.turns), rng.randint(1, 2)))
            handle.supersede([turn.id for turn in chosen])
            for turn in chosen:
                turn.superseded = True
            talk.uncover(sorted(chosen, key=lambda turn: turn.sequence))
        self.memory.flush()

    def evict(self, rng: random.Random) -> None:
        talk = self.some_talk(rng)
        if talk is None:
            return
        with self.open(talk.scope) as handle:
            start = rng.randrange(len(talk.turns) + 1)
            chosen = [turn.id for turn in talk.turns[start : start + 4]]
            handle.evicted(chosen)
            self.memory.flush()
            talk.summarise(chosen)

    def remember(self, rng: random.Random) -> None:
        scope, text = rng.choice(SCOPES), self.text(rng)
        number = int(self.memory.remember(scope, f"  {text}\n").removeprefix("fact:"))
        self.model.facts[self.model.fresh_id("fact", number)] = (fact_owner(scope), text)
        if scope.user is None:
            self.model.talk(scope)

    def forget_turn(self, rng: random.Random) -> None:
        talk = self.some_talk(rng)
        turns = [turn for turn in talk.turns if turn.state != "open"] if talk is not None else []
        if talk is None or not turns:
            return
        turn = rng.choice(turns)
        self._forget(talk.scope, f"turn:{turn.id}", turn.text)
        talk.turns.remove(turn)
        talk.uncover([turn])
        self.memory.flush()

    def forget_fact(self, rng: random.Random) -> None:
        if self.model.facts:
            number = rng.choice(list(self.model.facts))
            scope, text = self.model.facts.pop(number)
            self._forget(scope, f"fact:{number}", text)

    def _forget(self, scope: Scope, memory_id: str, text: str) -> None:
        strangers = [other for other in SCOPES if fact_owner(other) != fact_owner(scope)]
        for other in strangers[:: len(strangers) // 3]:
            if (other.namespace, other.user) != (scope.namespace, scope.user) or scope.user is None:
                with pytest.raises(InputError):
                    self.memory.forget(other, memory_id)
        echoes = self.model.echoes(scope, memory_id, text)
        receipt = self.memory.forget(scope, memory_id)
        assert receipt.verified
        assert set(receipt.echoes) == echoes
        with pytest.raises(InputError):
            self.memory.show(scope, memory_id)
        unique = text.split()[-1].encode() if text else b"zanzibarium"
        for file in self.path.parent.rglob("*"):
            assert file.is_dir() or unique not in file.read_bytes(), file

    def rename(self, rng: random.Random) -> None:
        talk, name = self.some_talk(rng), rng.choice(NAMES)
        if talk is None:
            return
        scope = Scope(talk.scope.namespace, talk.scope.user, name)
        if scope in self.model.talks:
            with pytest.raises(InputError, match="already"):
                self.memory.rename_conversation(talk.scope, name)
            return
        self.memory.rename_conversation(talk.scope, name)
        self.model.talks = {scope if s == talk.scope else s: t for s, t in self.model.talks.items()}
        self.model.facts = {
            i: (scope if owner == talk.scope else owner, text) for i, (owner, text) in self.model.facts.items()
        }
        talk.scope = scope

    def delete(self, rng: random.Random) -> None:
        talk = self.some_talk(rng)
        if talk is None:
            return
        self.memory.delete_conversation(talk.scope)
        assert not self.memory.store.owes_purge
        del self.model.talks[talk.scope]
        self.model.facts = {i: fact for i, fact in self.model.facts.items() if fact[0] != talk.scope}
        with pytest.raises(InputError, match="no conversation"):
            self.memory.delete_conversation(talk.scope)

    def reopen(self, rng: random.Random) -> None:
        self.memory.close()
        if rng.random() < 0.2:
            Path(f"{self.path}-index").unlink()
        self.memory = self._open()
        self.memory.flush()
        report = self.memory.verify()
        assert report.problems == ()
        assert report.pending == 0
        talks = self.model.talks.values()
        counts = (report.counts["turns"], report.counts["facts"])
        assert counts == (sum(len(talk.turns) for talk in talks), len(self.model.facts))
        assert self.memory._index.count() == report.counts["chunks"]

    # --- steps that look

    def search_words(self, rng: random.Random) -> None:
        scope, visible = self._looking(rng)
        word = rng.choice([*WORDS, *rng.choice(list(visible.values()) or ["amber"]).split()])
        found = {hit.id: hit for hit in self.memory.search(scope, word, limit=10_000)}
        self._check(scope, found, visible)
        with_word = {i for i, text in visible.items() if word in text.split()}
        if sum(i.startswith("turn") for i in with_word) <= MOST_LEXICAL:
            assert with_word <= set(found)
            assert {i for i, hit in found.items() if hit.why.terms} == with_word

    def search_vectors(self, rng: random.Random) -> None:
        scope, _ = self._looking(rng)
        self.memory.flush()
        query = self.embedder.embed([" ".join(rng.choice(WORDS) for _ in range(3))])
        with self.memory.store.read() as connection:
            owner, conversation = rows.find_owner(connection, scope), rows.find_conversation(connection, scope)
        number = owner if scope.user is not None else None if conversation is None else -conversation
        if number is None:
            return
        self.memory._index.refresh()
        k = rng.choice((1, 10, 1000))
        ids = self.memory._index.search(query[0], number, k, [])
        texts = self.model.key_texts(scope)
        expected = np.sort(self._embedded(texts) @ query[0])[::-1][:k] if texts else np.empty(0)
        got = self.memory._index.cosines(query, ids)
        np.testing.assert_allclose([got[i][0] for i in ids], expected, atol=2e-3)  # SQL keeps float16
        with self.memory.store.read() as connection:
            for part in rows.batches(ids):
                found = connection.scalars(select(db.Chunk.text).where(db.Chunk.id.in_(part))).all()
                assert len(found) == len(part)
                assert set(found) <= set(texts)
        if k == 1000:
            assert len(ids) == len(texts)

    def _embedded(self, texts: list[str]) -> Any:
        fresh = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if fresh:
            self._vectors.update(zip(fresh, self.embedder.embed(fresh), strict=True))
        matrix = np.stack([self._vectors[text] for text in texts])
        if len(self._vectors) > 20_000:
            self._vectors = {}
        return matrix

    def recall(self, rng: random.Random) -> None:
        scope, _ = self._looking(rng)
        window_from = rng.choice((0, 3, 10, 10**9))
        visible = self.model.visible(scope, window_from)
        turns = [i for i in visible if i.startswith("turn") and visible[i]]
        meant = rng.choice(turns) if turns else None
        word = rng.choice(WORDS) if meant is None else visible[meant].split()[-1]
        budget = rng.choice((30, 10_000))
        told = self.memory.recall(
            scope, [word], window_from=window_from, budget_tokens=budget, count_tokens=count_words
        )
        assert told.n_considered == len(visible)
        self._check(scope, {note.id: note for note in told.notes}, visible)
        assert sum(count_words(note.text) for note in told.notes) <= budget
        pinned, room = [], budget // 3
        for number, text in sorted(self.model.facts_of(scope).items(), reverse=True):
            if count_words(text) <= room:
                pinned.append(f"fact:{number}")
                room -= count_words(text)
        assert [note.id for note in told.notes][: len(pinned)] == pinned
        if meant is not None and budget == 10_000:
            words = set(visible[meant].split())
            alike = [note for note in told.notes if same_words(words, set(note.text.split()))]
            assert alike, f"{meant} was meant and is missing"

    def list(self, rng: random.Random) -> None:
        scope, visible = self._looking(rng)
        for namespace in NAMESPACES:
            for user in USERS:
                infos = self.memory.list_conversations(Scope(namespace, user))
                mine = [
                    talk
                    for talk in self.model.talks.values()
                    if talk.scope == Scope(namespace, user, talk.scope.conversation)
                ]
                assert sorted((info.scope.conversation, info.n_turns) for info in infos) == sorted(
                    (talk.scope.conversation, len(talk.turns)) for talk in mine
                )
            owners = [talk.scope for talk in self.model.talks.values()] + [o for o, _ in self.model.facts.values()]
            users = {owner.user for owner in owners if owner.namespace == namespace and owner.user is not None}
            assert self.memory.list_users(namespace) == sorted(users)
        limit = rng.choice((5, 10_000))
        notes = self.memory.memories(scope, limit=limit)
        turns = sorted((i for i in visible if i.startswith("turn")), key=lambda i: int(i[5:]))
        facts = [f"fact:{number}" for number in sorted(self.model.facts_of(scope))]
        assert [note.id for note in notes] == facts + turns[len(turns) - min(limit, len(turns)) :]
        self._check(scope, {note.id: note for note in notes}, visible)
        for memory_id in rng.sample(list(visible), min(3, len(visible))):
            assert self.memory.show(scope, memory_id).text == visible[memory_id]
            found = self.memory.scope_of(memory_id)
            assert found is not None
            assert (found.namespace, found.user) == (scope.namespace, scope.user)
        talk = self.some_talk(rng)
        if talk is not None:
            with self.open(talk.scope) as handle:
                stored = handle.turns(live_only=False)
                assert [(t.id, t.sequence, t.role, t.text, t.state) for t in stored] == [
                    (t.id, t.sequence, t.role, t.text, t.state) for t in talk.turns
                ]
                assert [t.id for t in handle.turns()] == [t.id for t in talk.turns if not t.superseded]

    def _looking(self, rng: random.Random) -> tuple[Scope, dict[str, str]]:
        scope = rng.choice(SCOPES)
        return scope, self.model.visible(scope)

    def _check(self, scope: Scope, found: dict[str, Recalled], visible: dict[str, str]) -> None:
        """Nothing foreign, nothing deleted, and each text as it was said."""
        assert {i: hit.text for i, hit in found.items()} == {i: visible.get(i) for i in found}
        names = {talk.scope.conversation for talk in self.model.seen_by(scope)}
        assert {hit.conversation for hit in found.values()} <= names | {None}


def same_words(one: set[str], other: set[str]) -> bool:
    return len(one & other) >= 0.8 * min(len(one), len(other))


STEPS: dict[str, tuple[int, Callable[[World, random.Random], None]]] = {
    "say": (30, World.say),
    "supersede": (5, World.supersede),
    "evict": (5, World.evict),
    "remember": (6, World.remember),
    "forget turn": (6, World.forget_turn),
    "forget fact": (4, World.forget_fact),
    "rename": (3, World.rename),
    "delete": (3, World.delete),
    "reopen": (1, World.reopen),
    "search words": (12, World.search_words),
    "search vectors": (10, World.search_vectors),
    "recall": (10, World.recall),
    "list": (5, World.list),
}


def history(seed: int) -> Iterator[tuple[str, int]]:
    """Steps without end."""
    rng = random.Random(seed)
    names, weights = list(STEPS), [weight for weight, _ in STEPS.values()]
    while True:
        yield rng.choices(names, weights)[0], rng.getrandbits(32)
