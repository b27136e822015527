"""``memstream memory export|import|backup|restore|expire|migrate|reindex``: what is done with a whole store."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import click

from memstream.cli._stores import JSON, STORE, opened, place
from memstream.config import RecallConfig
from memstream.errors import InputError, StoreError
from memstream.memory import Memory, Part, SentenceTransformerEmbedder, SqlStore
from memstream.report import as_json
from memstream.stores.backup import Progress, restore
from memstream.stores.files import replacing
from memstream.stores.move import move
from memstream.stores.postgres import is_url
from memstream.stores.sqlite import locate

_FORCE = click.option("--force", is_flag=True, help="Replace the file if it is there.")


def _part(namespace: str | None, user: str | None, conversation: str | None = None) -> Part:
    """The part that is meant; a user or a conversation alone is of the default namespace, as elsewhere."""
    if namespace is None and (user is not None or conversation is not None):
        namespace = "default"
    return Part(namespace=namespace, user=user, conversation=conversation)


@click.command("export")
@STORE
@click.option("--namespace", default=None, help="Only this tenant.  [default: all]")
@click.option("--user", default=None, help="Only this user (of the namespace, or of the default one).")
@click.option("--conversation", default=None, help="Only this conversation of the user, or of nobody.")
@click.option("--vectors", is_flag=True, help="Write the vectors too.")
@_FORCE
@click.argument("file", default="-")
def export_command(
    store: str | None,
    namespace: str | None,
    user: str | None,
    conversation: str | None,
    vectors: bool,
    force: bool,
    file: str,
) -> None:
    """Write memories as lines of JSON to FILE, or to stdout."""
    part = _part(namespace, user, conversation)
    with opened(store) as memory:
        if file == "-":
            report = memory.export_to(sys.stdout.buffer, part, vectors=vectors)
            sys.stdout.buffer.flush()
        else:
            with replacing(Path(file), force=force) as unfinished, unfinished.open("wb") as target:
                report = memory.export_to(target, part, vectors=vectors)
    click.echo(
        f"exported {report.conversations} conversations, {report.turns} turns, {report.facts} facts, "
        f"{report.summaries} summaries: {report.n_bytes:,} bytes",
        err=True,
    )


@contextmanager
def _readable(file: str, store: str | None) -> Iterator[BinaryIO]:
    """A file that can be read twice; what comes through a pipe is kept beside the store meanwhile, without a name."""
    try:
        if file != "-":
            with Path(file).open("rb") as source:
                if not source.seekable():
                    raise InputError(f"{file} cannot be read twice; send it through stdin: memory import - < {file}")
                yield source
            return
        path = None if is_url(str(place(store))) else locate(place(store))
        with tempfile.TemporaryFile(dir=None if path is None else path.parent) as kept:
            shutil.copyfileobj(sys.stdin.buffer, kept)
            yield kept
    except OSError as error:
        raise StoreError(f"cannot read {file}: {error.strerror}") from error


@click.command("import")
@STORE
@JSON
@click.option("--as", "name", default=None, metavar="NAME", help="Another name for the conversation, if it is one.")
@click.argument("file")
def import_command(store: str | None, as_json_: bool, name: str | None, file: str) -> None:
    """Store what an export holds, from FILE or from stdin (-); the same file twice changes nothing."""
    with _readable(file, store) as source, opened(store, create=True) as memory:
        report = memory.import_from(source, name=name)
    if as_json_:
        click.echo(json.dumps(as_json(report), indent=2))
    else:
        click.echo(
            f"imported {report.conversations} conversations ({report.continued} more continued, {report.unchanged} "
            f"unchanged), {report.turns} turns, {report.facts} facts, {report.summaries} summaries"
        )
    if report.reembedded:
        click.echo("the file's vectors were made by another embedder than the store's and were not used", err=True)
    if report.pending:
        click.echo(
            f"{report.pending} texts wait for their vector; they are made when an agent or memory search opens the "
            "store, and found by their words until then",
            err=True,
        )


@contextmanager
def _bar(label: str) -> Iterator[Progress]:
    """A bar on stderr where that is a terminal."""
    with click.progressbar(length=100, label=label, file=sys.stderr) as bar:
        yield lambda done, whole: bar.update(100 * done // max(1, whole) - bar.pos)


@click.command("backup")
@STORE
@_FORCE
@click.argument("file")
def backup_command(store: str | None, force: bool, file: str) -> None:
    """Copy the whole store to FILE while it is in use."""
    with opened(store) as memory, _bar("copying") as progress:
        memory.backup(file, force=force, progress=progress)
    click.echo(f"backed up to {file}: {Path(file).stat().st_size:,} bytes", err=True)


@click.command("restore")
@STORE
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.argument("file")
def restore_command(store: str | None, yes: bool, file: str) -> None:
    """Put a backup in the place of the store; no process may have it open."""
    if is_url(str(place(store))):
        raise InputError("a PostgreSQL store is restored with the server's own tools, such as pg_restore")
    path = locate(place(store))
    if path is None:
        raise InputError("a store in memory cannot be restored; name a file with --store")
    if path.exists() and not yes:
        click.echo(f"{path} ({path.stat().st_size:,} bytes) will be replaced, and what it holds is gone", err=True)
        if not click.confirm("Replace it?", err=True):
            click.echo("nothing was changed", err=True)
            raise click.exceptions.Exit(1)
    with _bar("restoring") as progress:
        restore(Path(file), path, progress=progress)
    click.echo(f"restored {path}; its vector index is built anew when it is next searched", err=True)


_UNITS = {"h": 1, "d": 24, "w": 7 * 24}


def _age(_context: click.Context, _parameter: click.Parameter, value: str) -> timedelta:
    """A time such as 90d."""
    match = re.fullmatch(r"(\d{1,6})([hdw])", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a time; give a number and h, d or w, as in 90d")
    return timedelta(hours=int(match[1]) * _UNITS[match[2]])


@click.command("expire")
@STORE
@JSON
@click.option("--older-than", required=True, callback=_age, metavar="AGE", help="Such as 36h, 90d or 8w.")
@click.option("--namespace", default=None, help="Only this tenant.  [default: all]")
@click.option("--user", default=None, help="Only this user (of the namespace, or of the default one).")
@click.option("--pinned", is_flag=True, help="Pinned facts too; all that were remembered are pinned.")
@click.option("--dry-run", is_flag=True, help="Only count.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def expire_command(
    store: str | None,
    as_json_: bool,
    older_than: timedelta,
    namespace: str | None,
    user: str | None,
    pinned: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Forget completely what was said longer ago, and print the receipt."""
    part, before = _part(namespace, user), datetime.now(UTC) - older_than
    with opened(store) as memory:
        receipt = memory.expire(before, part, pinned=pinned, dry_run=True)
        counts = f"{receipt.removed['turns']} turns and {receipt.removed['facts']} facts"
        old = f"{counts} from before {before:%Y-%m-%d %H:%M} UTC"
        if not dry_run and not yes and not click.confirm(f"Forget {old} for good?", err=True):
            click.echo("nothing was forgotten", err=True)
            raise click.exceptions.Exit(1)
        if not dry_run:
            receipt = memory.expire(before, part, pinned=pinned)
    if as_json_:
        click.echo(json.dumps(as_json(receipt), indent=2))
    elif dry_run:
        click.echo(f"{old} would be forgotten")
    else:
        removed = ", ".join(f"{n} {table}" for table, n in receipt.removed.items() if n)
        click.echo(f"forgot {removed or 'nothing'}, {receipt.snapshots} snapshots")
        click.echo("looked again: nothing left" if receipt.verified else "looked again: NOT verified")
    if receipt.kept:
        click.echo(f"{receipt.kept} turns are of an exchange that is being said, and stay until it has ended", err=True)
    if not dry_run and not receipt.verified:
        click.echo("another process keeps the store's files busy; run it again when that has ended", err=True)
        raise click.exceptions.Exit(1)


