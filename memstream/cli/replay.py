"""``memstream replay``: a thin shell over ``memstream.Replay``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import click

from memstream.cli._live import LiveView
from memstream.cli._replay_words import alert_in_words, answer_in_words, note_in_words, summary_in_words
from memstream.config import CacheConfig, WeightsChoice
from memstream.errors import MemstreamError, ReplayError
from memstream.models import DEFAULT_MODEL
from memstream.replay import Alert, Answer, Event, LineMemory, Note, Replay, ReplayConfig
from memstream.replay.history import History
from memstream.replay.metrics import MetricsServer
from memstream.replay.report import write_report
from memstream.replay.webhook import Webhook
from memstream.report import as_json
from memstream.stores.sql import SqlStore

_DEFAULT = ReplayConfig()
_FORMATS = ["auto", "raw", "json", "logfmt", "syslog", "bgl"]
_NAMED_TEMPLATES = 10_000  # in a report


def _setting(*names: str, help: str, **options: Any) -> Callable[[Any], Any]:
    """An option of the same name, type and default as a field of ``ReplayConfig``."""
    default = getattr(_DEFAULT, names[-1].removeprefix("--").replace("-", "_"))
    return click.option(*names, default=default, help=help, **options)


@click.command(context_settings={"show_default": True})
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("--model", default=DEFAULT_MODEL, help="Alias, folder, hub id or .gguf file.")
@click.option("--device", default="auto", help="Where the model runs: auto, cpu, cuda.")
@click.option(
    "--weights", type=click.Choice(get_args(WeightsChoice)), default="auto", help="Form of the model's weights."
)
@_setting("--input-format", "format", type=click.Choice(_FORMATS), help="How lines begin.")
@_setting("--encoding", help="Of files without a byte order mark.")
@click.option("-f", "--follow", is_flag=True, help="Wait for more at the end of a file, through rotation.")
@_setting("--score", help="Lines the model reads: novel (of new templates), all, or sample:K.")
@_setting("--threshold", help="qSHARE: above this share of scores so far; zN: N deviations; nllN: surprise, in nats.")
@_setting("--burn-in", "burn_in_lines", help="Lines before the first alert.")
@_setting("--max-alerts-per-hour", help="Of the log's own time; further ones are held back. 0: no limit.")
@click.option("--no-rates", is_flag=True, help="No alerts for templates that come more often or fall silent.")
@click.option("--ignore-level", is_flag=True, help="Leave the severity that lines state out of their score.")
@_setting("--sinks", help="How many first lines stay in the cache for ever.")
@click.option("--window", "window_tokens", type=int, help="Tokens of the latest lines in the cache.  [default: 2048]")
@_setting("--max-line-bytes", help="Cut longer lines there, and mark them.")
@click.option("--state", metavar="DIR", help="Save progress there, and go on with what is there.")
@click.option("--store", metavar="FILE", help="Keep every line in this store, to ask later.")
@click.option(
    "--ask", metavar="QUESTION", help="Search the lines afterwards; with --store and no FILE, without reading."
)
@click.option("--json", "as_json_", is_flag=True, help="Print JSON Lines; see docs/replay.md.")
@click.option("--scores", metavar="FILE", help="Write one JSON record per line read.")
@click.option("--report", metavar="FILE", help="Write an HTML page with plots and incidents.")
@click.option("--webhook", metavar="URL", help="Post alerts there, as Alertmanager does.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve counts to Prometheus on this port.")
@click.option("--fail-on-alert", is_flag=True, help="Exit with 3 if there was an alert.")
def command(
    files: tuple[str, ...],
    model: str,
    device: str,
    weights: WeightsChoice,
    no_rates: bool,
    window_tokens: int | None,
    state: str | None,
    store: str | None,
    ask: str | None,
    as_json_: bool,
    scores: str | None,
    report: str | None,
    webhook: str | None,
    metrics_port: int | None,
    fail_on_alert: bool,
    **settings: Any,
) -> int:
    """Stream logs through a model and point out what is unusual.

    FILE is a log, plain or gzip; - reads standard input.
    """
    config = ReplayConfig(rates=not no_rates, **settings)
    if not files:
        if not (store and ask):
            raise click.UsageError("name a FILE, or - for standard input; or give --store and --ask to search a store")
        _ask_store(store, ask, as_json_)
        return 0
    history = History() if report else None
    with ExitStack() as stack:
        sinks: list[Callable[[Event], object]] = [] if history is None else [history]
        if webhook:
            hook = Webhook(webhook)
            stack.callback(hook.close)
            sinks.append(hook)
        view = stack.enter_context(LiveView()) if sys.stderr.isatty() else None
        if view:
            sinks.append(view.sink)
        replay: Replay
        if metrics_port is not None:
            server = MetricsServer(metrics_port, lambda: replay.summary())
            stack.callback(server.close)
            sinks.append(server)
            click.echo(f"metrics on http://127.0.0.1:{server.port}/metrics", err=True)
        replay = stack.enter_context(
            Replay(
                list(files),
                model=model,
                device=device,
                weights=weights,
                store=store if store or not ask else "temporary",
                config=config,
                cache=_cache(window_tokens),
                state=state,
                records=scores,
                sinks=sinks,
                on_progress=view.progress if view else None,
            )
        )
        status = _read(replay, as_json_)
        if history is not None and history.summary is None:
            history(replay.summary())
        if report and history is not None:
            names = {number: text for number, text, _ in replay.frequent_templates(_NAMED_TEMPLATES)}
            write_report(Path(report), history, names, f"Replay of {', '.join(files)}")
            click.echo(f"report written to {report}", err=True)
        if ask and status == 0:
            _print_answer(replay.ask(ask), as_json_)
        if status == 0 and fail_on_alert and replay.summary().alerts:
            return 3
    return status


def _cache(window_tokens: int | None) -> CacheConfig:
    cache = CacheConfig.preset("logs")
    if window_tokens is None:
        return cache
    return CacheConfig(
        sink_tokens=cache.sink_tokens,
        memory_tokens=cache.memory_tokens,
        window_tokens=window_tokens,
        memory_position=cache.memory_position,
    )


def _read(replay: Replay, as_json_: bool) -> int:
    """Prints alerts one by one, and a summary whatever happens; returns the exit status."""
    try:
        for event in replay:
            _print_event(event, as_json_)
    except KeyboardInterrupt:
        _print_event(replay.summary(), as_json_)
        return 130
    except MemstreamError:
        if replay.summary().lines:
            _print_event(replay.summary(), as_json_)
        raise
    summary = replay.summary()
    if summary.scored + summary.counted == 0:
        what = f"none of the {summary.lines} lines has a message" if summary.lines else "there was no line to read"
        raise ReplayError(f"{what}, so nothing was checked; is this the right file?")
    return 0


def _ask_store(store: str, question: str, as_json_: bool) -> None:
    opened = SqlStore.open(store, create=False)
    try:
        _print_answer(LineMemory(opened).search(question), as_json_)
    finally:
        opened.close()


def _print_event(event: Event, as_json_: bool) -> None:
    if as_json_:
        click.echo(json.dumps(as_json(event), ensure_ascii=False))
    elif isinstance(event, Alert):
        click.echo(alert_in_words(event))
    elif isinstance(event, Note):
        click.echo(note_in_words(event), err=True)
    else:
        assert event.type == "summary"
        click.echo(summary_in_words(event), err=True)
    sys.stdout.flush()


def _print_answer(answer: Answer, as_json_: bool) -> None:
    if as_json_:
        click.echo(json.dumps(as_json(answer), ensure_ascii=False))
        return
    if answer.ignored:
        click.echo(f"not in the lines: {', '.join(answer.ignored)}", err=True)
    click.echo(answer_in_words(answer))
