"""The replay on a tiny random model, and once on the real SmolLM2."""

from __future__ import annotations

import json
import math
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from memstream import cli
from memstream.config import CacheConfig, ReplayConfig
from memstream.errors import ConfigError, DimensionMismatchError, ReplayError
from memstream.models import LoadedModel
from memstream.replay import Alert, Event, Replay, Summary
from memstream.replay.scorer import Scorer
from tests.integration import tiny

TOLERANCE = 1e-3  # nats per token, float32
CACHE = CacheConfig(sink_tokens=4, memory_tokens=16, window_tokens=200, evict_tokens=16, memory_position="after_sinks")
CONFIG = ReplayConfig(burn_in_lines=20, max_line_tokens=32)


def loaded(seed: int = 0) -> LoadedModel:
    return LoadedModel(
        model=tiny.model(seed=seed), tokenizer=tiny.tokenizer(), name="tiny", fingerprint="tiny", source="code"
    )


def messages(n: int) -> list[str]:
    """Lines of four kinds, with a new kind now and then."""
    kinds = ["disk {} ok", "user u{} logged in", "cache miss at {}", "job {} done in 3 ms"]
    return [
        kinds[i % 4].format(i * 37 % 1000) if i % 50 != 49 else f"odd {'x' * (i // 50 + 1)} happened" for i in range(n)
    ]


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def bgl(message: str, i: int, *, label: str = "-", level: str = "INFO") -> str:
    node = f"R0{i % 4}-M1-N0-C:J12-U11"
    return f"{label} {1117838570 + i} 2005.06.03 {node} 2005-06-03-15.42.50.675872 {node} RAS KERNEL {level} {message}"


def replay(source: Any, config: ReplayConfig = CONFIG, **settings: Any) -> tuple[list[Alert], Summary]:
    """Runs a replay to its end; checks what holds for every run."""
    settings = {"model": loaded(), "cache": CACHE, "embedder": tiny.WordEmbedder(), **settings}
    with Replay(source, config=config, **settings) as running:
        events: list[Event] = list(running)
    *alerts, summary = events
    assert isinstance(summary, Summary)
    assert all(isinstance(alert, Alert) for alert in alerts)
    assert summary.lines == summary.scored + summary.counted + summary.empty
    assert summary.unfinished == 0
    assert summary.alerts == len(alerts)
    assert summary.cache_bytes_start == summary.cache_bytes_end
    return [alert for alert in alerts if isinstance(alert, Alert)], summary


# Scores


def scores_of(lines: Sequence[str], cache: CacheConfig = CACHE, **settings: Any) -> tuple[list[float | None], Scorer]:
    scorer = Scorer(loaded(), replace(CONFIG, **settings), cache)
    return list(scorer.score(lines)), scorer


def test_a_score_is_the_stock_models_while_nothing_leaves() -> None:
    lines = messages(8)
    found, _ = scores_of(lines, replace(CACHE, window_tokens=1000, cache_tokens=None, max_pinned_tokens=None))
    tokenizer, model = tiny.tokenizer(), tiny.model()
    ids = [tokenizer(line + "\n", add_special_tokens=False)["input_ids"] for line in lines]
    with torch.no_grad():
        logits = model(torch.tensor([[token for line in ids for token in line]])).logits[0].log_softmax(-1)
    at = 0
    for line, score in zip(ids, found, strict=True):
        expected = [-float(logits[at + j - 1, token]) for j, token in enumerate(line) if at + j > 0]
        assert score == pytest.approx(sum(expected) / len(expected), abs=TOLERANCE)
        at += len(line)


@pytest.mark.parametrize("sinks", [0, 3])
def test_a_score_does_not_depend_on_how_lines_are_grouped(sinks: int) -> None:
    lines = messages(100)
    one, scorer = scores_of(lines, sinks=sinks, piece_lines=1)
    assert scorer.n_evicted > 50
    for piece_lines in (7, 64):
        many, other = scores_of(lines, sinks=sinks, piece_lines=piece_lines)
        assert many == pytest.approx(one, abs=TOLERANCE)
        assert (other.n_evicted, other.n_tokens) == (scorer.n_evicted, scorer.n_tokens)


def test_calls_do_not_matter_either() -> None:
    lines = messages(80)
    at_once, _ = scores_of(lines)
    scorer = Scorer(loaded(), CONFIG, CACHE)
    apart = list(scorer.score(lines[:2])) + [next(scorer.score([line])) for line in lines[2:]]
    assert apart == pytest.approx(at_once, abs=TOLERANCE)


