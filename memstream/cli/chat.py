"""``memstream chat``: talk in the terminal, or feed lines from a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
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

_LOADING = "loading the model ..."


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
    with contextlib.ExitStack() as stack:

        def open_session() -> Session:
            from memstream.agent import Agent

            agent = stack.enter_context(Agent(**settings))
            return stack.enter_context(agent.session(user=user, name=name))

        screen = _Shown(show_memory=show_memory, as_lines=as_lines)
        if message is not None or not sys.stdin.isatty():
            _note(_LOADING)
            session = open_session()
            if message is None:
                return int(_converse(lambda: session, screen, (line.rstrip("\n") for line in sys.stdin)))
            screen.turn(session, message)
            return 0
        _note("say something; /help lists commands")
        opening = _Opening(open_session)
        with contextlib.suppress(KeyboardInterrupt):
            _converse(opening.session, screen, _typed(opening))
        opening.leave()
    return 0


class _Opening:
    """The session, opened in a thread of its own while somebody types the first line."""

    def __init__(self, open_session: Callable[[], Session]) -> None:
        self._open = open_session
        self._future: Future[Session] = Future()
        self._at_prompt = False
        threading.Thread(target=self._run, name="opening", daemon=True).start()

    def _run(self) -> None:
        try:
            self._future.set_result(self._open())
        except BaseException as error:  # told by ``session``  # noqa: BLE001
            self._future.set_exception(error)
            if self._at_prompt:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    @property
    def failed(self) -> bool:
        """True where it was tried in vain; ``session`` tells why."""
        return self._future.done() and self._future.exception() is not None

    def session(self) -> Session:
        """Waits until it is open.

        Raises:
            MemstreamError: it cannot be opened.
        """
        if not self._future.done():
            _note(_LOADING)
        return self._future.result()

    @contextlib.contextmanager
    def prompting(self) -> Iterator[None]:
        """While somebody is asked for a line, a failure to open interrupts."""
        self._at_prompt = True
        try:
            yield
        finally:
            self._at_prompt = False

    def leave(self) -> None:
        """Ends the process where nothing was opened yet: nothing was said, so there is nothing to close."""
        if not self._future.done():
            sys.stdout.flush()
            os._exit(0)
        self._future.result()


def _converse(session: Callable[[], Session], screen: _Shown, lines: Iterable[str]) -> bool:
    """Lives a turn for every line, until there are no more; returns whether one failed."""
    failed = False
    for line in lines:
        if line == "/quit":
            break
        if line.startswith("/"):
            _command(session(), line)
        elif line.strip():
            opened = session()
            try:
                screen.turn(opened, line)
            except MemstreamError as error:  # the conversation is as it was; go on
                click.echo(f"error: {error}", err=True)
                failed = True
    return failed


class _Shown:
    """Lives turns in front of the user."""

    def __init__(self, *, show_memory: bool, as_lines: bool) -> None:
        self._show_memory = show_memory
        self._as_lines = as_lines

    def turn(self, session: Session, text: str) -> None:
        with _interruptible(session):
            for piece in session.stream(text):
                if not self._as_lines:
                    sys.stdout.write(shown(piece))
                    sys.stdout.flush()
        reply = session.last
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


def _typed(opening: _Opening) -> Iterator[str]:
    """Lines from a prompt; Ctrl-C twice at the prompt leaves."""
    import readline  # noqa: F401  (line editing at the prompt)

    warned = False
    while not opening.failed:
        try:
            with opening.prompting():
                line = input("> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            if warned:
                return
            if not opening.failed:
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
    """Tells somebody who looks."""
    if sys.stderr.isatty():
        click.secho(text, dim=True, err=True)
