"""``memstream chat`` on a terminal: one can type at once, while the model is being loaded, and leave at any time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.terminal import RUN, Terminal

Open = Callable[..., Terminal]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "s.db"


@pytest.fixture
def chat(store: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def open_(*arguments: Any) -> Terminal:
        opened.append(Terminal("--store", store, *arguments))
        return opened[-1]

    yield open_
    for terminal in opened:
        terminal.close()


def test_a_line_typed_before_the_model_is_there_is_answered(chat: Open, model_folder: Path) -> None:
    terminal = chat("--model", model_folder, "--no-recall", "--max-new-tokens", 4, "--show-memory")
    assert "loading" not in terminal.until("> ")  # nobody waits yet
    terminal.say("hello\n")
    terminal.until("loading the model ...")
    terminal.until("tokens in")
    terminal.until("> ")
    terminal.say("again\n")
    assert "loading" not in terminal.until("tokens in")
    terminal.until("> ")
    terminal.say("\x04")
    assert terminal.status() == 0


def test_ctrl_c_stops_a_reply_and_twice_leaves(chat: Open, model_folder: Path, store: Path) -> None:
    terminal = chat("--model", model_folder, "--max-new-tokens", 100_000)
    terminal.until("> ")
    terminal.say("hello\n")
    terminal.until("loading the model ...")
    terminal.until("\n")
    terminal.read(lambda: terminal.seen.strip() != "")  # the reply has begun, and goes on for minutes
    terminal.interrupt()
    terminal.until("[cancelled]")
    terminal.until("> ")
    terminal.settle()
    terminal.interrupt()
    terminal.until("Ctrl-C again leaves")
    terminal.settle()
    terminal.interrupt()
    assert terminal.status() == 0
    listed = [*RUN, "memory", "list", "--store", str(store), "--user", "me", "--json"]
    assert "hello" in subprocess.run(listed, capture_output=True, text=True, check=True).stdout


def test_a_model_that_is_not_there_is_told_without_a_line(chat: Open, store: Path) -> None:
    terminal = chat("--model", store.parent / "nowhere.gguf")
    terminal.until("> ")
    terminal.until("error: ")
    assert terminal.status() == 1
    assert not store.exists()


@pytest.mark.parametrize("how", ["/quit", "Ctrl-D", "Ctrl-C twice"])
def test_leaving_does_not_wait_for_the_model(chat: Open, model_folder: Path, how: str) -> None:
    terminal = chat("--model", model_folder)
    terminal.until("> ")
    if how == "Ctrl-C twice":
        time.sleep(1)  # a signal in the moment before readline waits for a key is seen with the next key
        terminal.interrupt()
        terminal.until("Ctrl-C again leaves")
        time.sleep(1)
        terminal.interrupt()
    else:
        terminal.say("/quit\n" if how == "/quit" else "\x04")
    assert terminal.status() == 0


def test_ctrl_c_while_waiting_for_the_model_leaves(chat: Open, model_folder: Path) -> None:
    terminal = chat("--model", model_folder)
    terminal.until("> ")
    terminal.say("hello\n")
    terminal.until("loading the model ...")
    terminal.interrupt()
    assert terminal.status() == 0