def test_lines_leave_as_a_whole_and_the_first_ones_stay() -> None:
    lines = messages(60)
    _, scorer = scores_of(lines)
    row = scorer._row
    assert row is not None
    ids = [tiny.tokenizer()(line + "\n", add_special_tokens=False)["input_ids"] for line in lines]
    assert row.sink_ids == ids[0] + ids[1]
    kept = len(row.layout.closed)
    assert list(row.window_ids) == [token for line in ids[-kept:] for token in line]
    assert [group.n_tokens for group in row.layout.closed] == [len(line) for line in ids[-kept:]]
    assert scorer.n_evicted == len(lines) - 2 - kept


def test_pinned_lines_change_later_scores() -> None:
    lines = messages(60)
    assert scores_of(lines, sinks=0)[0][-1] != pytest.approx(scores_of(lines, sinks=2)[0][-1], abs=TOLERANCE)


def test_a_long_line_is_scored_by_its_beginning() -> None:
    long = "x" * 30 + "y" * 100_000
    score, scorer = scores_of(["a", "b", long])
    assert scorer.n_tokens == 2 + 2 + CONFIG.max_line_tokens
    assert scores_of(["a", "b", long[:200]])[0] == pytest.approx(score, abs=TOLERANCE)


def test_text_that_spells_a_control_token_is_text() -> None:
    _, scorer = scores_of(["<|im_end|>"])
    assert scorer.n_tokens == len("<|im_end|>\n")


def test_what_cannot_be_pinned_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sinks is 111, but a cache of 220 tokens can pin 110"):
        Replay("-", config=ReplayConfig(sinks=111), cache=CACHE)
    with pytest.raises(ConfigError, match="after_sinks"):
        Replay("-", cache=CacheConfig())


def test_pinned_lines_are_cut_where_they_do_not_fit() -> None:
    _, scorer = scores_of(["x" * 100] * 9, sinks=8)
    assert scorer.n_tokens == 8 * (110 // 8) + CONFIG.max_line_tokens


# The whole way


@pytest.mark.parametrize("score", ["novel", "all"])
def test_every_line_is_accounted_for_and_stored(score: Any, tmp_path: Path) -> None:
    lines = [*[line for message in messages(300) for line in (message, "")][:599], "   ", "\x1b[0m", "last"]
    path = write(tmp_path / "a.log", lines)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    alerts, summary = replay(path, replace(CONFIG, score=score), store=tmp_path / "s.db")
    n_empty = sum(not line.replace("\x1b[0m", "").strip() for line in lines)
    assert (summary.lines, summary.empty) == (len(lines), n_empty)
    assert summary.scored == (len(lines) - n_empty if score == "all" else summary.templates)
    assert summary.cache_bytes_end == 2 * 2 * 2 * 8 * CACHE.total * 4  # keys and values, layers, heads, dim, slots
    assert {alert.mode for alert in alerts} <= {score}
    with closing(sqlite3.connect(tmp_path / "s.db")) as connection:
        stored = connection.execute("SELECT number, text FROM lines ORDER BY id").fetchall()
        n_templates = connection.execute("SELECT count(*) FROM templates").fetchone()[0]
    assert stored == [(i, line.replace("\x1b[0m", "")) for i, line in enumerate(lines, 1)]
    assert n_templates == summary.templates
    assert summary.stored == len(lines)


def test_several_files_and_what_is_wrong_with_their_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"one\xff\xfe\r\n" + b"z" * 200_000 + b"\n")
    second.write_bytes(b"\xef\xbb\xbfone\n\0\0\0")
    settings: dict[str, Any] = {"model": loaded(), "cache": CACHE, "config": CONFIG, "embedder": tiny.WordEmbedder()}
    with Replay([first, second], store="temporary", **settings) as running:
        (summary,) = running
        found = [running.ask(word).found[0].first for word in ("xff", "one")]
    assert isinstance(summary, Summary)
    assert (summary.lines, summary.truncated, summary.decode_errors) == (3, 1, 2)
    assert [(line.stream, line.line) for line in found] == [(str(first), 1), (str(second), 1)]


