"""``memstream memory ...``: what an operator sees of a store, and does to it."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from memstream.cli import operations
from memstream.cli.stores import JSON, STORE, opened, options
from memstream.errors import InputError
from memstream.memory import Memory, Scope
from memstream.memory.documents import Told
from memstream.report import Citation, Recalled, as_json, shown

_LINE_CHARS = 100


@click.group()
def command() -> None:
    """Look into the store and keep it in order."""


for operation in operations.COMMANDS:
    command.add_command(operation)


def _scopes(memory: Memory, namespace: str, user: str | None) -> list[Scope]:
    """The user's scope, or the shared knowledge and all conversations without a user."""
    if user is not None:
        return [Scope(namespace, user)]
    knowledge = Scope(namespace, knowledge=True)
    users = memory.list_users(namespace)
    if users:
        shown = ", ".join(users[:10]) + (", ..." if len(users) > 10 else "")
        click.echo(
            f"without --user only shared documents and conversations that have none; users here: {shown}", err=True
        )
    return [knowledge, *(info.scope for info in memory.list_conversations(Scope(namespace)))]


def _texts_of(namespace: str, user: str | None) -> Scope:
    """Whose documents are meant: the user's, or those that all may read."""
    return Scope(namespace, knowledge=True) if user is None else Scope(namespace, user)


def _scope_of(memory: Memory, namespace: str, user: str | None, memory_id: str) -> Scope:
    """The scope in which an id can be looked up.

    Raises:
        InputError: there is no such memory for the user, or without a user.
    """
    if user is not None:
        return Scope(namespace, user)
    scope = memory.scope_of(memory_id)
    if scope is None or scope.user is not None or scope.namespace != namespace:
        raise InputError(
            f"there is no {memory_id} among shared documents and conversations without a user; "
            "name the user with --user"
        )
    return scope


def _line(item: Recalled) -> str:
    text = shown(" ".join(item.text.split()))
    text = text if len(text) <= _LINE_CHARS else text[: _LINE_CHARS - 1] + "…"
    return f"{item.id:12} {item.time:%Y-%m-%d %H:%M}  {item.role:9}  {text}"


def _place(citation: Citation) -> str:
    lines = f"line {citation.first_line}"
    if citation.last_line != citation.first_line:
        lines = f"lines {citation.first_line} to {citation.last_line}"
    return shown(f"{citation}, {lines}")


def _print(items: list[Recalled], as_json_: bool, nothing: str) -> None:
    if as_json_:
        click.echo(json.dumps(as_json(items), indent=2, ensure_ascii=False))
        return
    for item in items:
        click.echo(_line(item))
    if not items:
        click.echo(nothing, err=True)


@command.command("add")
@options
@click.option("--sync", is_flag=True, help="Also remove documents of files that are gone from the folders.")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
def add_command(
    store: str | None, user: str | None, namespace: str, as_json_: bool, sync: bool, paths: tuple[str, ...]
) -> None:
    """Add documents: Markdown, text, JSON lines (one record a line), or folders of them.

    All conversations of the namespace may recall them; with --user, only theirs. Added again, only what changed is.
    """
    scope = _texts_of(namespace, user)
    with opened(store, vectors=True, create=True) as memory, _progress() as told:
        report = memory.add_documents(scope, paths, sync=sync, told=told)
        memory.flush()
    if as_json_:
        click.echo(json.dumps(as_json(report), indent=2))
        return
    kept = f" ({report.n_passages_kept} kept)" if report.n_passages_kept else ""
    click.echo(
        f"{len(report.added)} added, {len(report.changed)} changed, {len(report.removed)} removed, "
        f"{report.n_unchanged} unchanged; {report.n_passages_new} new passages{kept}"
    )


@contextmanager
def _progress() -> Iterator[Told]:
    """Says on a terminal how many documents are done, and which was the last."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.text import Text

    done = itertools.count(1)
    with Console(stderr=True).status("reading") as status:
        yield lambda name: status.update(Text(f"{next(done)}: {shown(name)}"))


@command.command("documents")
@options
def documents_command(store: str | None, user: str | None, namespace: str, as_json_: bool) -> None:
    """List the documents that all may read, or a user's own."""
    with opened(store) as memory:
        found = memory.documents(_texts_of(namespace, user))
    if as_json_:
        click.echo(json.dumps(as_json(found), indent=2, ensure_ascii=False))
        return
    for item in found:
        where = shown(item.path or item.name)
        title = f"  {shown(item.title)}" if item.title else ""
        click.echo(f"{item.id:12} {item.updated:%Y-%m-%d %H:%M}  {item.n_passages:4} passages  {where}{title}")
    if not found:
        click.echo("there are no documents there", err=True)


