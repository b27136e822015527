"""The replay on a tiny random model, and once on the real SmolLM2."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from memstream import cli
from memstream.config import CacheConfig
from memstream.errors import ConfigError, ReplayError
from memstream.models import LoadedModel
from memstream.replay import Alert, Replay, Summary
from memstream.replay.config import ReplayConfig
from memstream.replay.scorer import Reading, Scorer
from tests.integration import tiny
from tests.integration.logs import CACHE, CONFIG, bgl, loaded, messages, replay, write

TOLERANCE = 1e-3  # nats per token, float32

# Scores


def scores_of(lines: Sequence[str], cache: CacheConfig = CACHE, **settings: Any) -> tuple[list[float | None], Scorer]:
    scorer = Scorer(loaded(), replace(CONFIG, **settings), cache)
    return list(scorer.score([Reading(line) for line in lines])), scorer


def test_a_score_is_the_stock_models_while_nothing_leaves() -> None:
    lines = messages(8)
    found, _ = scores_of(lines, replace(CACHE, window_tokens=1000, cache_tokens=None, max_pinned_tokens=None))
    tokenizer, model = tiny.tokenizer(), tiny.model()
    lines = [re.sub(r"\d+", "*", line) for line in lines]
    stars = [[char == "*" for char in line + "\n"] for line in lines]  # a token is a byte
    ids = [tokenizer(line + "\n", add_special_tokens=False)["input_ids"] for line in lines]
    with torch.no_grad():
        logits = model(torch.tensor([[token for line in ids for token in line]])).logits[0].log_softmax(-1)
    at = 0
    for line, star, score in zip(ids, stars, found, strict=True):
        expected = [-float(logits[at + j - 1, token]) for j, token in enumerate(line) if at + j > 0 and not star[j]]
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
    readings = [Reading(line) for line in lines]
    apart = list(scorer.score(readings[:2])) + [next(scorer.score([reading])) for reading in readings[2:]]
    assert apart == pytest.approx(at_once, abs=TOLERANCE)


def test_lines_leave_as_a_whole_and_the_first_ones_stay() -> None:
    lines = messages(60)
    _, scorer = scores_of(lines)
    row = scorer._row
    assert row is not None
    masked = [re.sub(r"\d+", "*", line) for line in lines]
    ids = [tiny.tokenizer()(line + "\n", add_special_tokens=False)["input_ids"] for line in masked]
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
        *records, summary = map(json.loads, capsys.readouterr().out.splitlines())
        for record in records:
            del record["offset"]  # the label's bytes are in the file
        with closing(sqlite3.connect(store)) as connection:
            stored = connection.execute("SELECT number, template_id, time, level, text FROM lines").fetchall()
            stored += connection.execute("SELECT id, text FROM templates").fetchall()
        told.append((alerts, records, {**summary, "seconds": None}, stored))
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
