"""Following files that other processes write, rotate and truncate, and going on after a kill."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memstream.errors import ReplayError
from memstream.replay import Note, Record, Replay, Summary
from memstream.replay.follow import FollowedFile, Position, StreamNote
from memstream.replay.reader import RawLine
from tests.integration import tiny
from tests.integration.log_writer import line as written_line
from tests.integration.logs import CACHE, CONFIG, loaded, messages, write

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@contextmanager
def writer(path: Path, n_lines: int, mode: str, *, gate: Path, pause_s: float = 0.01) -> Iterator[Callable[[], bool]]:
    """A writer beside the test; gives a function that is True once it has written everything."""
    path.touch()
    command = [sys.executable, str(HERE / "log_writer.py"), str(path), str(n_lines), mode, "1", str(pause_s), str(gate)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield lambda: process.poll() is not None
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def followed(path: Path, stop: Callable[[], bool], **settings: Any) -> tuple[list[RawLine], list[StreamNote]]:
    options: dict[str, Any] = {"max_line_bytes": 1000, "follow": True, "idle_s": 0.3, "stop": stop, **settings}
    found = [item for item in FollowedFile(str(path), **options).read() if item is not None]
    return [i for i in found if isinstance(i, RawLine)], [i for i in found if isinstance(i, StreamNote)]


@pytest.mark.parametrize("mode", ["append", "rename", "delete", "copytruncate"])
def test_every_line_is_read_once_while_it_is_written(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with writer(path, 2000, mode, gate=tmp_path) as stop:
        lines, notes = followed(path, stop)
    assert [line.data.decode() for line in lines] == [written_line(i) for i in range(2000)]
    assert [line.number for line in lines] == list(range(1, 2001))
    kinds = {"append": [], "copytruncate": ["stream.truncated"] * 4}.get(mode, ["stream.rotated"] * 4)
    assert [note.kind for note in notes] == kinds


def waiting(path: Path, do: Callable[[], object]) -> tuple[list[RawLine], list[StreamNote]]:
    """Follows a file, does something once its end was seen, and stops when all was quiet for a while."""
    quiet = iter([False] * 3)
    began = False

    def stop() -> bool:
        nonlocal began
        if next(quiet, True) and not began:
            began = True
            do()
            threading.Timer(0.6, lambda: ended.set()).start()
        return ended.is_set()

    ended = threading.Event()
    return followed(path, stop, idle_s=0.1)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_file_that_was_truncated_and_filled_beyond_is_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", ["old 1", "old 2"])
    lines, (note,) = waiting(path, lambda: path.write_text("new 1 and a long line\nnew 2\n"))
    assert [line.data for line in lines] == [b"old 1", b"old 2", b"new 1 and a long line", b"new 2"]
    assert (note.kind, "12 bytes" in note.text) == ("stream.truncated", True)


def test_two_rotations_at_once_lose_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", ["1"])

    def rotate_twice() -> None:
        for i in (2, 3):
            path.rename(tmp_path / f"a.log.{i}")
            write(path, [str(i)])
            os.utime(path, ns=(time.time_ns() + i * 10**9,) * 2)

    lines, notes = waiting(path, rotate_twice)
    assert [line.data for line in lines] == [b"1", b"2", b"3"]
    assert [note.kind for note in notes] == ["stream.rotated"] * 2


def test_a_line_without_its_end_is_taken_after_a_while_and_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"whole\nhalf")
    lines, _ = waiting(path, lambda: append(path, b" and half\nnext\n"))
    assert [(line.data, line.number, line.partial, line.rest) for line in lines] == [
        (b"whole", 1, False, False),
        (b"half", 2, True, False),
        (b" and half", 2, False, True),
        (b"next", 3, False, False),
    ]


def stopped_at(path: Path, n_lines: int) -> Position:
    """Where a reader stands after so many lines."""
    file = FollowedFile(str(path), max_line_bytes=1000, follow=False, idle_s=1)
    reading = file.read()
    for _ in range(n_lines):
        next(reading)
    position = file.position()
    reading.close()  # type: ignore[attr-defined]
    return position


@pytest.mark.parametrize("renamed", [False, True])
def test_a_new_run_goes_on_where_the_last_one_stopped(renamed: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", ["1", "2", "3"])
    position = stopped_at(path, 2)
    if renamed:
        path.rename(tmp_path / "a.log.1")
        write(path, ["4"])
    lines, notes = followed(path, lambda: True, start=position, follow=False)
    assert [(line.number, line.data) for line in lines] == [(3, b"3"), *([(4, b"4")] if renamed else [])]
    assert [note.kind for note in notes] == ["stream.rotated"] * renamed


def test_an_inode_that_was_reused_is_another_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", ["old 1", "old 2", "old 3"])
    position = stopped_at(path, 2)
    with path.open("r+b") as file:  # same device and inode, longer than before, another beginning
        file.write(b"new 1\nnew 2\nnew 3\nnew 4\n")
    lines, (note,) = followed(path, lambda: True, start=position, follow=False)
    assert [line.data for line in lines] == [b"new 1", b"new 2", b"new 3", b"new 4"]
    assert note.kind == "stream.lost"


# A whole replay


def run(path: Path, **settings: Any) -> tuple[list[Record], Summary, list[Note]]:
    records: list[Record] = []
    config = settings.pop("config", CONFIG)
    options: dict[str, Any] = {"model": loaded(), "cache": CACHE, "embedder": tiny.WordEmbedder(), **settings}
    with Replay(
        path, config=config, sinks=[lambda e: records.append(e) if isinstance(e, Record) else None], **options
    ) as replay:
        events = list(replay)
    assert isinstance(events[-1], Summary)
    return records, events[-1], [event for event in events if isinstance(event, Note)]


def test_a_replay_of_a_rotated_file_accounts_for_every_line(tmp_path: Path) -> None:
    path, gate = tmp_path / "a.log", tmp_path / "go"
    config = replace(CONFIG, follow=True, idle_s=0.3)
    with writer(path, 1500, "rename", gate=gate) as is_written:

        def stop() -> bool:  # asked when the file is open
            gate.touch()
            return is_written()

        records, summary, notes = run(path, config=config, store=tmp_path / "s.db", stop=stop)
    assert summary.lines == summary.stored == sum(record.lines for record in records) == 1500
    assert [record.line for record in records] == list(range(1, 1501))
    assert len(notes) == 3


def outcome(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What decisions came of: everything but the offset, which depends on how files were rotated."""
    return [(r["line"], r["lines"], r["template"], r["verdict"], r["incident"]) for r in records]


