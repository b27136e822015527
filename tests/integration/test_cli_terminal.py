"""``memstream chat`` on a terminal: one can type at once, while the model is being loaded."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PATIENCE_S = 120.0


class Terminal:
    """A chat with a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._screen, its_end = os.openpty()
        command = [sys.executable, "-c", "from memstream.cli import main; main()", "chat", *arguments]
        self.process = subprocess.Popen(
            command, stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True, env={**os.environ}
        )
        os.close(its_end)
        self.text = ""

    def until(self, words: str) -> str:
        """Waits until something was shown; returns all up to it, and takes that away."""
        end = time.monotonic() + PATIENCE_S
        while words not in self.text and time.monotonic() < end:
            if not select.select([self._screen], [], [], 0.1)[0]:
                continue
            try:
                self.text += os.read(self._screen, 65_536).decode(errors="replace").replace("\r", "")
            except OSError:  # its end was closed
                break
        assert words in self.text, f"{words!r} was not shown, but {self.text!r}"
        shown, _, self.text = self.text.partition(words)
        return shown

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def status(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_(*arguments: str) -> Terminal:
        opened.append(Terminal("--store", str(tmp_path / "a.db"), "--no-recall", "--max-new-tokens", "4", *arguments))
        return opened[-1]

    yield open_
    for terminal in opened:
        terminal.close()


def test_a_line_typed_before_the_model_is_there_is_answered(chat: Callable[..., Terminal], model_folder: Path) -> None:
    terminal = chat("--model", str(model_folder), "--show-memory")
    before = terminal.until("> ")
    assert "loading" not in before  # nobody waits yet
    terminal.type("hello\n")
    terminal.until("loading the model ...")
    terminal.until("tokens in")
    terminal.until("> ")
    terminal.type("again\n")
    assert "loading" not in terminal.until("tokens in")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.status() == 0


def test_a_model_that_is_not_there_is_told_without_a_line(chat: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = chat("--model", str(tmp_path / "nowhere.gguf"))
    terminal.until("> ")
    terminal.until("error: ")
    assert terminal.status() == 1
    assert not (tmp_path / "a.db").exists()


@pytest.mark.parametrize("leaving", ["/quit\n", "\x04", "Ctrl-C twice"])
def test_leaving_does_not_wait_for_the_model(chat: Callable[..., Terminal], model_folder: Path, leaving: str) -> None:
    terminal = chat("--model", str(model_folder))
    terminal.until("> ")
    if leaving == "Ctrl-C twice":
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("(Ctrl-C again leaves)")
        terminal.until("> ")
        terminal.process.send_signal(signal.SIGINT)
    else:
        terminal.type(leaving)
    assert terminal.status() == 0


def test_ctrl_c_while_waiting_leaves(chat: Callable[..., Terminal], model_folder: Path) -> None:
    terminal = chat("--model", str(model_folder))
    terminal.until("> ")
    terminal.process.send_signal(signal.SIGSTOP)  # so that the line and the key are there before the model
    terminal.type("hello\n")
    terminal.process.send_signal(signal.SIGCONT)
    terminal.until("loading the model ...")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.status() in (0, 130)