@command.command("list")
@options
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1), help="The newest so many turns.")
def list_command(store: str | None, user: str | None, namespace: str, as_json_: bool, limit: int) -> None:
    """List the newest memories, oldest of them first."""
    with opened(store) as memory:
        found = [item for scope in _scopes(memory, namespace, user) for item in memory.memories(scope, limit=limit)]
    found.sort(key=lambda item: item.time)
    _print(found[-limit:], as_json_, "nothing is remembered there")


@command.command("search")
@options
@click.option("--limit", default=10, show_default=True, type=click.IntRange(1), help="The best so many.")
@click.argument("query")
def search_command(store: str | None, user: str | None, namespace: str, as_json_: bool, limit: int, query: str) -> None:
    """Search memories, best first, and tell why each was found."""
    with opened(store, vectors=True) as memory:
        scopes = _scopes(memory, namespace, user)
        every = [item for scope in scopes for item in memory.search(scope, query, limit=limit)]
    best: dict[str, Recalled] = {}
    for item in sorted(every, key=lambda item: -item.why.score):
        best.setdefault(item.id, item)  # shared passages are found from every conversation
    found = list(best.values())
    if as_json_ or not found:
        _print(found[:limit], as_json_, f"nothing found for {query!r}")
        return
    for item in found[:limit]:
        click.echo(_line(item))
        dense = "-" if item.why.dense is None else f"{item.why.dense:.2f}"
        lexical = "-" if item.why.lexical is None else f"{item.why.lexical:.2f}"
        terms = f" ({', '.join(item.why.terms)})" if item.why.terms else ""
        if item.citation is not None:
            click.echo(f"{'':12} from {_place(item.citation)}")
        click.echo(f"{'':12} score {item.why.score:.2f}: meaning {dense}, words {lexical}{terms}")


@command.command("show")
@options
@click.argument("memory_id", metavar="ID")
def show_command(store: str | None, user: str | None, namespace: str, as_json_: bool, memory_id: str) -> None:
    """Show one memory in full, such as turn:17, fact:3, passage:5 or document:2."""
    with opened(store) as memory:
        item = memory.show(_scope_of(memory, namespace, user, memory_id), memory_id)
    if as_json_:
        click.echo(json.dumps(as_json(item), indent=2, ensure_ascii=False))
        return
    where = "" if item.conversation is None else f", conversation {item.conversation}"
    where = where if item.citation is None else f", {_place(item.citation)}"
    click.echo(f"{item.id}, {item.role}, {item.time:%Y-%m-%d %H:%M:%S} UTC{where}")
    click.echo(shown(item.text))


@command.command("forget")
@options
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.argument("memory_id", metavar="ID")
def forget_command(
    store: str | None, user: str | None, namespace: str, as_json_: bool, yes: bool, memory_id: str
) -> None:
    """Forget a memory completely, such as turn:17, fact:3 or document:2, and print the receipt."""
    with opened(store) as memory:
        scope = _scope_of(memory, namespace, user, memory_id)
        item = memory.show(scope, memory_id)
        if not yes:
            click.echo(_line(item), err=True)
            if not click.confirm("Forget this for good?", err=True):
                click.echo("nothing was forgotten", err=True)
                raise click.exceptions.Exit(1)
        receipt = memory.forget(scope, memory_id)
    if as_json_:
        click.echo(json.dumps(as_json(receipt), indent=2))
    else:
        removed = ", ".join(f"{n} {table}" for table, n in receipt.removed.items() if n)
        click.echo(f"forgot {receipt.id}: {removed}, {receipt.snapshots} snapshots")
        click.echo("searched again: nothing left" if receipt.verified else "searched again: NOT verified")
    if receipt.echoes:
        click.echo(f"these quote it and are still there: {', '.join(receipt.echoes)}", err=True)
    click.echo("conversations that are open in other processes keep what they have read until they close", err=True)
    if not receipt.verified:
        click.echo("another process keeps the store's files busy; stop it, then run: memstream memory verify", err=True)
        raise click.exceptions.Exit(1)


@command.command("verify")
@STORE
@JSON
@click.option("--repair", is_flag=True, help="Mend what can be made from the turns, and say what was done.")
def verify_command(store: str | None, as_json_: bool, repair: bool) -> None:
    """Check that the whole store is in order (all users); exit status 1 if not."""
    with opened(store) as memory:
        repaired = memory.repair() if repair else None
        report = memory.verify() if repaired is None else repaired.after
    if as_json_:
        click.echo(json.dumps(as_json(report if repaired is None else repaired), indent=2))
    else:
        for line in repaired.done if repaired is not None else ():
            click.echo(f"repaired: {line}")
        for problem in report.problems:
            click.echo(problem)
        counts = ", ".join(f"{n} {table}" for table, n in report.counts.items())
        click.echo(f"{len(report.problems)} problems in {counts}; {report.pending} texts wait for their vector")
    if report.problems and repair:
        click.echo(
            "what is left cannot be made from the turns: restore a backup (memstream memory restore), or save what is "
            "readable with sqlite3's .recover",
            err=True,
        )
    if report.problems:
        raise click.exceptions.Exit(1)
