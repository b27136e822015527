"""The command line: one module per command, imported only when that command runs.

Results go to stdout, progress and notes to stderr. Exit status: 0 done, 1 failed with one sentence, 2 wrong usage,
130 interrupted.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from memstream import __version__
from memstream.errors import MemstreamError

# Name and one line of help, so that --help need not import what a command needs.
COMMANDS = {
    "chat": "Talk with a model; it remembers you the next time.",
    "demo": "See recall and eviction at work, in a few minutes.",
    "serve": "Serve a model over HTTP, as OpenAI's API; conversations are kept and remembered.",
    "replay": "Stream a log through a model and point out what is unusual.",
    "models": "Install and list models.",
    "memory": "Look into the store and keep it in order: search, forget, add documents, back up, and more.",
    "doctor": "Tell versions, devices, and the health of models and store.",
}


def _exists(name: str) -> bool:
    return importlib.util.find_spec(f"memstream.cli.{name}") is not None


class _Commands(click.Group):
    """A group that imports a command's module when the command is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if _exists(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS or not _exists(cmd_name):
            return None
        command = importlib.import_module(f"memstream.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader (head, less) has seen enough. Point stdout elsewhere, or the interpreter complains on exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return result

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="memstream")
@click.option("-v", "--verbose", count=True, help="Log what happens to stderr; twice for everything, user text too.")
def group(verbose: int) -> None:
    """An endless conversation in fixed memory, that remembers."""
    _set_up_logging(verbose)


def _set_up_logging(verbose: int) -> None:
    """Sends log lines to stderr: warnings; with -v also information; with -vv all of memstream's."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s" if verbose else "%(message)s"))
    logger = logging.getLogger("memstream")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level)


def run(arguments: list[str] | None = None) -> int:
    """Runs one command line and returns its exit status; prints errors as one sentence on stderr."""
    return guarded(lambda: group.main(args=arguments, prog_name="memstream", standalone_mode=False))


def guarded(command: Callable[[], Any]) -> int:
    """Runs what somebody asked for in a terminal; returns its exit status and prints errors as one sentence."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):  # a byte or letter outside the locale must not end a command
        if isinstance(stream, io.TextIOWrapper) and not stream.closed:
            stream.reconfigure(errors="replace")
    try:
        result = command()
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        return 130
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except MemstreamError as error:
        click.echo(click.style("error: ", fg="red") + str(error), err=True, color=_color())
        return 1
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return 130
    return result if isinstance(result, int) else 0


def _color() -> bool | None:
    """False where NO_COLOR is set; None lets click look whether stderr is a terminal."""
    return False if os.environ.get("NO_COLOR") else None


def main() -> None:
    """Entry point of ``memstream``."""
    raise SystemExit(run())
