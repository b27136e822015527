"""Another embedder for a store that is in use: the old vectors serve until the new ones are whole."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select

from memstream.errors import DimensionMismatchError
from memstream.memory import Memory, Scope
from memstream.stores import schema as db
from memstream.stores import vectors
from tests.stores.conftest import MakeMemory, Place
from tests.stores.tiny import TinyEmbedder, say

SCOPE = Scope("n", "u", "c")


class Interrupted(TinyEmbedder):
    """Stops in the middle, and calls something on the way."""

    def __init__(self, after: int, *, dimension: int = 24, name: str = "other") -> None:
        super().__init__(dimension, name)
        self.after = after

    def embed(self, texts: list[str]) -> vectors.Vectors:
        if self.n_texts >= self.after:
            raise KeyboardInterrupt
        return super().embed(texts)


def fill(memory: Memory, n: int = 45) -> None:
    with memory.open_conversation(SCOPE) as handle:
        for i in range(n):
            say(handle, f"amber number{i}", f"basil number{i}")
    memory.flush()


def spaces(memory: Memory) -> dict[str, int]:
    """Vectors of chunks and turns by the dimension of their space."""
    with memory.store.read() as connection:
        found = {}
        for space_id, dimension in connection.execute(select(db.Space.id, db.Space.dimension)).all():
            chunks = select(func.count()).select_from(db.Embedding).where(db.Embedding.space_id == space_id)
            turns = select(func.count()).select_from(db.TurnEmbedding).where(db.TurnEmbedding.space_id == space_id)
            found[str(dimension)] = (connection.scalar(chunks) or 0) + (connection.scalar(turns) or 0)
        return found


N_VECTORS = 45 + 90  # a window ends with each exchange; and each turn


def test_everything_gets_new_vectors(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    fill(memory)
    before = [hit.id for hit in memory.search(SCOPE, "number7 amber")]
    seen: list[tuple[int, int]] = []
    other = TinyEmbedder(24, "other")
    done = memory.reindex(other, lambda n_done, n_all: seen.append((n_done, n_all)))
    assert (done.name, done.made, done.dropped) == ("other", N_VECTORS, N_VECTORS)
    assert seen[-1] == (N_VECTORS, N_VECTORS)
    assert spaces(memory) == {"24": N_VECTORS}
    assert memory.search(SCOPE, "number7 amber")[0].id == before[0]
    assert memory.search(SCOPE, "number7 amber")[0].why.dense is not None
    with memory.open_conversation(SCOPE) as handle:
        say(handle, "cedar", "delta")
    memory.flush()
    assert spaces(memory) == {"24": N_VECTORS + 3}
    assert memory.verify().problems == ()
    memory.close()
    again = make_memory(place, embedder=TinyEmbedder(24, "other"))
    assert again.search(SCOPE, "cedar")[0].text == "cedar"
    with pytest.raises(DimensionMismatchError, match="memstream memory reindex"):
        make_memory(place)
    assert again.reindex(TinyEmbedder(24, "other")).made == 0


def test_the_old_vectors_serve_and_what_is_said_meanwhile_gets_both(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    fill(memory)
    found: list[str] = []

    class Watching(TinyEmbedder):
        def embed(self, texts: list[str]) -> vectors.Vectors:
            if self.n_texts and not found and len(texts) > 1:
                found.append(memory.search(SCOPE, "number7 amber")[0].text)
                with memory.open_conversation(SCOPE) as handle:
                    say(handle, "ember meanwhile", "fjord")
                memory.flush()
                found.append(memory.search(SCOPE, "meanwhile")[0].text)
            return super().embed(texts)

    memory.reindex(Watching(24, "other"))
    assert found == ["amber number7", "ember meanwhile"]
    assert spaces(memory) == {"24": N_VECTORS + 3}
    assert memory.search(SCOPE, "meanwhile")[0].text == "ember meanwhile"
    assert memory.verify().problems == ()


def test_it_goes_on_where_it_was_interrupted(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    fill(memory)
    with pytest.raises(KeyboardInterrupt):
        memory.reindex(Interrupted(100))
    memory.close()
    old = make_memory(place)  # nothing has changed for those who search
    made = spaces(old)["24"]
    assert 0 < made < N_VECTORS
    assert old.search(SCOPE, "number7 amber")[0].text == "amber number7"
    assert old.verify().problems == ()
    done = old.reindex(TinyEmbedder(24, "other"))
    assert (done.made, done.dropped) == (N_VECTORS - made, N_VECTORS)
    assert spaces(old) == {"24": N_VECTORS}
    assert old.verify().problems == ()


def test_what_was_begun_with_a_third_embedder_is_given_up(make_memory: MakeMemory, place: Place) -> None:
    memory = make_memory(place)
    fill(memory)
    with pytest.raises(KeyboardInterrupt):
        memory.reindex(Interrupted(100))
    begun = spaces(memory)["24"]
    done = memory.reindex(TinyEmbedder(16, "third"))  # of the same dimension as the first
    assert (done.made, done.dropped) == (N_VECTORS, N_VECTORS + begun)
    assert spaces(memory) == {"16": N_VECTORS}
    assert memory.verify().problems == ()


def test_others_are_told_instead_of_searching_with_the_wrong_vectors(make_memory: MakeMemory, place: Place) -> None:
    memory, other = make_memory(place), make_memory(place)
    fill(memory)
    assert other.search(SCOPE, "number7")[0].text.endswith("number7")
    memory.reindex(TinyEmbedder(16, "other"))
    with pytest.raises(DimensionMismatchError, match="were made by other"):
        other.search(SCOPE, "number7")
    with other.open_conversation(SCOPE) as handle:
        say(handle, "cedar", "delta")
    with pytest.raises(DimensionMismatchError):
        other.flush()
    memory._indexer.wake()
    memory.flush()
    assert memory.verify().pending == 0  # it made the vectors of the other's turns
    assert memory.verify().problems == ()
