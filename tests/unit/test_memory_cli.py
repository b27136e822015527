"""``memstream memory``: what is printed where, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from memstream.cli import run
from memstream.config import RecallConfig
from memstream.memory import Memory, Scope, SqlStore
from tests.stores.tiny import TinyEmbedder, say

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def store(home: Path) -> Path:
    """A store at the default place with a user's conversation and one without a user."""
    memory = Memory(SqlStore.open(home / "memstream.db"), None, RecallConfig())
    with memory.open_conversation(Scope("default", "c42", "monday")) as handle:
        say(handle, "My dentist is called Dr. Varga.", "So your dentist is called Dr. Varga.")
    with memory.open_conversation(Scope("default", None, "visitor")) as handle:
        say(handle, "我的订单号是 48213", "好")
    memory.remember(Scope("default", "c42"), "Prefers e-mail")
    memory.close()
    return home / "memstream.db"


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str) -> tuple[int, str, str]:
        status = run(["memory", *arguments])
        out, err = capfd.readouterr()
        return status, out, err

    return call


def test_list(store: Path, command: Command) -> None:
    status, out, err = command("list", "--user", "c42")
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["turn:1", "turn:2", "fact:1"]
    status, out, err = command("list")
    assert [line.split()[0] for line in out.splitlines()] == ["turn:3", "turn:4"]
    assert "users here: c42" in err
    status, out, err = command("list", "--user", "c42", "--limit", "1", "--json")
    assert [item["id"] for item in json.loads(out)] == ["fact:1"]
    status, out, err = command("list", "--user", "nobody")
    assert (status, out) == (0, "")
    assert "nothing is remembered" in err
    assert command("list", "--namespace", "other", "--json")[1] == "[]\n"


def test_search(store: Path, command: Command) -> None:
    status, out, err = command("search", "dentist", "--user", "c42")
    assert status == 0
    assert out.startswith("turn:1 ")
    assert "(dentist)" in out
    assert command("search", "订单号")[1].startswith("turn:3 ")
    status, out, err = command("search", "--user", "c42", "--json", "dentist")
    assert json.loads(out)[0]["why"]["terms"] == ["dentist"]
    status, out, err = command("search", '"NEAR( *', "--user", "c42")
    assert (status, out) == (0, "")
    assert "nothing found" in err


def test_show(store: Path, command: Command) -> None:
    status, out, _ = command("show", "turn:1", "--user", "c42")
    assert status == 0
    assert out.splitlines()[1] == "My dentist is called Dr. Varga."
    assert json.loads(command("show", "fact:1", "--user", "c42", "--json")[1])["text"] == "Prefers e-mail"
    assert command("show", "turn:3")[0] == 0
    for wrong in (["turn:1"], ["turn:3", "--user", "c42"], ["turn:1", "--user", "c43"], ["turn:99"], ["17"]):
        status, out, err = command("show", *wrong)
        assert (status, out) == (1, "")
        assert err.startswith("error: ")