@click.command("migrate")
@JSON
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
def migrate_command(source: str, target: str, as_json_: bool) -> None:
    """Copy a whole store into a new one, such as sqlite:///a.db into postgresql://USER@HOST/DATABASE.

    What arrived is compared with what was sent, and checked; the old store stays as it is.
    """
    taken = SqlStore.open(source, create=False)
    try:
        given = SqlStore.open(target)
        memory = Memory(given, None, RecallConfig())  # closes the store
        try:
            copied = move(taken, given, _say_rows)
            problems = memory.verify().problems
        finally:
            memory.close()
    finally:
        taken.close()
    if as_json_:
        click.echo(json.dumps({"copied": copied, "problems": problems}, indent=2))
    else:
        for problem in problems:
            click.echo(problem)
        counts = ", ".join(f"{n:,} {table}" for table, n in copied.items() if n)
        click.echo(f"copied {counts or 'nothing'}; {len(problems)} problems")
    if problems:
        raise click.exceptions.Exit(1)


def _say_rows(table: str, n: int) -> None:
    if n % 100_000 == 0:
        click.echo(f"{table}: {n:,} rows", err=True)


@click.command("reindex")
@STORE
@JSON
@click.option(
    "--embedder",
    default=None,
    type=click.Path(path_type=Path),
    help="Folder of a sentence-transformers model.  [default: all-MiniLM-L6-v2]",
)
def reindex_command(store: str | None, as_json_: bool, embedder: Path | None) -> None:
    """Make all vectors anew with another embedder. The old ones serve until the new ones are whole.

    Interrupted, it goes on where it was when it is run again.
    """
    chosen = SentenceTransformerEmbedder(embedder)
    with opened(store) as memory:
        done = memory.reindex(chosen, _say_texts)
    if as_json_:
        click.echo(json.dumps(as_json(done), indent=2))
        return
    click.echo(f"{done.name} serves now: {done.made:,} vectors made, {done.dropped:,} of before removed")
    click.echo("open the store again in every process that has it open", err=True)


def _say_texts(n_done: int, n_all: int) -> None:
    click.echo(f"\r{n_done:,} of {n_all:,} texts", err=True, nl=n_done >= n_all)


COMMANDS = (
    export_command, import_command, backup_command, restore_command, expire_command, migrate_command, reindex_command,
)  # fmt: skip
