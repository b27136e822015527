"""``memstream replay``."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from typing import Any

import click

from memstream.config import CacheConfig, ReplayConfig
from memstream.errors import MemstreamError, ReplayError
from memstream.models import DEFAULT_MODEL
from memstream.replay import Alert, Answer, LineMemory, Replay, Summary
from memstream.report import as_json
from memstream.stores.lines import StoredLine
from memstream.stores.sql import SqlStore

_DEFAULT = ReplayConfig()


@click.command(context_settings={"show_default": True})
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("--model", default=DEFAULT_MODEL, help="Alias, folder, hub id or .gguf file.")
@click.option("--device", default="auto", help="Where the model runs: auto, cpu, cuda.")
@click.option(
    "--input-format",
    "format",
    type=click.Choice(["auto", "raw", "bgl"]),
    default=_DEFAULT.format,
    help="How lines begin.",
)
@click.option(
    "--score",
    type=click.Choice(["novel", "all"]),
    default=_DEFAULT.score,
    help="Score new templates only, or all lines.",
)
@click.option("--threshold", default=_DEFAULT.threshold, help="Alert above this share of the lines so far.")
@click.option(
    "--burn-in", "burn_in_lines", type=int, default=_DEFAULT.burn_in_lines, help="Lines before the first alert."
)
@click.option("--sinks", type=int, default=_DEFAULT.sinks, help="How many first lines stay in the cache for ever.")
@click.option("--window", "window_tokens", type=int, help="Tokens of the latest lines in the cache.  [default: 2048]")
@click.option(
    "--max-line-bytes", type=int, default=_DEFAULT.max_line_bytes, help="Cut longer lines there, and mark them."
)
@click.option("--store", metavar="FILE", help="Keep every line in this store, to ask later.")
@click.option(
    "--ask", metavar="QUESTION", help="Search the lines afterwards; with --store and no FILE, without reading."
)
@click.option("--json", "as_json_", is_flag=True, help="Print JSON Lines; see docs/replay.md.")
def command(
    files: tuple[str, ...],
    model: str,
    device: str,
    window_tokens: int | None,
    store: str | None,
    ask: str | None,
    as_json_: bool,
    **settings: Any,
) -> int:
    """Stream logs through a model and point out what is unusual.

    FILE is a log, plain or gzip; - reads standard input.
    """
    config = ReplayConfig(**settings)
    if not files:
        if not (store and ask):
            raise click.UsageError("name a FILE, or - for standard input; or give --store and --ask to search a store")
        _ask_store(store, ask, as_json_)
        return 0
    cache = CacheConfig.preset("logs")
    if window_tokens is not None:
        cache = CacheConfig(
            sink_tokens=cache.sink_tokens,
            memory_tokens=cache.memory_tokens,
            window_tokens=window_tokens,
            memory_position=cache.memory_position,
        )
    progress = _Progress() if sys.stderr.isatty() else None
    with Replay(
        list(files),
        model=model,
        device=device,
        store=store if store or not ask else "temporary",
        config=config,
        cache=cache,
        on_progress=progress,
    ) as replay:
        status = _read(replay, as_json_, progress)
        if ask and status == 0:
            _print_answer(replay.ask(ask), as_json_)
    return status


def _read(replay: Replay, as_json_: bool, progress: _Progress | None) -> int:
    """Prints alerts one by one, and a summary whatever happens; returns the exit status."""
    try:
        for event in replay:
            if progress:
                progress.clear()
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


class _Progress:
    """One line on stderr that is written over; used on a terminal only."""

    _EVERY_S = 0.2

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, replay: Replay) -> None:
        if (now := time.monotonic()) - self._last < self._EVERY_S:
            return
        self._last = now
        summary = replay.summary()
        rate = summary.lines / max(summary.seconds, 1e-9)
        sys.stderr.write(f"\r\x1b[K{summary.lines} lines, {rate:.0f} lines/s, {summary.alerts} alerts")
        sys.stderr.flush()

    def clear(self) -> None:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def _ask_store(store: str, question: str, as_json_: bool) -> None:
    opened = SqlStore.open(store, create=False)
    try:
        _print_answer(LineMemory(opened).search(question), as_json_)
    finally:
        opened.close()


def _print_event(event: Alert | Summary, as_json_: bool) -> None:
    if as_json_:
        click.echo(json.dumps(as_json(event), ensure_ascii=False))
    elif isinstance(event, Alert):
        what = " ".join(filter(None, (_time(event.time), event.level)))
        click.echo(f"{event.stream}:{event.line}: {what + ': ' if what else ''}{event.message}")
        click.echo(f"    score {event.score:.2f} above {event.threshold:.2f}, incident {event.incident}, {event.mode}")
    else:
        click.echo(_in_words(event), err=True)
    sys.stdout.flush()


def _in_words(summary: Summary) -> str:
    parts = [f"{summary.scored} scored", f"{summary.counted} of known templates counted", f"{summary.empty} empty"]
    if summary.unfinished:
        parts.append(f"{summary.unfinished} not judged")
    lines = [
        f"{summary.lines} lines in {summary.seconds:.1f} s ({summary.mode}): {', '.join(parts)}; "
        f"{summary.truncated} truncated, {summary.decode_errors} bytes not UTF-8",
        f"{summary.alerts} alerts, {summary.held_back} held back, {summary.repeats} repeats of open incidents; "
        f"{summary.templates} templates",
        f"{summary.tokens} tokens; cache {summary.cache_bytes_start} bytes at the start, "
        f"{summary.cache_bytes_end} at the end",
    ]
    if summary.store:
        lines.append(f"{summary.stored} lines stored in {summary.store}")
    lines += [
        f"incident {incident.incident} ({incident.stream}:{incident.line}) came {incident.repeats} times more: "
        f"{incident.template[:100]}"
        for incident in summary.incidents
        if incident.repeats
    ]
    return "\n".join(lines)


def _print_answer(answer: Answer, as_json_: bool) -> None:
    if as_json_:
        click.echo(json.dumps(as_json(answer), ensure_ascii=False))
        return
    if answer.ignored:
        click.echo(f"not in the lines: {', '.join(answer.ignored)}", err=True)
    if not answer.found:
        click.echo(f"nothing found in {answer.searched} lines")
    for found in answer.found:
        click.echo(f"{found.count} x {found.template}")
        click.echo(f"    first {_place(found.first)}, last {_place(found.last)}")
        for line in found.lines:
            click.echo(f"    {_place(line)}: {line.text}")


def _place(line: StoredLine) -> str:
    return " ".join(filter(None, (f"{line.stream}:{line.line}", _time(line.time))))


def _time(when: datetime | None) -> str:
    return "" if when is None else f"{when:%Y-%m-%d %H:%M:%S}Z"
