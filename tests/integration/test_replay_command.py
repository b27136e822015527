"""``--ask`` and ``memstream replay`` as a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memstream import cli
from memstream.errors import ConfigError, DimensionMismatchError
from memstream.replay import Replay
from tests.integration import tiny
from tests.integration.logs import CACHE, CONFIG, bgl, loaded, messages, write

# Asking


def test_asking_finds_what_a_plain_search_finds(tmp_path: Path) -> None:
    lines = [bgl(f"disk {i} ok", i) for i in range(300)]
    for i in (40, 41, 99, 250):
        lines[i] = bgl("data TLB error interrupt", i, level="FATAL")
    lines[120] = bgl("total of 3 ddr error(s) corrected", 120)
    path = write(tmp_path / "a.log", lines)
    with Replay(path, model=loaded(), cache=CACHE, config=CONFIG, store="temporary", embedder=tiny.WordEmbedder()) as r:
        list(r)
        answer = r.ask("when did a data TLB error happen?")
        on_node = r.ask("TLB errors on R01, please?")
        nothing = r.ask("xyzzy")
    best = answer.found[0]
    expected = [i + 1 for i, line in enumerate(lines) if "TLB" in line]
    assert (best.template, best.count) == ("data TLB error interrupt", len(expected))
    assert [line.line for line in best.lines] == expected
    log = path.read_bytes()
    assert [log[line.offset :].split(b"\n")[0].decode() for line in best.lines if line.offset is not None] == [
        lines[number - 1] for number in expected
    ]
    assert (best.first.line, best.last.line) == (expected[0], expected[-1])
    assert best.first.time is not None
    assert best.first.time.timestamp() == pytest.approx(1117838570 + 40 + 0.675872)
    assert (answer.searched, answer.ignored) == (300, ())
    assert on_node.required == ("r01",)
    assert on_node.ignored == ("please",) or "please" not in on_node.required
    assert [line.line for line in on_node.found[0].lines] == [i + 1 for i in (41,)]
    assert (nothing.found, nothing.ignored) == ((), ("xyzzy",))


def test_asking_by_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedder that knows one synonym finds what no word of the question names, and embeds each template once."""

    class Synonyms(tiny.WordEmbedder):
        n_texts = 0

        def embed(self, texts: list[str]) -> Any:
            Synonyms.n_texts += len(texts)
            return super().embed([text.replace("blaze", "fire") for text in texts])

    path = write(tmp_path / "a.log", [*[f"disk {i} ok" for i in range(60)], "fire", "disk 3 ok"])
    settings: dict[str, Any] = {"model": loaded(), "cache": CACHE, "config": CONFIG, "store": tmp_path / "s.db"}
    with Replay(path, embedder=Synonyms(), **settings) as running:
        list(running)
        answer = running.ask("blaze")
        assert [found.first.line for found in answer.found] == [61]
        before = Synonyms.n_texts
        running.ask("blaze")
        assert Synonyms.n_texts == before + 1  # the question
    with (
        Replay(path, embedder=tiny.WordEmbedder("another"), **settings) as running,
        pytest.raises(DimensionMismatchError),
    ):
        running.ask("blaze")


def test_asking_needs_a_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="store"):
        Replay(write(tmp_path / "a", ["x"]), model=loaded()).ask("x")


# The command


def test_the_command_reads_stdin_answers_and_asks_again_later(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [bgl(message, i) for i, message in enumerate(messages(120))]
    lines[70] = bgl("data TLB error interrupt", 70, level="FATAL")
    (tmp_path / "in").write_bytes("\r\n".join(lines).encode())
    before = lines[70].index("data TLB")
    ask = ["replay", "--store", str(tmp_path / "s.db"), "--ask", "when did a data TLB error happen?"]
    options = ["--json", "--burn-in", "20", "--window", "600", "--model", str(model_folder)]
    with (tmp_path / "in").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert cli.run([*ask, "-", *options]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [record["type"] for record in records]
    assert kinds == ["alert"] * (len(kinds) - 2) + ["summary", "answer"]
    assert 71 in [record["line"] for record in records if record["type"] == "alert"]
    assert (records[-2]["lines"], records[-2]["stored"]) == (120, 120)
    assert (records[-1]["found"][0]["count"], records[-1]["found"][0]["first"]["line"]) == (1, 71)
    assert cli.run([*ask, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == records[-1]
    assert cli.run(ask) == 0
    at_byte = (tmp_path / "in").read_bytes().index(b"data TLB") - before
    expected = f"1 x data TLB error interrupt\n    first -:71 byte {at_byte} 2005-06-03 22:44:00Z"
    assert capsys.readouterr().out.startswith(expected)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["."], 1, "is a folder"),
        (["missing"], 1, "No such file"),
        (["empty"], 1, "no line to read"),
        (["blank"], 1, "none of the 2 lines has a message"),
        (["--store", "none.db", "--ask", "x"], 1, "there is no store"),
        (["blank", "--threshold", "z"], 1, "ReplayConfig.threshold"),
        ([], 2, "name a FILE"),
        (["blank", "--colour"], 2, "No such option"),
    ],
)
def test_wrong_input_fails_with_one_sentence(
    arguments: list[str],
    status: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model does not exist either: what was typed wrong is told before it is looked for."""
    monkeypatch.chdir(tmp_path)
    write(Path("empty"), [])
    write(Path("blank"), ["", " "])
    assert cli.run(["replay", "--model", "no-such-model", *arguments]) == status
    told = capsys.readouterr()
    assert told.out == ""
    assert words in told.err


def test_ctrl_c_on_a_silent_pipe_prints_the_summary(model_folder: Path) -> None:
    data = "".join(line + "\n" for line in messages(120)).encode()
    options = ["--json", "--burn-in", "20", "--threshold", "q0.9", "--window", "600", "--model", str(model_folder)]
    process = subprocess.Popen(
        [sys.executable, "-c", "from memstream.cli import main; main()", "replay", "-", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(data)
        process.stdin.flush()
        first = json.loads(process.stdout.readline())  # comes although the pipe stays open
        process.send_signal(signal.SIGINT)
        rest = [json.loads(line) for line in process.stdout.read().splitlines()]
        errors = process.stderr.read()
        assert process.wait(60) == 130
    assert first["type"] == "alert"
    assert rest[-1]["type"] == "summary"
    assert rest[-1]["lines"] == 120
    parts = ("scored", "counted", "empty", "unfinished")
    assert sum(rest[-1][part] for part in parts) == 120
    assert b"Traceback" not in errors


# The real model
