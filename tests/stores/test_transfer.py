"""Export and import: nothing lost, nothing twice, nothing half, whatever the file."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memstream.config import RecallConfig
from memstream.errors import ConversationBusyError, InputError
from memstream.memory import Memory, Part, Scope, SqlStore
from memstream.memory.portable import Checksum
from tests.stores.conftest import MakeMemory
from tests.stores.filled import MONDAY, ODD, fill, tables
from tests.stores.tiny import TinyEmbedder, say, sentence, summarise

ROOT = Path(__file__).resolve().parents[2]


def exported(memory: Memory, part: Part | None = None, *, vectors: bool = False) -> bytes:
    file = io.BytesIO()
    report = memory.export_to(file, part, vectors=vectors)
    assert report.n_bytes == len(file.getvalue())
    return file.getvalue()


def load(memory: Memory, data: bytes, **options: Any) -> Any:
    report = memory.import_from(io.BytesIO(data), **options)
    memory.flush()
    return report


def parsed(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.decode().split("\n")[:-1]]


def turns_of(data: bytes) -> list[dict[str, Any]]:
    return [line for line in parsed(data) if line["kind"] == "turn"]


def sealed(lines: list[dict[str, Any]]) -> bytes:
    """Lines as a file whose counts and checksum are right, but for what the lines themselves say."""
    *body, end = lines
    kinds = ["conversation", "turn", "window", "summary", "fact"]
    n = {kind: sum(line.get("kind") == kind for line in body) for kind in kinds}
    for kind in ("conversation", "turn", "fact"):
        if kind + "s" in body[0]:
            body[0][kind + "s"] = n[kind]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in body)
    checksum = Checksum()
    checksum.update(data)
    end = {**end, "checksum": str(checksum), "summaries": n["summary"]}
    end |= {kind + "s": n[kind] for kind in ("conversation", "turn", "window", "fact")}
    return data + json.dumps(end).encode() + b"\n"


@pytest.fixture
def source(tmp_path: Path, make_memory: MakeMemory) -> Memory:
    memory = make_memory(tmp_path / "source.db")
    fill(memory)
    return memory


@pytest.fixture(scope="module")
def data() -> Iterator[bytes]:
    """What the source exports, without vectors."""
    memory = Memory(SqlStore.open("memory"), None, RecallConfig())
    fill(memory)
    yield exported(memory)
    memory.close()


@pytest.mark.parametrize("with_vectors", [False, True])
def test_round_trip(tmp_path: Path, source: Memory, make_memory: MakeMemory, with_vectors: bool) -> None:
    data = exported(source, vectors=with_vectors)
    embedder = TinyEmbedder()
    copy = make_memory(tmp_path / "copy.db", embedder=embedder)
    report = load(copy, data)
    # fill: 4 + 4 exchanges' worth in monday minus the forgotten plus the cut one = 8, friday 15, visitor 3, other 2.
    assert (report.conversations, report.turns, report.facts, report.summaries) == (5, 28, 3, 1)
    assert (report.continued, report.unchanged, report.reembedded) == (0, 0, False)
    assert exported(copy, vectors=with_vectors) == data
    assert copy.verify().problems == ()
    assert copy.verify().pending == 0
    if with_vectors:
        assert embedder.n_texts == 0
        assert report.pending == 0
        assert exported(copy, vectors=False) == exported(source, vectors=False)
    else:
        assert report.vectors == 0
        assert embedder.n_texts > 28


def test_what_the_lines_say(data: bytes) -> None:
    lines = parsed(data)
    assert lines[0] == {
        "kind": "header", "format": "memstream export", "version": 1, "embedder": None,
        "conversations": 5, "turns": 28, "facts": 3,
    }  # fmt: skip
    assert [(line["kind"], line.get("name")) for line in lines if line["kind"] == "conversation"] == [
        ("conversation", name) for name in ("visitor", "monday", "friday", "monday", "empty")
    ]
    assert [line["text"] for line in lines if line["kind"] == "fact"] == [
        "Came from the fair", "Prefers e-mail", "Lives in Łódź",
    ]  # fmt: skip
    assert [line["pinned"] for line in lines if line["kind"] == "fact"] == [True, True, False]
    at = [line.get("name") for line in lines].index("monday")
    turns = lines[at + 1 : at + 1 + lines[at]["turns"]]
    assert [(t["sequence"], t["role"], t["text"], t["state"], t["superseded"]) for t in turns] == [
        (0, "user", "My order number is 48213.", "complete", False),
        (1, "assistant", "Noted: 48213.", "complete", False),
        (2, "user", "amber basil cedar", "complete", False),
        (3, "assistant", "delta", "complete", True),
        (5, "assistant", "ember", "complete", False),
        (6, "user", ODD, "complete", False),
        (7, "assistant", "", "complete", False),
        (8, "assistant", "half a", "cut", False),
    ]
    summary = lines[at + 1 + len(turns)]
    assert summary == {
        "kind": "summary", "sources": [0, 1], "text": "My order number is 48213. Noted: 48213.",
    }  # fmt: skip
    assert "1999-12-31T23:59:59+00:00" in {line.get("created") for line in lines}
    assert {k: v for k, v in lines[-1].items() if k != "checksum"} == {
        "kind": "end", "conversations": 5, "turns": 28, "windows": 0, "summaries": 1, "facts": 3,
    }  # fmt: skip
    assert "zanzibarium" not in str(lines)
    assert b'"id"' not in data


def test_vectors_are_those_of_the_embedder(source: Memory) -> None:
    import numpy as np

    lines = parsed(exported(source, vectors=True))
    tiny = TinyEmbedder()
    assert lines[0]["embedder"] == {"name": "tiny", "fingerprint": tiny.fingerprint, "dimension": 16}
    turn = next(line for line in lines if line.get("text") == "half a")
    held = np.frombuffer(base64.b64decode(turn["vector"]), dtype="<f2")
    np.testing.assert_array_equal(held, tiny.embed(["half a"])[0].astype("<f2"))
    superseded = next(line for line in lines if line.get("superseded"))
    assert "vector" not in superseded
    assert all("vector" in line for line in lines if line["kind"] in ("window", "summary", "fact"))


def test_a_part(source: Memory) -> None:
    def names(part: Part) -> list[str]:
        return [line.get("name", "") or line["text"] for line in parsed(exported(source, part)) if line["kind"] in
                ("conversation", "fact")]  # fmt: skip

    assert names(Part(namespace="other")) == ["monday", "empty"]
    assert names(Part(namespace="acme", user="c42")) == ["Prefers e-mail", "Lives in Łódź", "monday", "friday"]
    assert names(Part(namespace="acme", user="c42", conversation="friday")) == ["friday"]
    assert names(Part(namespace="acme", conversation="visitor")) == ["visitor", "Came from the fair"]
    assert names(Part(namespace="nobody")) == []
    for wrong in ({"user": "c42"}, {"conversation": "monday"}):
        with pytest.raises(InputError, match="namespace too"):
            Part(**wrong)


@pytest.mark.parametrize("with_vectors", [False, True])
def test_the_same_file_twice_changes_nothing(
    tmp_path: Path, source: Memory, make_memory: MakeMemory, with_vectors: bool
) -> None:
    data = exported(source, vectors=with_vectors)
    copy = make_memory(tmp_path / "copy.db")
    load(copy, data)
    copy._index.checkpoint()
    before = tables(tmp_path / "copy.db")
    report = load(copy, data)
    assert (report.conversations, report.continued, report.unchanged) == (0, 0, 5)
    assert (report.turns, report.facts, report.summaries, report.vectors) == (0, 0, 0, 0)
    assert tables(tmp_path / "copy.db") == before
    before = tables(tmp_path / "source.db")
    load(source, data)  # into the store it came from
    assert tables(tmp_path / "source.db") == before


def test_history_sent_again_is_continued_not_doubled(make_memory: MakeMemory) -> None:
    talk, copy = make_memory(), make_memory()
    scope = Scope("n", "u", "c")
    with talk.open_conversation(scope) as handle:
        said = say(handle, "amber", "basil")
        early = exported(talk)
        summarise(talk, handle, said, "amber basil")
        say(handle, "cedar", "delta")
    talk.flush()
    late = exported(talk, vectors=True)
    load(copy, early)
    report = load(copy, late)
    assert (report.conversations, report.continued, report.turns, report.summaries) == (0, 1, 2, 1)
    assert load(copy, early).unchanged == 1
    assert exported(copy) == exported(talk)
    assert copy.verify().problems == ()
    assert [hit.text for hit in copy.search(scope, "cedar", limit=1)] == ["cedar"]
    with copy.open_conversation(scope):
        assert load(copy, late).unchanged == 1
    talk_handle = talk.open_conversation(scope)
    say(talk_handle, "ember", "fjord")
    talk_handle.close()
    longer = exported(talk)
    with copy.open_conversation(scope), pytest.raises(ConversationBusyError):
        load(copy, longer)
    assert exported(copy) == exported(make_and_load(make_memory, late))


def make_and_load(make_memory: MakeMemory, data: bytes) -> Memory:
    memory = make_memory()
    load(memory, data)
    return memory


@pytest.mark.parametrize("what", ["text", "forgotten", "superseded", "more", "role"])
def test_other_turns_under_the_same_name_are_refused(tmp_path: Path, make_memory: MakeMemory, what: str) -> None:
    memory, scope = make_memory(), Scope("n", "u", "c")
    with memory.open_conversation(scope) as handle:
        say(handle, "amber", "basil")
        say(handle, "cedar", "delta")
    data = exported(memory)
    copy = make_memory(tmp_path / "copy.db")
    load(copy, data)
    if what == "forgotten":
        copy.forget(scope, "turn:2")
    elif what == "superseded":
        with copy.open_conversation(scope) as handle:
            handle.supersede([2])
    else:
        lines = parsed(data)
        turn = next(line for line in lines if line.get("sequence") == 1)
        if what == "more":
            lines.remove(turn)
            lines[1]["turns"] -= 1
        else:
            turn[what] = "user" if what == "role" else "other"
        data = sealed(lines)
    copy._index.checkpoint()
    before = tables(tmp_path / "copy.db")
    with pytest.raises(InputError, match=r"'c'.*other turns.*turn 1 .*--as"):
        copy.import_from(io.BytesIO(data))
    copy.flush()
    assert tables(tmp_path / "copy.db") == before
    report = load(copy, data, name="c again")
    assert report.conversations == 1
    assert load(copy, data, name="c again").unchanged == 1
    renamed = exported(copy, Part(namespace="n", user="u", conversation="c again"))
    assert turns_of(renamed) == turns_of(data)
    assert copy.verify().problems == ()


def test_another_name_needs_a_single_conversation(data: bytes, make_memory: MakeMemory) -> None:
    with pytest.raises(InputError, match="holds 5"):
        make_memory().import_from(io.BytesIO(data), name="x")


def test_vectors_of_another_embedder_are_made_again(source: Memory, make_memory: MakeMemory) -> None:
    other = TinyEmbedder(name="other")  # of the same dimension
    copy = make_memory(embedder=other)
    report = load(copy, exported(source, vectors=True))
    assert report.reembedded
    assert report.vectors == 0
    assert report.pending > 28
    assert copy.verify().problems == ()
    assert copy.verify().pending == 0
    assert exported(copy) == exported(source)
    header = parsed(exported(copy, vectors=True))[0]
    assert header["embedder"]["fingerprint"] == other.fingerprint


def test_a_new_store_without_an_embedder_takes_the_vectors_of_the_file(
    tmp_path: Path, source: Memory, make_memory: MakeMemory
) -> None:
    data = exported(source, vectors=True)
    copy = make_memory(tmp_path / "copy.db", embedder=None)
    assert load(copy, data).pending == 0
    assert exported(copy, vectors=True) == data
    copy.close()
    again = make_memory(tmp_path / "copy.db", embedder=TinyEmbedder())
    assert again.verify().problems == ()
    assert again.search(MONDAY, "order")[0].text == "My order number is 48213."


def test_truncated_anywhere_nothing_is_stored(source: Memory, make_memory: MakeMemory) -> None:
    data = exported(source, vectors=True)
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")][:-1]
    rng = random.Random(1)
    copy = make_memory()
    for cut in [*ends, *rng.sample(range(1, len(data)), 40), 0]:
        with pytest.raises(InputError, match=r"cut off|are missing|empty"):
            copy.import_from(io.BytesIO(data[:cut]))
    assert parsed(exported(copy))[0]["conversations"] == 0
    load(copy, data)
    assert exported(copy) == exported(source)


def test_any_changed_byte_is_found(data: bytes, make_memory: MakeMemory) -> None:
    rng, copy = random.Random(2), make_memory()
    for at in rng.sample(range(len(data)), 100):
        changed = bytes([*data[:at], data[at] ^ (1 << rng.randrange(7)), *data[at + 1 :]])
        with pytest.raises(InputError):
            copy.import_from(io.BytesIO(changed))
    assert parsed(exported(copy))[0]["conversations"] == 0


Change = Callable[[list[dict[str, Any]]], None]


def setting(kind: str, name: str, value: Any) -> Change:
    def change(lines: list[dict[str, Any]]) -> None:
        next(line for line in lines if line["kind"] == kind)[name] = value

    return change


def dropping(kind: str, name: str) -> Change:
    def change(lines: list[dict[str, Any]]) -> None:
        del next(line for line in lines if line["kind"] == kind)[name]

    return change


WRONG: list[tuple[Change, str]] = [
    (setting("header", "version", 2), "version 2; this memstream reads version 1"),
    (setting("header", "format", "mem0"), "not an export of memstream"),
    (setting("header", "embedder", {"name": "x"}), r"line 1 \(header\): the field 'embedder'"),
    (setting("turn", "text", 5), r"line 3 \(turn\): the field 'text' is wrong: it must be a text"),
    (setting("turn", "sequence", True), r"line 3 \(turn\): the field 'sequence'"),
    (setting("turn", "sequence", -1), r"line 3 \(turn\): the field 'sequence'"),
    (setting("turn", "n_tokens", 10**30), "the field 'n_tokens'"),
    (setting("turn", "created", "yesterday"), "the field 'created'"),
    (setting("turn", "created", "2026-03-01T12:00:00"), "must say its zone"),
    (setting("turn", "created", "0001-01-01T00:00:00+23:00"), "the field 'created'"),
    (setting("turn", "state", "open"), "'complete' or 'cut'"),
    (setting("turn", "superseded", 0), "the field 'superseded'"),
    (setting("turn", "vector", "AAAA"), "names no embedder"),
    (setting("turn", "vector", "%"), "base64"),
    (setting("turn", "surprise", 1), "unknown field 'surprise'"),
    (setting("turn", "kind", "trun"), "of no kind"),
    (dropping("turn", "role"), "the field 'role' is missing"),
    (setting("conversation", "name", ""), r"line 2 \(conversation\): Scope.conversation"),
    (setting("conversation", "user", 5), "the field 'user'"),
    (setting("conversation", "turns", 99), "turns of the conversation before it are missing"),
    (setting("conversation", "turns", 2), "belongs nowhere"),
    (setting("summary", "sources", []), "the field 'sources'"),
    (setting("summary", "sources", [1, 0]), "must ascend"),
    (setting("fact", "conversation", "monday"), "of another conversation"),
    (setting("fact", "text", " "), "without a text"),
    (lambda lines: lines.insert(1, dict(lines[0])), "second header"),
    (lambda lines: lines.insert(1, lines[2]), "belongs nowhere"),
    (lambda lines: lines.pop(0) and None, "its first line is no header"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_lines_are_refused(data: bytes, make_memory: MakeMemory, change: Change, message: str) -> None:
    lines = parsed(data)
    change(lines)
    copy = make_memory()
    with pytest.raises(InputError, match=message):
        copy.import_from(io.BytesIO(sealed(lines)))
    assert parsed(exported(copy))[0]["conversations"] == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not json\n", "line 1 is not JSON"),
        (b"[" * 100_000 + b"\n", "line 1 is not JSON"),
        (b'{"kind": "header", "version": ' + b"9" * 5000 + b"}\n", "line 1 is not JSON"),
        (b"[1]\n", "line 1 is not a JSON object"),
        (b"{}\n", "of no kind"),
        (b"\n", "line 1 is not JSON"),
        (b"\xef\xbb\xbf{}\n", "line 1 is not JSON.*BOM"),
        ("{}\n".encode("utf-16"), "line 1 is not UTF-8"),
        (b'{"kind": "caf\xe9"}\n', "line 1 is not UTF-8"),
        (b"\x1f\x8b\x08\x00\n", "line 1 is not UTF-8"),
        (b"\x00" * 10, "ends in the middle of line 1"),
        (b"", "empty"),
    ],
)
def test_what_is_no_export_is_refused(make_memory: MakeMemory, data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_memory().import_from(io.BytesIO(data))


def test_a_line_is_not_read_without_end(make_memory: MakeMemory) -> None:
    class Endless(io.RawIOBase):
        n_read = 0

        def readline(self, size: int | None = -1) -> bytes:
            assert size is not None
            assert size > 0
            self.n_read += size
            return b"x" * size

        def seek(self, *_: int) -> int:
            return 0

    file = Endless()
    with pytest.raises(InputError, match="line 1 is longer than 64 MiB"):
        make_memory().import_from(file)  # type: ignore[arg-type]
    assert file.n_read == (64 << 20) + 1


def test_lines_joined_from_two_exports_are_refused(data: bytes, make_memory: MakeMemory) -> None:
    with pytest.raises(InputError, match="something follows line"):
        make_memory().import_from(io.BytesIO(data + data))


KILLED = """
import os, signal, sys
from memstream.config import RecallConfig
from memstream.memory import Memory, SqlStore, importing
path, file, after = sys.argv[1], sys.argv[2], int(sys.argv[3])
decode, n = importing.decode, 0  # the second reading: the first one stores nothing