def test_forget_asks_and_prints_the_receipt(store: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    status, out, err = command("forget", "turn:1", "--user", "c42")
    assert (status, out) == (1, "")
    assert "nothing was forgotten" in err
    assert command("show", "turn:1", "--user", "c42")[0] == 0
    status, out, err = command("forget", "turn:1", "--user", "c42", "--yes")
    assert status == 0
    assert "1 turns" in out
    assert "nothing left" in out
    assert "turn:2" in err
    status, out, _ = command("forget", "turn:2", "--user", "c42", "--yes", "--json")
    assert json.loads(out)["verified"] is True
    assert command("show", "turn:1", "--user", "c42")[0] == 1
    assert not any(b"Varga" in file.read_bytes() for file in store.parent.glob("memstream.db*") if file.is_file())


def test_verify(store: Path, command: Command) -> None:
    status, out, err = command("verify")
    assert (status, err) == (0, "")
    assert out.startswith("0 problems in 2 conversations, 4 turns, 1 facts")
    opened = SqlStore.open(store)
    with opened.write() as connection:
        connection.exec_driver_sql("DELETE FROM turn_words WHERE rowid = 1")
        connection.exec_driver_sql("INSERT INTO events (action, chunk_id) VALUES ('add', 77)")
    opened.close()
    status, out, _ = command("verify", "--json")
    assert status == 1
    assert json.loads(out)["problems"] == [
        "turn:1 has no full-text row",
        "a scope has another number of full-text rows than is noted",
        "the events tell of 1 vectors, the store holds 0",
    ]
    status, out, err = command("verify", "--repair")
    assert (status, err) == (0, "")
    assert out.splitlines()[:3] == [
        "repaired: turn:1 has no full-text row: wrote it",
        "repaired: a scope has another number of full-text rows than is noted: counted them",
        "repaired: the events tell of 1 vectors, the store holds 0: wrote the events that were missing",
    ]
    assert json.loads(command("verify", "--repair", "--json")[1])["done"] == []
    Path(f"{store}-snapshots").joinpath("notes.txt").write_text("not ours")
    status, out, err = command("verify", "--repair")
    assert status == 1
    assert "restore a backup" in err


def test_documents_are_added_listed_searched_shown_and_forgotten(
    command: Command, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstream.cli._stores.SentenceTransformerEmbedder", TinyEmbedder)
    folder = tmp_path / "kb"
    folder.mkdir()
    (folder / "desk.md").write_text("# Desk\n\n## Hours\n\nOpen from ten,\namber.\n\n## Returns\n\nbasil")
    status, out, err = command("add", str(folder))
    assert (status, err) == (0, "")
    assert out == "1 added, 0 changed, 0 removed, 0 unchanged; 2 new passages\n"
    assert (home / "memstream.db").stat().st_mode & 0o777 == 0o600
    assert command("add", str(folder))[1] == "0 added, 0 changed, 0 removed, 1 unchanged; 0 new passages\n"
    (folder / "mine.txt").write_text("cedar delta")
    assert json.loads(command("add", str(folder / "mine.txt"), "--user", "c42", "--json")[1])["added"] == ["document:2"]
    status, out, err = command("documents")
    assert out.split() == ["document:1", *out.split()[1:3], "2", "passages", str(folder / "desk.md"), "Desk"]
    assert [item["name"] for item in json.loads(command("documents", "--user", "c42", "--json")[1])] == ["mine.txt"]
    assert "no documents" in command("documents", "--namespace", "other")[2]
    assert [line.split()[0] for line in command("list")[1].splitlines()] == ["document:1"]
    status, out, _ = command("search", "amber")
    assert out.splitlines()[0].startswith("passage:1 ")
    assert out.splitlines()[1].strip() == "from desk.md, Desk > Hours, lines 5 to 6"
    status, out, _ = command("search", "cedar", "--user", "c42", "--json")
    assert (json.loads(out)[0]["id"], json.loads(out)[0]["citation"]["name"]) == ("passage:3", "mine.txt")
    assert json.loads(command("search", "cedar", "--json")[1]) == []
    status, out, _ = command("show", "passage:1")
    assert out.splitlines()[0].endswith("UTC, desk.md, Desk > Hours, lines 5 to 6")
    assert command("show", "document:1")[1].splitlines()[1:] == ["Open from ten,", "amber.", "", "basil"]
    assert command("show", "document:2")[0] == command("show", "document:1", "--namespace", "other")[0] == 1
    assert command("forget", "document:1", "--user", "c42", "--yes")[0] == 1  # not theirs
    status, out, _ = command("forget", "document:1", "--yes")
    assert status == 0
    assert "1 documents, 2 passages" in out
    assert command("verify")[0] == 0


def test_what_cannot_be_added_is_told(command: Command, tmp_path: Path) -> None:
    assert command("add")[0] == 2
    (tmp_path / "bad.jsonl").write_text('{"text": "amber"}\n{')
    (tmp_path / "latin.md").write_bytes(b"caf\xe9")
    for wrong, said in (
        ([tmp_path / "gone.md"], "there is no"),
        ([tmp_path / "bad.jsonl"], "line 2: not JSON"),
        ([tmp_path / "latin.md"], "not UTF-8"),
        ([tmp_path / "latin.md", "--sync"], "give a folder"),
        ([tmp_path / "bad.jsonl", "--namespace", ""], "Scope.namespace"),
        ([tmp_path / "bad.jsonl", "--store", tmp_path], "is a folder"),
    ):
        status, out, err = command("add", *map(str, wrong))
        assert (status, out) == (1, "")
        assert err.startswith("error: ")
        assert said in err
        assert err.count("\n") == 1


def test_usage_and_missing_stores(command: Command, tmp_path: Path, home: Path) -> None:
    assert command("list", "--limit", "0")[0] == 2
    assert command("search")[0] == 2
    status, out, err = command("list")
    assert (status, out) == (1, "")
    assert "there is no store at" in err
    assert not (home / "memstream.db").exists()
    assert command("verify", "--store", str(tmp_path))[0] == 1
    assert "cannot be reached" in command("list", "--store", "postgresql://127.0.0.1:1/d")[2]
