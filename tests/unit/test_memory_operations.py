"""``memstream memory export|import|backup|restore|expire``: what is written where, and the exit status."""

from __future__ import annotations

import io
import json
import shlex
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memstream.cli import run
from memstream.cli.memory import command as command_group
from memstream.config import RecallConfig
from memstream.memory import Memory, Scope, SqlStore
from tests.stores.tiny import TinyEmbedder, say

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def store(home: Path) -> Path:
    """A store at the default place with a user's conversation, a fact, and a conversation without a user."""
    memory = Memory(SqlStore.open(home / "memstream.db"), TinyEmbedder(), RecallConfig())
    with memory.open_conversation(Scope("default", "c42", "monday")) as handle:
        say(handle, "My dentist is called Dr. Varga.", "Noted.")
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


def test_export_and_import(store: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, err = command("export")
    assert status == 0
    assert err.startswith("exported 2 conversations, 4 turns, 1 facts, 0 summaries")
    assert "我的订单号是 48213" in out
    assert json.loads(out.splitlines()[0])["embedder"] is None
    file = tmp_path / "all.jsonl"
    assert command("export", "--vectors", str(file))[:2] == (0, "")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    status, _, err = command("export", str(file))
    assert status == 1
    assert "--force" in err
    assert json.loads(file.read_bytes().splitlines()[0])["embedder"]["name"] == "tiny"

    copy = str(tmp_path / "copy.db")
    status, told, err = command("import", str(file), "--store", copy)
    assert (status, err) == (0, "")
    assert told.startswith("imported 2 conversations (0 more continued, 0 unchanged), 4 turns, 1 facts")
    assert command("export", "--store", copy)[1] == out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(out.encode())))
    status, told, _ = command("import", "-", "--store", copy, "--json")
    assert {key: n for key, n in json.loads(told).items() if n} == {"unchanged": 2}
    status, told, err = command("import", str(file), "--store", str(tmp_path / "third.db"), "--as", "x")
    assert (status, told) == (1, "")
    assert "holds 2" in err
    assert command("verify", "--store", copy)[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.endswith((".part", ".jsonl"))) == ["all.jsonl"]


def test_export_of_a_part_and_import_under_another_name(store: Path, command: Command, tmp_path: Path) -> None:
    def names(*arguments: str) -> list[str]:
        lines = [json.loads(line) for line in command("export", *arguments)[1].splitlines()]
        return [line.get("name", line.get("text")) for line in lines if line["kind"] in ("conversation", "fact")]

    assert names("--namespace", "default") == ["visitor", "Prefers e-mail", "monday"]
    assert names("--user", "c42") == ["Prefers e-mail", "monday"]
    assert names("--user", "c42", "--conversation", "monday") == ["monday"]
    assert names("--namespace", "other") == []
    file = str(tmp_path / "monday.jsonl")
    assert command("export", "--user", "c42", "--conversation", "monday", file)[0] == 0
    status, _, err = command("import", file, "--as", "monday again")
    assert status == 0
    assert "texts wait for their vector" in err
    assert names("--user", "c42") == ["Prefers e-mail", "monday", "monday again"]


def test_a_file_that_cannot_be_imported(store: Path, command: Command, tmp_path: Path) -> None:
    whole = command("export")[1]
    file = tmp_path / "cut.jsonl"
    file.write_text(whole[:-20])
    status, out, err = command("import", str(file), "--store", str(tmp_path / "copy.db"))
    assert (status, out) == (1, "")
    assert "cut off" in err
    status, _, err = command("import", str(tmp_path / "missing.jsonl"))
    assert status == 1
    assert "cannot read" in err
    status, _, err = command("export", str(tmp_path / "nowhere" / "a.jsonl"))
    assert status == 1
    assert "does not exist" in err


def test_backup_and_restore(store: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "b.db"
    status, out, err = command("backup", str(file))
    assert (status, out) == (0, "")
    assert f"{file.stat().st_size:,} bytes" in err
    status, _, err = command("backup", str(file))
    assert status == 1
    assert "--force" in err
    assert command("backup", str(file), "--force")[0] == 0
    held = command("export")[1]
    assert command("forget", "turn:1", "--user", "c42", "--yes")[0] == 0
    changed = command("export")[1]
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    status, _, err = command("restore", str(file))
    assert status == 1
    assert "nothing was changed" in err
    opened = SqlStore.open(store)
    status, _, err = command("restore", str(file), "--yes")
    assert status == 1
    assert "open in another process" in err
    opened.close()
    assert command("export")[1] == changed
    assert command("restore", str(file), "--yes")[0] == 0
    assert command("export")[1] == held
    assert command("verify")[0] == 0
    status, _, err = command("restore", str(tmp_path / "missing.db"), "--yes")
    assert status == 1
    assert "there is no store" in err


def test_expire(store: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SqlStore.open(store)
    with opened.write() as connection:
        connection.exec_driver_sql("UPDATE turns SET created = '2020-01-01 00:00:00.000000' WHERE id < 3")
        connection.exec_driver_sql("UPDATE facts SET created = '2020-01-01 00:00:00.000000'")
    opened.close()
    status, out, err = command("expire", "--older-than", "90d", "--dry-run")
    assert (status, err) == (0, "")
    assert out.startswith("2 turns and 0 facts from before 20")
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    status, out, err = command("expire", "--older-than", "90d")
    assert (status, out) == (1, "")
    assert "nothing was forgotten" in err
    assert command("expire", "--older-than", "90d", "--user", "nobody", "--yes")[1].startswith("forgot nothing")
    status, out, _ = command("expire", "--older-than", "8w", "--user", "c42", "--yes")
    assert status == 0
    assert out.startswith("forgot 2 turns")
    assert "nothing left" in out
    assert not any(b"Varga" in file.read_bytes() for file in store.parent.glob("memstream.db*") if file.is_file())
    status, out, _ = command("expire", "--older-than", "36h", "--pinned", "--yes", "--json")
    assert json.loads(out)["removed"]["pins"] == 1
    assert command("verify")[1].startswith("0 problems in 2 conversations, 2 turns, 0 facts")
    for wrong in ("90", "d", "1m", "-1d"):
        assert command("expire", "--older-than", wrong, "--yes")[0] == 2


def test_the_commands_of_the_docs_are_commands() -> None:
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("memstream memory ")]
    seen = set()
    for line in lines:
        name, *arguments = shlex.split(line.partition(" | ")[0], comments=True)[2:]
        found = command_group.commands[name]
        found.make_context(name, arguments).close()
        seen.add(name)
    assert seen == {"export", "import", "backup", "restore", "verify", "expire", "reindex", "migrate"}