def test_a_resumed_replay_gives_what_one_run_gives(tmp_path: Path) -> None:
    lines = messages(900)
    whole, _, _ = run(write(tmp_path / "whole.log", lines), config=replace(CONFIG, score="all"))
    path, state, found = tmp_path / "a.log", tmp_path / "state", []
    for n in (300, 301, 650, 900):
        write(path, lines[:n])
        records, summary, _ = run(path, config=replace(CONFIG, score="all"), state=state, store=tmp_path / "s.db")
        found += records
        assert summary.lines == summary.stored == n
    assert [(r.line, r.template, r.verdict, r.incident, r.score) for r in found] == [
        (r.line, r.template, r.verdict, r.incident, r.score) for r in whole
    ]
    assert [r.surprise for r in found] == pytest.approx([r.surprise for r in whole], abs=1e-3)


def killed(tmp_path: Path, n_kills: int, n_lines: int) -> None:
    """Kills a replay again and again while a writer writes and rotates; compares with one run over all lines."""
    path, records, done = tmp_path / "a.log", tmp_path / "records.jsonl", tmp_path / "done"
    command: list[Any] = [sys.executable, str(HERE / "replay_process.py"), path, tmp_path / "state", records, done]
    chance, kills = random.Random(n_kills), 0
    gate, pause_s = tmp_path / "state" / "checkpoint.json", 8 * n_kills / n_lines
    with writer(path, n_lines, "rename", gate=gate, pause_s=pause_s) as is_written:
        while True:
            if kills >= n_kills and is_written():
                done.touch()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT)
            assert process.stdout is not None
            with process:
                assert process.stdout.readline() == b"ready\n"
                if kills < n_kills:
                    time.sleep(chance.random() * 0.8)
                    process.kill()
                    kills += 1
                    continue
                if not done.exists():
                    while not is_written():
                        assert process.poll() is None  # the writer waits for it
                        time.sleep(0.05)
                    done.touch()
                assert process.stdout.read() == b"finished\n"
                assert process.wait(120) == 0
            break
    found = [json.loads(text) for text in records.read_text().splitlines()]
    assert [record["line"] for record in found] == list(range(1, n_lines + 1))
    alone = tmp_path / "alone.log"
    write(alone, [written_line(i) for i in range(n_lines)])
    again: list[Any] = [
        sys.executable,
        str(HERE / "replay_process.py"),
        alone,
        tmp_path / "state2",
        tmp_path / "r2",
        done,
    ]
    subprocess.run(again, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT, timeout=120)
    expected = [json.loads(text) for text in (tmp_path / "r2").read_text().splitlines()]
    assert outcome(found) == outcome(expected)
    assert sum(record["verdict"] == "alert" for record in found) > 5


def test_killed_three_times(tmp_path: Path) -> None:
    killed(tmp_path, 3, 1200)


@pytest.mark.slow
def test_killed_a_hundred_times(tmp_path: Path) -> None:
    killed(tmp_path, 100, 6000)


def test_a_state_that_cannot_be_read_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    path, state = write(tmp_path / "a.log", messages(100)), tmp_path / "state"
    run(path, state=state)
    run(write(path, messages(150)), state=state)
    with pytest.raises(ReplayError, match=r"made with threshold 'q0.98', not 'q0.5'"):
        run(path, state=state, config=replace(CONFIG, threshold="q0.5"))
    checkpoint = state / "checkpoint.json"
    checkpoint.write_text(checkpoint.read_text()[:-10])
    with pytest.raises(ReplayError, match=r"cannot be read .* put checkpoint.previous.json in its place"):
        run(path, state=state)
    checkpoint.unlink()
    with pytest.raises(ReplayError, match="is missing"):
        run(path, state=state)
    (state / "checkpoint.previous.json").rename(checkpoint)
    assert run(path, state=state)[1].lines == 150
    for cache in state.glob("cache-*"):
        cache.write_bytes(b"x")
    with pytest.raises(ReplayError, match="does not hold the cache"):
        run(path, state=state)
