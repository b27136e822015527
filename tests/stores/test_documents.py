"""Documents: who recalls them, what a change changes, what is forgotten with them, and what cannot be read."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from memstream.config import RecallConfig
from memstream.errors import ConfigError, InputError
from memstream.memory import Document, Memory, Scope, SqlStore
from memstream.memory.outline import outline
from memstream.stores.fulltext import words
from tests.stores.conftest import MakeMemory
from tests.stores.test_memory_forget import count, files_with
from tests.stores.tiny import WORDS, TinyEmbedder, count_words, say, sentence

SHARED = Scope("n", knowledge=True)
USER = Scope("n", "u", "c")

HANDBOOK = """# Handbook

## Returns

Return within thirty days, amber.

## Hours

Open from ten, basil.
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a document of each kind, and files that are none."""
    made = tmp_path / "kb"
    (made / "more").mkdir(parents=True)
    (made / ".git").mkdir()
    (made / "handbook.md").write_text(HANDBOOK)
    (made / "more" / "plain.txt").write_text("cedar delta\r\n\r\nember", newline="")
    (made / "faq.jsonl").write_text(
        '{"id": "a1", "text": "fjord grove"}\n\n{"ask": "heron?", "answer": "ivory", "n": 3}\n'
    )
    (made / "logo.png").write_bytes(b"\x89PNG\0")
    (made / ".git" / "notes.md").write_text("hidden")
    return made


def found(memory: Memory, scope: Scope, query: str) -> list[str]:
    return [item.text for item in memory.search(scope, query) if query in item.text]


def test_a_folder_is_recalled_with_where_it_is_from(make_memory: MakeMemory, folder: Path, backend: str) -> None:
    memory, seen = make_memory(index=backend), list[str]()
    report = memory.add_documents(SHARED, folder, told=seen.append)
    memory.flush()
    assert seen == ["faq.jsonl#a1", "faq.jsonl#L3", "handbook.md", "plain.txt"]
    assert (len(report.added), report.changed, report.removed, report.n_passages_new) == (4, (), (), 5)
    (item,) = [item for item in memory.search(USER, "amber") if "amber" in item.text]
    assert (item.role, item.conversation, item.why.terms) == ("document", None, ("amber",))
    cited = item.citation
    assert cited is not None
    assert cited.path == str(folder / "handbook.md")
    assert HANDBOOK[cited.first : cited.last] == item.text == "Return within thirty days, amber."
    assert (cited.first_line, cited.last_line, cited.title) == (5, 5, "Handbook")
    assert str(cited) == "handbook.md, Handbook > Returns"
    assert item.note == "From handbook.md, Handbook > Returns: Return within thirty days, amber."
    assert memory.show(USER, cited.document).text == "Return within thirty days, amber.\n\nOpen from ten, basil."
    (item,) = [item for item in memory.search(USER, "ivory") if "ivory" in item.text]
    assert item.text == "ask: heron?\nanswer: ivory"
    assert (str(item.citation), item.citation and item.citation.first_line) == ("faq.jsonl#L3", 3)
    assert [(d.name, d.n_passages) for d in memory.documents(SHARED)] == [
        ("faq.jsonl#a1", 1), ("faq.jsonl#L3", 1), ("handbook.md", 2), ("plain.txt", 1),
    ]  # fmt: skip
    assert found(memory, USER, "hidden") == []
    memory.flush()
    assert memory.verify().problems == ()


def test_headings_are_searched_with_their_passages(make_memory: MakeMemory) -> None:
    memory = make_memory(embedder=None)
    memory.add_documents(SHARED, Document(name="h.md", text="# Amber\n\n## Basil\n\ncedar\n\n## Delta\n\nember"))
    assert {item.text for item in memory.search(USER, "basil")} == {"cedar"}
    assert {item.text for item in memory.search(USER, "amber")} == {"cedar", "ember"}


def test_a_recalled_passage_is_gated_and_packed_like_anything_else(make_memory: MakeMemory) -> None:
    memory = make_memory(max_notes=2)
    with memory.open_conversation(USER) as handle:
        said, _ = say(handle, "amber river")
    memory.add_documents(SHARED, Document(name="kb", text="amber maple"))
    memory.flush()

    def recall(question: str, budget: int = 50) -> list[str]:
        found = memory.recall(USER, [question], window_from=None, budget_tokens=budget, count_tokens=count_words)
        return [note.id for note in found.notes]

    assert recall("amber") == [f"turn:{said}", "passage:1"]
    assert "passage:1" not in recall("amber maple", budget=3)  # From kb: amber maple
    assert recall("amber maple", budget=4) == ["passage:1"]
    assert recall("zephyr") == []
    with memory.store.write() as connection:
        connection.exec_driver_sql("UPDATE documents SET updated = '2020-01-01 00:00:00'")
    assert recall("amber") == ["passage:1", f"turn:{said}"]  # in the order of time


def test_a_source_is_recalled_and_not_who_repeated_it(make_memory: MakeMemory) -> None:
    """A bot that answered from a passage ranks before it; what can be cited is what an answer needs."""
    memory = make_memory(max_notes=1)
    told = "Tents can be returned within thirty days."
    memory.add_documents(SHARED, Document(name="a.md", text=told))
    with memory.open_conversation(USER) as handle:
        for _ in range(3):
            say(handle, "Can tents be returned?", f"{told} Tents can be returned.")
    memory.flush()
    roles = [note.role for note in memory.search(USER, "Can tents be returned?")]
    assert roles.index("assistant") < roles.index("document")
    recall = memory.recall(
        USER, ["Can tents be returned?"], window_from=None, budget_tokens=99, count_tokens=count_words
    )
    assert [note.text for note in recall.notes] == [told]


def test_a_long_passage_gives_its_best_sentences_with_its_citation(make_memory: MakeMemory) -> None:
    memory = make_memory(gate=-1.0)
    filler = "basil cedar delta ember fjord grove heron ivory."
    memory.add_documents(SHARED, Document(name="kb", text=f"{filler} The amber key. {filler}"))
    memory.flush()
    (note,) = memory.recall(USER, ["amber"], window_from=None, budget_tokens=6, count_tokens=count_words).notes
    assert (note.text, note.note) == ("The amber key.", "From kb: The amber key.")
    assert note.citation is not None


owners = st.builds(Scope, st.sampled_from(["n", "m"]), st.sampled_from(["u", "v"])) | st.builds(
    Scope, st.sampled_from(["n", "m"]), knowledge=st.just(True)
)
askers = st.builds(
    Scope, st.sampled_from(["n", "m", "x"]), st.sampled_from([None, "u", "v", "n"]), st.sampled_from(["a", "b"])
)


@settings(max_examples=30, deadline=None)
@given(
    added=st.lists(st.tuples(owners, st.integers(0, 10**6)), min_size=1, max_size=12),
    said=st.lists(st.tuples(askers, st.integers(0, 10**6)), max_size=6),
    asking=askers,
    word=st.sampled_from(WORDS),
)
def test_no_scope_ever_reads_another(
    added: list[tuple[Scope, int]], said: list[tuple[Scope, int]], asking: Scope, word: str
) -> None:
    memory = Memory(SqlStore.open("memory"), TinyEmbedder(), RecallConfig(gate=-1.0, max_notes=64), index="exact")
    allowed = set()
    for number, (scope, seed) in enumerate(added):
        text = sentence(random.Random(seed))
        memory.add_documents(scope, Document(name=f"d{number}", text=text))
        if scope.namespace == asking.namespace and (scope.knowledge or scope.user == asking.user):
            allowed.add(text)
    for scope, seed in said:
        text = sentence(random.Random(seed), 5)
        with memory.open_conversation(scope) as handle:
            say(handle, text)
        if scope == asking or (asking.user is not None and scope.owner == asking.owner):
            allowed |= {text, "Noted."}
    memory.flush()
    texts = {item.text for item in memory.search(asking, word, limit=100)}
    assert texts <= allowed
    assert {text for text in allowed if words(word)[-1] in words(text)} <= texts
    recall = memory.recall(asking, [word], window_from=None, budget_tokens=10_000, count_tokens=count_words)
    assert {note.text for note in recall.notes} <= allowed
    memory.flush()
    assert memory.verify().problems == ()
    memory.close()


def test_whose_documents_can_be_added_read_and_forgotten(make_memory: MakeMemory) -> None:
    memory = make_memory()
    memory.add_documents(SHARED, Document(name="kb", text="amber"))
    memory.add_documents(USER, Document(name="mine", text="basil"))
    assert memory.show(USER, "document:1").text == memory.show(USER, "passage:1").text == "amber"
    assert memory.scope_of("document:1") == memory.scope_of("passage:1") == SHARED
    assert memory.scope_of("document:2") == Scope("n", "u")
    assert memory.scope_of("document:3") is None
    for scope in (USER, Scope("n", None, "c"), Scope("m", knowledge=True), Scope("n", "v")):
        for memory_id in ("document:1", "passage:1"):
            with pytest.raises(InputError, match=f"no {memory_id}"):
                memory.forget(scope, memory_id)  # read only for conversations
    for scope in (SHARED, Scope("n", "v"), Scope("n", None, "c"), Scope("m", "u")):
        with pytest.raises(InputError, match="no document:2"):
            memory.show(scope, "document:2")
    with pytest.raises(ConfigError, match="belong to a user"):
        memory.add_documents(Scope("n", None, "c"), Document(name="kb", text="amber"))
    with pytest.raises(ConfigError, match="knowledge"):
        Scope("n", "u", knowledge=True)
    with pytest.raises(ConfigError):
        memory.remember(SHARED, "amber")
    with pytest.raises(ConfigError):
        memory.open_conversation(SHARED)
    with pytest.raises(ConfigError):
        Scope("")  # the namespace of shared knowledge itself
    assert memory.list_users("n") == ["u"]


def test_what_did_not_change_stays_with_its_vector(make_memory: MakeMemory, folder: Path) -> None:
    embedder = TinyEmbedder()
    memory = make_memory(folder.parent / "a.db", embedder=embedder)
    memory.add_documents(SHARED, folder)
    memory.flush()
    n_texts, n_events = embedder.n_texts, count(memory, "SELECT max(sequence) FROM events")
    report = memory.add_documents(SHARED, str(folder))
    memory.flush()
    assert (report.added, report.changed, report.removed, report.n_unchanged) == ((), (), (), 4)
    assert (embedder.n_texts, count(memory, "SELECT max(sequence) FROM events")) == (n_texts, n_events)

    before = {item.text: item.id for item in memory.search(SHARED, "amber basil")}
    n_texts = embedder.n_texts
    (folder / "handbook.md").write_text("Welcome!\n\n" + HANDBOOK.replace("thirty", "sixty"))
    report = memory.add_documents(SHARED, folder / "handbook.md")
    memory.flush()
    assert (report.added, report.changed, report.n_passages_kept, report.n_passages_new) == ((), ("document:3",), 1, 2)
    assert embedder.n_texts == n_texts + 2
    after = {item.text: item for item in memory.search(SHARED, "amber basil")}
    kept = after["Open from ten, basil."]
    assert kept.id == before["Open from ten, basil."]
    assert (kept.citation and kept.citation.first_line) == 11  # two lines further down
    assert files_with(folder.parent, "thirty") == []
    memory.flush()
    assert memory.verify().problems == ()


def test_records_come_and_go_with_their_file(make_memory: MakeMemory, tmp_path: Path) -> None:
    memory, file = make_memory(), tmp_path / "faq.jsonl"
    file.write_text("".join(json.dumps({"id": i, "text": f"amber number{i}"}) + "\n" for i in range(200)))
    assert len(memory.add_documents(SHARED, file).added) == 200
    file.write_text("".join(json.dumps({"id": i, "text": f"amber number{i}"}) + "\n" for i in [300, *range(1, 200)]))
    report = memory.add_documents(SHARED, file)
    assert (len(report.added), report.changed, report.removed) == (1, (), ("document:1",))
    assert found(memory, USER, "number0") == []
    memory.flush()
    assert memory.verify().problems == ()


def test_sync_removes_what_is_gone_from_the_folder_and_nothing_else(make_memory: MakeMemory, folder: Path) -> None:
    memory = make_memory()
    beside = folder.parent / "kb-more.md"
    beside.write_text("lemon")
    (folder / "extra.rst").write_text("maple")  # given by name, though no folder is searched for it
    memory.add_documents(SHARED, [folder, beside, folder / "extra.rst", Document(name="text", text="noble")])
    memory.add_documents(USER, folder / "handbook.md")
    (folder / "handbook.md").unlink()
    beside.unlink()
    assert memory.add_documents(SHARED, folder).removed == ()
    report = memory.add_documents(SHARED, folder, sync=True)
    assert report.removed == ("document:3",)
    names = [document.name for document in memory.documents(SHARED)]
    assert names == ["faq.jsonl#a1", "faq.jsonl#L3", "plain.txt", "kb-more.md", "extra.rst", "text"]
    assert found(memory, USER, "amber") != []  # the user's own
    with pytest.raises(InputError, match="give a folder"):
        memory.add_documents(SHARED, folder / "faq.jsonl", sync=True)


BAD = {
    "latin.md": (b"caf\xe9", "not UTF-8 (byte 3 is 0xE9)"),
    "binary.txt": (b"PK\0\3", "not a text (it holds NUL bytes); convert it"),
    "broken.jsonl": (b'{"text": "amber"}\n{"text": \n', "line 2: not JSON"),
    "list.jsonl": (b'["amber"]', "line 1: a record must be an object"),
    "empty.jsonl": (b'{"id": 3, "text": " "}', "line 1: the record has no text"),
    "twice.jsonl": (b'{"id": 3, "text": "amber"}\n{"id": 3, "text": "basil"}', "line 2: the id of line 1 again"),
    "deep.jsonl": (b"[" * 100_000, "line 1: not JSON"),
    "broken.json": (b'{"a": ', "not JSON"),
    "deep.json": (b"[" * 100_000, "not JSON"),
    "empty.json": (b'{"a": [], "b": {"c": null}}', "no text"),
    "list.json": (b'[{"text": "amber"}, {"text": ""}]', "item 2: the record has no text"),
    "same.json": (b'[{"id": 1, "text": "amber"}, {"id": 1, "text": "basil"}]', "item 2: the id of item 1 again"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_told_and_nothing_of_it_is_stored(
    make_memory: MakeMemory, tmp_path: Path, name: str
) -> None:
    memory = make_memory()
    (tmp_path / name).write_bytes(BAD[name][0])
    with pytest.raises(InputError) as told:
        memory.add_documents(SHARED, tmp_path / name)
    assert str(tmp_path / name) in str(told.value)
    assert BAD[name][1] in str(told.value)
    assert memory.documents(SHARED) == []
    assert memory.verify().counts["passages"] == 0


def test_json_is_read_with_its_keys_as_headings(make_memory: MakeMemory, tmp_path: Path) -> None:
    memory = make_memory()
    policy = {"Returns": {"days": 30, "Steps": {"Kites": ["Ask for amber.", "# Take basil."], "Ropes": []}}}
    (tmp_path / "policy.json").write_text(json.dumps(policy))
    (tmp_path / "faq.json").write_text(
        json.dumps([{"id": "a1", "text": "cedar"}, {"ask": "delta?", "answer": "ember"}])
    )
    memory.add_documents(SHARED, tmp_path)
    memory.flush()
    assert [document.name for document in memory.documents(SHARED)] == ["faq.json#a1", "faq.json#2", "policy.json"]
    (item,) = [item for item in memory.search(USER, "amber") if "amber" in item.text]
    assert item.text == "- Ask for amber.\n- # Take basil."
    assert item.citation is not None
    assert item.citation.heading == "Returns > Steps > Kites"
    shown = outline(policy)
    assert shown[item.citation.first : item.citation.last] == item.text
    (item,) = [item for item in memory.search(USER, "days") if "days" in item.text]
    assert item.text == "days: 30"
    (item,) = [item for item in memory.search(USER, "ember") if "ember" in item.text]
    assert (str(item.citation), item.text) == ("faq.json#2", "ask: delta?\nanswer: ember")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=30,
)


def leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, inner in value.items() if leaves(inner) for text in (key, *leaves(inner))]
    if isinstance(value, list):
        return [text for inner in value for text in leaves(inner)]
    return [] if value is None else [value if isinstance(value, str) else json.dumps(value)]


@given(values)
def test_nothing_of_json_is_left_out(value: Any) -> None:
    told = outline(value)
    assert all(text in told for text in leaves(value))


def test_what_is_not_there_is_told(make_memory: MakeMemory, tmp_path: Path) -> None:
    memory = make_memory()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "kb").mkdir()
    for path, said in ((tmp_path / "gone.md", "there is no"), (tmp_path / "pipe", "neither a file nor a folder")):
        with pytest.raises(InputError, match=said):
            memory.add_documents(SHARED, path)
    with pytest.raises(InputError, match="nothing to read under"):
        memory.add_documents(SHARED, tmp_path / "kb")
    with pytest.raises(InputError, match="not int"):
        memory.add_documents(SHARED, [7])  # type: ignore[list-item]
    with pytest.raises(InputError, match="needs a name"):
        Document(name=" ", text="amber")


def test_after_a_bad_file_the_next_run_goes_on(make_memory: MakeMemory, folder: Path) -> None:
    memory = make_memory()
    (folder / "m.md").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"m\.md"):
        memory.add_documents(SHARED, folder)
    (folder / "m.md").write_text("maple")
    report = memory.add_documents(SHARED, folder)
    assert (len(report.added), report.n_unchanged) == (2, 3)


def test_a_forgotten_document_is_gone_from_every_file(tmp_path: Path, make_memory: MakeMemory, backend: str) -> None:
    memory = make_memory(tmp_path / "a.db", index=backend)
    text = "# Zanzibarium\n\n" + "\n\n".join(f"## Part {i}\n\nquixotolite number{i} amber" for i in range(12))
    memory.add_documents(SHARED, [Document(name="kb", text=text), Document(name="other", text="amber basil")])
    with memory.open_conversation(USER) as handle, memory.open_conversation(Scope("m", "u", "c")) as elsewhere:
        say(handle, "amber")
        for conversation in (handle, elsewhere):
            assert conversation.snapshot_path is not None
            conversation.snapshot_path.write_bytes(b"keys that have seen zanzibarium")
            conversation.record_snapshot("f", 1, conversation.n_forgotten())
        memory.flush()
        memory._index.checkpoint()
        before = handle.n_forgotten(), elsewhere.n_forgotten()
        receipt = memory.forget(SHARED, "document:1")
        assert (handle.n_forgotten(), elsewhere.n_forgotten()) == (before[0] + 1, before[1])
        assert receipt.verified
        assert (receipt.snapshots, receipt.echoes) == (1, ())
        assert receipt.removed == {
            "documents": 1, "passages": 12, "words": 12, "chunks": 12, "embeddings": 12, "derived": 0,
        }  # fmt: skip
        assert elsewhere.snapshot_path is not None
        elsewhere.snapshot_path.unlink()  # of another namespace: it was left
    assert files_with(tmp_path, "zanzibarium") == files_with(tmp_path, "quixotolit") == []
    assert [document.name for document in memory.documents(SHARED)] == ["other"]


def test_a_passage_is_forgotten_alone_and_echoes_are_listed(make_memory: MakeMemory) -> None:
    memory = make_memory()
    memory.add_documents(USER, Document(name="mine", text="# A\n\namber basil cedar delta\n\n# B\n\nember fjord"))
    with memory.open_conversation(USER) as handle:
        said, _ = say(handle, "It says: amber basil cedar delta")
    receipt = memory.forget(USER, "passage:1")
    assert (receipt.verified, receipt.echoes) == (True, (f"turn:{said}",))
    assert memory.show(USER, "document:1").text == "ember fjord"
    memory.forget(USER, "document:1")
    assert memory.documents(USER) == []
    memory.flush()
    assert memory.verify().problems == ()


def test_a_removed_passage_leaves_no_snapshot(tmp_path: Path, make_memory: MakeMemory) -> None:
    memory = make_memory(tmp_path / "a.db")
    memory.add_documents(SHARED, Document(name="kb", text="# A\n\namber\n\n# B\n\nbasil"))
    with memory.open_conversation(USER) as handle:
        say(handle, "cedar")
        assert handle.snapshot_path is not None
        handle.snapshot_path.write_bytes(b"keys")
        handle.record_snapshot("f", 1, handle.n_forgotten())
        before = handle.n_forgotten()
        memory.add_documents(SHARED, Document(name="kb", text="# A\n\namber\n\n# B\n\nbasil\n\n# C\n\ndelta"))
        assert handle.find_snapshot("f", 1) is not None  # nothing that it may have seen is gone
        memory.add_documents(SHARED, Document(name="kb", text="# A\n\namber"))
        assert handle.find_snapshot("f", 1) is None
        assert handle.n_forgotten() > before


def test_what_was_said_is_embedded_before_documents(make_memory: MakeMemory) -> None:
    import threading

    go, order = threading.Event(), list[str]()

    class Slow(TinyEmbedder):
        def embed(self, texts: list[str]):  # type: ignore[no-untyped-def]
            assert go.wait(10)
            order.extend(texts)
            return super().embed(texts)

    memory = make_memory(embedder=Slow())
    memory.add_documents(SHARED, [Document(name=f"d{i}", text=f"amber number{i}") for i in range(200)])
    with memory.open_conversation(USER) as handle:
        say(handle, "basil")
    go.set()
    memory.flush()
    assert order.index("basil") < 3 + 64  # at most what was being embedded already comes first
    assert len([text for text in order if text.startswith("amber")]) == 200


def test_a_recall_where_there_are_no_documents_asks_nothing_more(make_memory: MakeMemory) -> None:
    """One search of two words: statements counted by hand from ``Retriever.rank`` and ``Memory.recall``."""
    memory = make_memory()
    with memory.open_conversation(USER) as handle:
        say(handle, "amber basil", "cedar")
    memory.flush()

    def statements() -> list[str]:
        seen: list[str] = []

        def note(_c: object, _cursor: object, statement: str, *_: object) -> None:
            if not statement.startswith("PRAGMA"):
                seen.append(statement)

        event.listen(memory.store._engine, "before_cursor_execute", note)
        memory.recall(USER, ["amber basil"], window_from=None, budget_tokens=50, count_tokens=count_words)
        event.remove(memory.store._engine, "before_cursor_execute", note)
        return seen

    memory.recall(USER, ["amber"], window_from=None, budget_tokens=50, count_tokens=count_words)  # calibrates the gate
    alone = statements()
    memory.add_documents(Scope("m", knowledge=True), Document(name="kb", text="amber basil"))
    memory.flush()
    statements()  # brings the index up to date
    assert statements() == alone
    assert not any("passage" in statement.replace("passage_id", "") for statement in alone)
    assert sum("documents" in statement for statement in alone) == 2  # whether there are any, with whose memory it is
    memory.add_documents(SHARED, Document(name="kb", text="amber basil"))
    memory.flush()
    assert len(statements()) > len(alone)
