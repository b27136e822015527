"""The command line of a bot's own file: at a prompt, behind the server, or played from a script."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import count, groupby
from pathlib import Path

from memstream.agent import Agent
from memstream.bots import Talk, open_agent, read_settings
from memstream.cli import guarded, run
from memstream.errors import ConfigError

Line = tuple[str, str, str | None]  # customer, what is said, what the answer has in it; None: the bot is silent


def run_bot(config: Path, days: Iterable[Iterable[Line]], *, check: Callable[[], None] = lambda: None) -> int:
    """The command line of a bot: talk with it, serve it, or play its script and compare.

    Args:
        config: its settings; the table ``[bot]`` names its file.
        days: the script. Each day begins with a restart; lines of one customer that follow each other are a visit.
        check: what else must be true after the script, in the folder where it was played.

    Returns:
        An exit status.
    """
    arguments = sys.argv[1:]
    if "--serve" in arguments:
        arguments.remove("--serve")
        return run(["serve", "--config", str(config), *arguments])
    parser = argparse.ArgumentParser(description="Talk with the bot; an empty line leaves.")
    parser.add_argument("--store", help="where conversations are kept")
    parser.add_argument("--customer", default="guest", help="whose memory is used")
    parser.add_argument("--script", action="store_true", help="play the scripted visits")
    parser.add_argument("--serve", action="store_true", help="answer over HTTP; takes the options of memstream serve")
    parser.add_argument("said", nargs="*", help="say this instead of asking at the prompt")
    options = parser.parse_args(arguments)
    return guarded(lambda: _play(config.resolve(), days, check) if options.script else _talk(config, options))


def _opened(config: Path, store: str | None) -> tuple[Agent, Talk]:
    values = read_settings(config)
    agent, talk = open_agent(values if store is None else {**values, "store": store})
    if talk is None:
        agent.close()
        raise ConfigError(f"{config} names no bot; give it a table [bot] with a file")
    return agent, talk


def _talk(config: Path, options: argparse.Namespace) -> None:
    agent, talk = _opened(config, options.store)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with agent, agent.session(user=options.customer, name=now) as chat, contextlib.suppress(EOFError):
        for text in options.said or iter(lambda: input(f"{options.customer}> "), ""):
            said = False
            for piece in talk(chat, text, None):
                said = True
                print(piece, end="", flush=True)
            print("" if said else "(no answer)")


def _play(config: Path, days: Iterable[Iterable[Line]], check: Callable[[], None]) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        visits = count(1)
        for lines in days:
            agent, talk = _opened(config, "bot.db")
            with agent:
                for customer, visit in groupby(lines, key=lambda line: line[0]):
                    with agent.session(user=customer, name=f"visit {next(visits)}") as chat:
                        for _, text, expected in visit:
                            said = "".join(talk(chat, text, None))
                            print(f"{customer}> {text}\n{said or '(no answer)'}", flush=True)
                            if (expected not in said) if expected is not None else said:
                                raise AssertionError(f"the answer should have {expected or 'nothing'!r} in it")
        check()
