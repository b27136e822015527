"""The command line's frame: help, exit status, errors, broken pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from memstream import cli
from memstream.errors import ConfigError

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-c", "from memstream.cli import main; main()"]


def start(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*RUN, *arguments], capture_output=True, text=True, env=environment, check=False)


def test_help_lists_every_command() -> None:
    done = start("--help")
    assert done.returncode == 0
    modules = {path.stem for path in (ROOT / "memstream" / "cli").glob("*.py")} - {"__init__"}
    listed = {line.split()[0] for line in done.stdout.partition("Commands:\n")[2].splitlines() if line.strip()}
    assert listed & set(cli.COMMANDS) == modules & set(cli.COMMANDS)
    assert {"models", "doctor"} <= modules


def test_every_command_module_is_listed_and_holds_a_command() -> None:
    for path in (ROOT / "memstream" / "cli").glob("*.py"):
        if path.stem in ("__init__", "bots") or path.stem.startswith("_"):  # bots: for files of others
            continue
        assert path.stem in cli.COMMANDS
        assert cli.run([path.stem, "--help"]) == 0


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = cli.group.list_commands(click.Context(cli.group))
    assert [name for name in commands if f"memstream {name}" not in readme] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == "memstream, version 0.1.0\n"


@pytest.mark.parametrize("arguments", [["nonsense"], ["models", "pull"], ["models", "list", "--nonsense"]])
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage:" in captured.err


def test_an_error_is_one_sentence_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["models", "pull", "smolm2-135m"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: no model is called 'smolm2-135m'; did you mean 'smollm2-135m'?")
    assert captured.err.count("\n") == 1


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Makes ``memstream models`` raise what is put into the list."""
    raised: list[BaseException] = []

    @click.command()
    def command() -> None:
        raise raised[0]

    monkeypatch.setattr("memstream.cli.models.command", command)
    return raised


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("a is 1; allowed is 2"), 1, "error: a is 1; allowed is 2\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (click.UsageError("no"), 2, "Error: no\n"),
    ],
)
def test_exit_status(
    error: BaseException, status: int, said: str, failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(error)
    assert cli.run(["models"]) == status
    assert capsys.readouterr().err.lstrip().endswith(said)


def test_our_own_defects_keep_their_traceback(failing: list[BaseException]) -> None:
    failing.append(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.run(["models"])


def test_a_reader_that_leaves_is_no_error() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = " ".join(["exec", f'"{sys.executable}"', "-c", f'"{RUN[2]}"', "models", "list", "--json"])
    read, write = os.pipe()
    os.close(read)  # the reader has left already
    done = subprocess.run(
        ["/bin/sh", "-c", command], stdout=write, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_logging_is_set_up_by_the_command_line_alone(capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    logger = logging.getLogger("memstream")
    before = list(logger.handlers)
    try:
        assert cli.run(["-v", "models", "list"]) == 0
        logging.getLogger("memstream.models").info("seen")
        logging.getLogger("memstream.models").debug("unseen")
        err = capsys.readouterr().err
        assert "INFO memstream.models: seen" in err
        assert "unseen" not in err
    finally:
        logger.handlers[:] = before
        logger.setLevel(logging.NOTSET)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli._color() is None
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli._color() is False


def test_models_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["models", "list", "--json"]) == 0
    found = {model["alias"]: model for model in json.loads(capsys.readouterr().out)}
    assert found["smollm2-135m"]["installed"]
    assert found["minilm-l6-v2"]["converted"] is None
