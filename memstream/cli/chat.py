"""``memstream chat``: talk in the terminal, or feed lines from a pipe."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, get_args

import click

from memstream.config import CacheConfig, GenerationConfig, RecallConfig, SummarizerChoice, WeightsChoice
from memstream.errors import MemstreamError
from memstream.report import Reply, as_json, shown

if TYPE_CHECKING:
    from memstream.session import Session

HELP = """/remember TEXT   pin a fact
/search TEXT     look into memory
/forget ID       forget a memory, such as turn:17 or fact:3
/help            this list
/quit            leave (also Ctrl-D; Ctrl-C stops a reply, twice leaves)"""


@click.command("chat")
@click.option("--model", default=None, help="Alias, hub id, folder or .gguf file.  [default: smollm2-135m]")
@click.option(
    "--weights",
    type=click.Choice(get_args(WeightsChoice)),
    default="auto",
    show_default=True,
    help="Form of the model's weights; auto: see memstream doctor.",
)
@click.option("--store", default=None, help="Store: a path or URL; 'memory' keeps nothing.")
@click.option("--user", default="me", show_default=True, help="Whose memory is used.")
@click.option("--name", default="default", show_default=True, help="Conversation; an existing one goes on.")
@click.option("--system", default=None, help="System text, pinned for the whole conversation.")
@click.option("--cache-tokens", type=int, default=2048, show_default=True, help="Size of the fixed cache.")
@click.option("--memory-tokens", type=int, default=256, show_default=True, help="Its share for recalled text.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True, help="Longest reply.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 always takes the likeliest token.")
@click.option(
    "--summarizer",
    type=click.Choice(get_args(SummarizerChoice)),
    default="extractive",
    show_default=True,
    help="Who sums up what leaves the window.",
)
@click.option("--no-recall", is_flag=True, help="Store everything, recall nothing.")
@click.option("--show-memory", is_flag=True, help="Show what was recalled and evicted with each reply.")
@click.option("--json", "as_lines", is_flag=True, help="One JSON report per reply instead of text.")
@click.option("-m", "--message", default=None, help="Say this, print the reply, and leave.")
def command(
    model: str | None,
    weights: WeightsChoice,
    store: str | None,
    user: str,
    name: str,
    system: str | None,
    cache_tokens: int,
    memory_tokens: int,
    max_new_tokens: int,
    temperature: float,
    summarizer: SummarizerChoice,
    no_recall: bool,
    show_memory: bool,
    as_lines: bool,
    message: str | None,
) -> int:
    """Talk with a model that remembers you the next time.

    Reads lines from the terminal or from a pipe; each line is a turn. Lines that begin with / are commands; /help
    lists them.
    """
    settings: dict[str, Any] = {
        "cache": CacheConfig(cache_tokens=cache_tokens, memory_tokens=memory_tokens),
        "recall": RecallConfig(enabled=not no_recall),
        "generation": GenerationConfig(max_new_tokens=max_new_tokens, temperature=temperature),
        "summarizer": summarizer,
        "system": system,
        "store": store,
        "weights": weights,
    }
    if model is not None:
        settings["model"] = model
    note = _note if sys.stderr.isatty() else _quiet
    note("loading the model ...")
    from memstream.agent import Agent

    with Agent(**settings) as agent, agent.session(user=user, name=name) as session:
        screen = _Shown(session, show_memory=show_memory, as_lines=as_lines)
        if message is not None:
            screen.turn(message)
            return 0
        note("say something; /help lists commands")
        with contextlib.suppress(KeyboardInterrupt) if sys.stdin.isatty() else contextlib.nullcontext():
            failed = _converse(session, screen)
            return int(failed and not sys.stdin.isatty())
    return 0


def _converse(session: Session, screen: _Shown) -> bool:
    """Lives a turn for every line, until there are no more; returns whether one failed."""
    failed = False
    for line in _lines():
        if line == "/quit":
            break
        if line.startswith("/"):
            _command(session, line)
        elif line.strip():
            try:
                screen.turn(line)
            except MemstreamError as error:  # the conversation is as it was; go on
                click.echo(f"error: {error}", err=True)
                failed = True
    return failed


class _Shown:
    """Lives turns in front of the user."""

    def __init__(self, session: Session, *, show_memory: bool, as_lines: bool) -> None:
        self._session = session
        self._show_memory = show_memory
        self._as_lines = as_lines

    def turn(self, text: str) -> None:
        with _interruptible(self._session):
            for piece in self._session.stream(text):
                if not self._as_lines:
                    sys.stdout.write(shown(piece))
                    sys.stdout.flush()
        reply = self._session.last
        assert reply is not None
        if self._as_lines:
            click.echo(json.dumps(as_json(reply), ensure_ascii=False))
            return
        click.echo("" if reply.finish_reason == "stop" else f" [{reply.finish_reason}]")
        if self._show_memory:
            _show(reply)


def _show(reply: Reply) -> None:
    """Prints what was recalled and evicted, to stderr."""
    for note in reply.recalled:
        terms = f", words: {shown(' '.join(note.why.terms))}" if note.why.terms else ""
        pinned = ", pinned" if note.why.pinned else ""
        why = f"{note.why.score:.2f}{terms}{pinned}"
        click.secho(f"  recalled {note.id} ({why}): {shown(note.note)}", fg="green", err=True)
    for gone in reply.evicted:
        turns = " ".join(gone.turns)
        click.secho(f"  evicted {turns} ({gone.n_tokens} tokens): {shown(gone.text)}", fg="yellow", err=True)
    usage, timings, made = reply.usage, reply.timings, reply.summaries
    if made.chosen or made.rejected or made.failed:
        click.secho(
            f"  summaries so far: {made.chosen} by the model, {made.extractive} extractive; the model's rejected for "
            f"naming what nobody said: {made.rejected}, failed: {made.failed}",
            dim=True,
            err=True,
        )
    click.secho(
        f"  sinks | memory {usage.memory_tokens} | window {usage.window_tokens} tokens, "
        f"{reply.cache_bytes / 2**20:.1f} MiB fixed; first token {timings.first_token_ms:.0f} ms, "
        f"{usage.reply_tokens} tokens in {timings.decode_ms:.0f} ms",
        dim=True,
        err=True,
    )


def _command(session: Session, line: str) -> None:
    """Runs one / command."""
    word, _, rest = line.partition(" ")
    try:
        if word == "/help":
            click.echo(HELP)
        elif word == "/remember" and rest.strip():
            click.echo(f"remembered as {session.remember(rest)}")
        elif word == "/search" and rest.strip():
            for found in session.search(rest) or []:
                click.echo(f"{found.id}  {found.why.score:.2f}  {found.role}: {shown(found.text)}")
        elif word == "/forget" and rest.strip():
            receipt = session.forget(rest.strip())
            echoes = f"; other turns quote it: {', '.join(receipt.echoes)}" if receipt.echoes else ""
            click.echo(f"forgotten {receipt.id}{echoes}")
        else:
            click.echo(f"no such command: {line}\n{HELP}", err=True)
    except MemstreamError as error:
        click.echo(f"error: {error}", err=True)


def _lines() -> Iterator[str]:
    """Lines from a prompt, or from a pipe; Ctrl-C twice at the prompt leaves."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  (line editing at the prompt)

    warned = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            if warned:
                return
            click.echo("(Ctrl-C again leaves)", err=True)
            warned = True
            continue
        warned = False
        yield line


@contextlib.contextmanager
def _interruptible(session: Session) -> Iterator[None]:
    """While a reply runs, Ctrl-C stops it; a second one leaves."""

    asked = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        session.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _note(text: str) -> None:
    click.secho(text, dim=True, err=True)


def _quiet(text: str) -> None:
    """Says nothing: stderr is not a terminal."""