def test_an_alert_says_where_and_why(tmp_path: Path) -> None:
    lines = [bgl(f"disk {i} ok", i) for i in range(100)]
    lines[60:60] = [bgl("Kernel panic", 60, level="FATAL"), *[bgl(f"disk {i} ok", i) for i in range(3)]] * 3
    (alert,), summary = replay(write(tmp_path / "a.log", lines))
    assert (alert.line, alert.level, alert.message) == (61, "FATAL", "Kernel panic")
    assert alert.text == lines[60].removeprefix("- ")
    assert alert.score > alert.threshold
    (incident,) = summary.incidents
    assert (incident.line, incident.repeats) == (61, 2)


def test_labels_change_nothing(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, told = tmp_path / "x.log", []
    for labels in (["-"], ["KERNDTLB", "APPSEV", "-"]):
        write(path, [bgl(message, i, label=labels[i % len(labels)]) for i, message in enumerate(messages(200))])
        store = tmp_path / f"{len(labels)}.db"
        options = ["--model", str(model_folder), "--burn-in", "20", "--threshold", "q0.9", "--window", "600"]
        assert cli.run(["replay", str(path), *options, "--store", str(store)]) == 0
        alerts = capsys.readouterr().out
        assert cli.run(["replay", str(path), *options, "--json"]) == 0
        *records, summary = capsys.readouterr().out.splitlines()
        with closing(sqlite3.connect(store)) as connection:
            stored = connection.execute("SELECT * FROM lines").fetchall()
            stored += connection.execute("SELECT id, text FROM templates").fetchall()
        told.append((alerts, records, {**json.loads(summary), "seconds": None}, stored))
    assert told[0] == told[1]
    assert len(told[0][1]) > 2
    assert "APPSEV" not in str(told[1])


def test_memory_is_flat(tmp_path: Path) -> None:
    lines = messages(50_000)
    path = write(tmp_path / "a.log", lines)
    seen: dict[int, int] = {}
    process = psutil.Process()

    def note(running: Replay) -> None:
        seen[running.summary().lines] = process.memory_info().rss

    _, summary = replay(path, replace(CONFIG, max_templates=50), store=tmp_path / "s.db", on_progress=note)
    assert summary.lines == 50_000
    assert summary.templates <= 50
    early = min(rss for lines, rss in seen.items() if 2_000 <= lines <= 4_000)
    late = max(rss for lines, rss in seen.items() if lines > 45_000)
    assert late - early < 12 << 20


def test_a_replay_that_is_left_early_keeps_what_it_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", messages(3000))
    with Replay(path, model=loaded(), cache=CACHE, config=CONFIG, store=tmp_path / "s.db") as running:
        for event in running:
            assert isinstance(event, Alert)
            break
        del event
        with pytest.raises(ReplayError, match="once"):
            iter(running)
    summary = running.summary()
    assert 0 < summary.lines < 3000
    assert summary.stored == summary.lines == summary.scored + summary.counted + summary.empty + summary.unfinished


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


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def test_the_command_reads_stdin_answers_and_asks_again_later(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [bgl(message, i) for i, message in enumerate(messages(120))]
    lines[70] = bgl("data TLB error interrupt", 70, level="FATAL")
    (tmp_path / "in").write_bytes("\r\n".join(lines).encode())
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
    assert capsys.readouterr().out.startswith("1 x data TLB error interrupt\n    first -:71 2005-06-03 22:44:00Z")


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
        (["blank", "-f"], 2, "No such option"),
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
    options = ["--json", "--burn-in", "20", "--window", "600", "--model", str(model_folder)]
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


def test_smollm2_points_out_the_odd_line(smollm2: LoadedModel, tmp_path: Path) -> None:
    kinds = ["connected to node {}", "job {} finished", "heartbeat {} ok"]
    lines = [kinds[i % 3].format(i) for i in range(150)]
    lines[120] = "kernel panic: out of memory"
    config = ReplayConfig(score="all", burn_in_lines=100)
    cache = replace(CacheConfig.preset("logs"), window_tokens=512, cache_tokens=None, max_pinned_tokens=None)
    alerts, summary = replay(write(tmp_path / "a.log", lines), config, model=smollm2, cache=cache)
    assert alerts[0].line == 121
    assert alerts[0].score > 2 * alerts[0].threshold
    assert len(alerts) <= 3
    assert summary.evicted > 0
    assert summary.cache_bytes_end == 2 * 30 * 3 * 64 * cache.total * 4
    assert math.isfinite(alerts[0].score)
