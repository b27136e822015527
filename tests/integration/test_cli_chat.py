"""memstream chat and demo as processes, with a tiny model in a folder."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration import tiny

RUN = [sys.executable, "-c", "import sys; from memstream.cli import main; sys.argv[0] = 'memstream'; main()"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder that transformers can load."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def memstream(*arguments: Any, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, *map(str, arguments)], capture_output=True, text=True, check=False, **how)


def chat(model: Path, store: Path, *arguments: Any, **how: Any) -> subprocess.CompletedProcess[str]:
    return memstream("chat", "--model", model, "--store", store, "--max-new-tokens", 8, *arguments, **how)


def test_lines_from_a_pipe_are_turns_and_json_is_a_report_each(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    done = chat(model, store, "--json", "--user", "u", input="hello\n\nmy harbour is Valparaiso\n")
    assert (done.returncode, done.stderr) == (0, "")
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["usage"]["reply_tokens"] for report in reports] == [8, 8]
    assert {"text", "recalled", "evicted", "timings", "cache_bytes", "finish_reason"} <= set(reports[0])
    found = memstream("memory", "search", "--store", store, "--user", "u", "--json", "harbour")
    assert "my harbour is Valparaiso" in found.stdout
    again = chat(model, store, "--user", "u", "--name", "later", "--show-memory", "-m", "which harbour is my harbour")
    assert again.returncode == 0
    assert "recalled turn:3" in again.stderr
    assert "my harbour is Valparaiso" in again.stderr


def test_no_text_can_give_the_terminal_orders(model: Path, tmp_path: Path) -> None:
    evil = "clear \x1b[2J and \x9b31m red \x07 \u202e"
    done = chat(model, tmp_path / "s.db", input=f"/remember {evil}\n/search clear red\n")
    assert "clear \ufffd[2J" in done.stdout
    shown = memstream("memory", "list", "--store", tmp_path / "s.db", "--user", "me")
    assert "clear \ufffd[2J" in shown.stdout
    assert not set("\x1b\x9b\x07\u202e") & set(done.stdout + shown.stdout)


def test_commands_in_a_chat(model: Path, tmp_path: Path) -> None:
    said = ["/remember Prefers e-mail", "/search e-mail", "/forget fact:1", "/search e-mail", "/forget fact:9"]
    said += ["/nonsense", "/quit", "never said"]
    done = chat(model, tmp_path / "s.db", input="\n".join(said) + "\n")
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
    model: Path, tmp_path: Path, arguments: list[str], status: int, words: str
) -> None:
    given = [] if "--model" in arguments else ["--model", model]
    store = [] if "--store" in arguments else ["--store", tmp_path / "s.db"]
    done = memstream("chat", *given, *store, *arguments, input="hello\n")
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_bad_line_does_not_end_the_chat(model: Path, tmp_path: Path) -> None:
    done = chat(model, tmp_path / "s.db", "--json", input="word " * 5000 + "\nhello\n")
    assert done.returncode == 1
    assert "error: the text takes" in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_bytes_that_are_no_text_do_not_end_the_chat(model: Path, tmp_path: Path) -> None:
    arguments = ["chat", "--model", model, "--store", tmp_path / "s.db", "--max-new-tokens", 4, "--json"]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    said = b"ok \xff\nhello\n"
    done = subprocess.run([*RUN, *map(str, arguments)], input=said, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout.splitlines()) == 2


class Terminal:
    """A chat in a terminal of its own."""

    def __init__(self, model: Path, store: Path) -> None:
        self.fd, theirs = pty.openpty()
        arguments = ["chat", "--model", model, "--store", store, "--max-new-tokens", 100_000]
        self.process = subprocess.Popen(
            [*RUN, *map(str, arguments)], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def read(self, enough: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not enough():
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"nothing more after {self.seen!r}"
            self.seen += os.read(self.fd, 65536).decode(errors="replace")

    def until(self, words: str) -> None:
        self.read(lambda: words in self.seen)
        self.seen = self.seen.partition(words)[2]

    def say(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    def settle(self) -> None:
        """Waits until it waits for a key: a signal in the moment before readline does so is seen with the next key."""
        process, spent = psutil.Process(self.process.pid), -1.0
        while spent != (spent := sum(process.cpu_times()[:2])):
            time.sleep(0.5)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def terminal(model: Path, tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(model, tmp_path / "s.db")
    yield opened
    opened.close()


def test_ctrl_c_stops_a_reply_and_twice_leaves(terminal: Terminal, tmp_path: Path) -> None:
    terminal.until("> ")
    terminal.say("hello\n")
    terminal.until("hello")
    terminal.read(lambda: terminal.seen.strip() != "")  # the reply has begun, and goes on for minutes
    terminal.interrupt()
    terminal.until("[cancelled]")
    terminal.until("> ")
    terminal.settle()
    terminal.interrupt()
    terminal.until("Ctrl-C again leaves")
    terminal.settle()
    terminal.interrupt()
    assert terminal.process.wait(timeout=120) == 0
    shown = memstream("memory", "list", "--store", tmp_path / "s.db", "--user", "me", "--json")
    assert "hello" in shown.stdout


def test_the_demo_shows_what_it_promises(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["demo", "--model", model, "--tokens", 6000, "--questions", 3, "--cache-tokens", 1500, "--out", out]
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
