"""memstream chat and demo as processes, with a tiny model in a folder."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.terminal import RUN


def memstream(*arguments: Any, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *map(str, arguments)], capture_output=True, text=True, check=False, **how)


def chat(folder: Path, store: Path, *arguments: Any, **how: Any) -> subprocess.CompletedProcess[str]:
    return memstream("chat", "--model", folder, "--store", store, "--max-new-tokens", 8, *arguments, **how)


def test_lines_from_a_pipe_are_turns_and_json_is_a_report_each(model_folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    done = chat(model_folder, store, "--json", "--user", "u", input="hello\n\nmy harbour is Valparaiso\n")
    assert (done.returncode, done.stderr) == (0, "")
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["usage"]["reply_tokens"] for report in reports] == [8, 8]
    assert {"text", "recalled", "evicted", "timings", "cache_bytes", "finish_reason"} <= set(reports[0])
    found = memstream("memory", "search", "--store", store, "--user", "u", "--json", "harbour")
    assert "my harbour is Valparaiso" in found.stdout
    again = chat(
        model_folder, store, "--user", "u", "--name", "later", "--show-memory", "-m", "which harbour is my harbour"
    )
    assert again.returncode == 0
    assert "recalled turn:3" in again.stderr
    assert "my harbour is Valparaiso" in again.stderr


def test_no_text_can_give_the_terminal_orders(model_folder: Path, tmp_path: Path) -> None:
    evil = "clear \x1b[2J and \x9b31m red \x07 \u202e"
    done = chat(model_folder, tmp_path / "s.db", input=f"/remember {evil}\n/search clear red\n")
    assert "clear \ufffd[2J" in done.stdout
    shown = memstream("memory", "list", "--store", tmp_path / "s.db", "--user", "me")
    assert "clear \ufffd[2J" in shown.stdout
    assert not set("\x1b\x9b\x07\u202e") & set(done.stdout + shown.stdout)


def test_commands_in_a_chat(model_folder: Path, tmp_path: Path) -> None:
    said = ["/remember Prefers e-mail", "/search e-mail", "/forget fact:1", "/search e-mail", "/forget fact:9"]
    said += ["/nonsense", "/quit", "never said"]
    done = chat(model_folder, tmp_path / "s.db", input="\n".join(said) + "\n")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "remembered as fact:1"
    assert "Prefers e-mail" in lines[1]
    assert lines[2].startswith("forgotten fact:1")
    assert len(lines) == 3
    assert "fact:9" in done.stderr
    assert "no such command: /nonsense" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--model", "no-such-model"], 1, "no-such-model"),
        (["--cache-tokens", "10"], 1, "window_tokens"),
        (["--store", "/"], 1, "/"),
        (["--temperature", "-1"], 1, "temperature"),
        (["--nonsense"], 2, "--nonsense"),
        (["--system", "word " * 3000], 1, "system turn takes"),
        (["-m", ""], 1, "empty"),
    ],
)
def test_wrong_input_is_one_clear_sentence(
    model_folder: Path, tmp_path: Path, arguments: list[str], status: int, words: str
) -> None:
    given = [] if "--model" in arguments else ["--model", model_folder]
    store = [] if "--store" in arguments else ["--store", tmp_path / "s.db"]
    done = memstream("chat", *given, *store, *arguments, input="hello\n")
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_bad_line_does_not_end_the_chat(model_folder: Path, tmp_path: Path) -> None:
    done = chat(model_folder, tmp_path / "s.db", "--json", input="word " * 5000 + "\nhello\n")
    assert done.returncode == 1
    assert "error: the text takes" in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_bytes_that_are_no_text_do_not_end_the_chat(model_folder: Path, tmp_path: Path) -> None:
    arguments = ["chat", "--model", model_folder, "--store", tmp_path / "s.db", "--max-new-tokens", 4, "--json"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    said = b"ok \xff\nhello\n"
    done = subprocess.run([*RUN, *map(str, arguments)], input=said, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout.splitlines()) == 2


def test_the_demo_shows_what_it_promises(model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [
        "demo",
        "--model",
        model_folder,
        "--tokens",
        6000,
        "--questions",
        3,
        "--cache-tokens",
        1500,
        "--out",
        out,
    ]
    done = memstream(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["cache_bytes_at_start"] == figures["cache_bytes_at_end"] == 2 * 2 * 2 * 8 * 1500 * 4
    assert figures["tokens"] >= 6000
    assert len(figures["asked"]) == 3
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "talking: 6000 of 6000" in done.stderr
    again = memstream(*arguments)
    assert again.returncode == 0
    assert "right without memory" in again.stdout
    assert "question" in again.stdout