def dying(number, data):
    global n
    n += b'"kind":"turn"' in data
    if n == after:
        os.kill(os.getpid(), signal.SIGKILL)
    return decode(number, data)


importing.decode = dying
memory = Memory(SqlStore.open(path), None, RecallConfig())
with open(file, "rb") as opened:
    memory.import_from(opened)
"""


def test_killed_half_way_and_run_again(tmp_path: Path, source: Memory, make_memory: MakeMemory) -> None:
    data = exported(source)
    (tmp_path / "export.jsonl").write_bytes(data)
    path = tmp_path / "copy.db"
    whole = {}
    for after in (1, 5, 9, 12, 27):  # the conversations have 3, 8, 15, 2 turns and none
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(path), str(tmp_path / "export.jsonl"), str(after)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        memory = make_memory(path, embedder=None)
        lines = parsed(exported(memory))
        for at, line in enumerate(lines):
            if line["kind"] == "conversation":
                turns = lines[at + 1 : at + 1 + line["turns"]]
                assert line in parsed(data)
                assert all(turn["kind"] == "turn" for turn in turns)
        whole[after] = lines[0]["conversations"]
        assert memory.verify().problems == ()
        memory.close()
    assert whole == {1: 0, 5: 1, 9: 1, 12: 2, 27: 3}
    memory = make_memory(path, embedder=None)
    load(memory, data)
    assert exported(memory) == data


def test_the_order_does_not_depend_on_ids(make_memory: MakeMemory) -> None:
    rng = random.Random(3)
    memory = make_memory()
    for name in ("c", "a", "b"):
        with memory.open_conversation(Scope("n", "u", name)) as handle:
            say(handle, sentence(rng), sentence(rng))
    data = exported(memory)
    parts = [exported(memory, Part(namespace="n", user="u", conversation=name)) for name in ("b", "c", "a")]
    copy = make_memory()
    for part in parts:
        load(copy, part)
    assert exported(copy) == data


def long_talk(n_turns: int) -> bytes:
    """An export of one conversation of so many turns."""
    created = "2026-01-01T00:00:00+00:00"
    talk = {"kind": "conversation", "namespace": "n", "user": "u", "name": "c", "created": created, "turns": n_turns}
    turn = {"kind": "turn", "role": "user", "n_tokens": 1, "created": created, "state": "complete", "superseded": False}
    turns = [{**turn, "sequence": i, "text": f"amber number{i}"} for i in range(n_turns)]
    header = {"kind": "header", "format": "memstream export", "version": 1, "embedder": None}
    return sealed([{**header, "conversations": 1, "turns": 0, "facts": 0}, talk, *turns, {"kind": "end"}])


def test_five_times_as_many_turns_take_no_more_memory(tmp_path: Path) -> None:
    peaks = []
    for n_turns in (1000, 5000):
        memory = Memory(SqlStore.open(tmp_path / f"{n_turns}.db"), None, RecallConfig(enabled=False))
        source = tmp_path / f"{n_turns}.jsonl"
        source.write_bytes(long_talk(n_turns))
        with source.open("rb") as file, (tmp_path / "out.jsonl").open("wb") as target:
            tracemalloc.start()
            assert memory.import_from(file).turns == n_turns
            assert memory.export_to(target).turns == n_turns
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        memory.close()
    assert peaks[1] < 1.25 * peaks[0]


def test_export_beside_a_writing_process(tmp_path: Path, make_memory: MakeMemory) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.stores.writer", str(tmp_path / "a.db"), "6", "exact"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert writer.stdout is not None
    files = []
    try:
        assert writer.stdout.readline() == b"ready\n"
        reader = make_memory(tmp_path / "a.db", embedder=None, enabled=False)
        for _ in range(3):
            for _ in range(40):
                assert writer.stdout.readline()
            files.append(exported(reader, vectors=True))
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert len(set(files)) == 3
    for file in files:
        copy = make_memory()
        load(copy, file)
        assert copy.verify().problems == ()
        assert turns_of(exported(copy)) == [{k: v for k, v in t.items() if k != "vector"} for t in turns_of(file)]
