"""``memstream memory list|search|show|forget|verify``: what an operator sees of a store."""

from __future__ import annotations

import json

import click

from memstream.cli import _operations
from memstream.cli._stores import JSON, STORE, opened, options
from memstream.errors import InputError
from memstream.memory import Memory, Scope
from memstream.report import Recalled, as_json, shown

_LINE_CHARS = 100


@click.group()
def command() -> None:
    """Look into the store: list, search, show, forget, verify; export, import, back up, expire."""


for operation in _operations.COMMANDS:
    command.add_command(operation)


def _scopes(memory: Memory, namespace: str, user: str | None) -> list[Scope]:
    """The user's scope, or those of all conversations without a user."""
    if user is not None:
        return [Scope(namespace, user)]
    users = memory.list_users(namespace)
    if users:
        shown = ", ".join(users[:10]) + (", ..." if len(users) > 10 else "")
        click.echo(f"without --user only conversations that have none; users here: {shown}", err=True)
    return [info.scope for info in memory.list_conversations(Scope(namespace))]


def _scope_of(memory: Memory, namespace: str, user: str | None, memory_id: str) -> Scope:
    """The scope in which an id can be looked up.

    Raises:
        InputError: there is no such memory for the user, or without a user.
    """
    if user is not None:
        return Scope(namespace, user)
    scope = memory.scope_of(memory_id)
    if scope is None or scope.user is not None or scope.namespace != namespace:
        raise InputError(f"there is no {memory_id} in conversations without a user; name the user with --user")
    return scope


def _line(item: Recalled) -> str:
    text = shown(" ".join(item.text.split()))
    text = text if len(text) <= _LINE_CHARS else text[: _LINE_CHARS - 1] + "…"
    return f"{item.id:12} {item.time:%Y-%m-%d %H:%M}  {item.role:9}  {text}"


def _print(items: list[Recalled], as_json_: bool, nothing: str) -> None:
    if as_json_:
        click.echo(json.dumps(as_json(items), indent=2, ensure_ascii=False))
        return
    for item in items:
        click.echo(_line(item))
    if not items:
        click.echo(nothing, err=True)


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
    with opened(store, search_vectors=True) as memory:
        scopes = _scopes(memory, namespace, user)
        found = [item for scope in scopes for item in memory.search(scope, query, limit=limit)]
    found.sort(key=lambda item: -item.why.score)
    if as_json_ or not found:
        _print(found[:limit], as_json_, f"nothing found for {query!r}")
        return
    for item in found[:limit]:
        click.echo(_line(item))
        dense = "-" if item.why.dense is None else f"{item.why.dense:.2f}"
        lexical = "-" if item.why.lexical is None else f"{item.why.lexical:.2f}"
        terms = f" ({', '.join(item.why.terms)})" if item.why.terms else ""
        click.echo(f"{'':12} score {item.why.score:.2f}: meaning {dense}, words {lexical}{terms}")


@command.command("show")
@options
@click.argument("memory_id", metavar="ID")
def show_command(store: str | None, user: str | None, namespace: str, as_json_: bool, memory_id: str) -> None:
    """Show one memory in full, such as turn:17 or fact:3."""
    with opened(store) as memory:
        item = memory.show(_scope_of(memory, namespace, user, memory_id), memory_id)
    if as_json_:
        click.echo(json.dumps(as_json(item), indent=2, ensure_ascii=False))
        return
    where = "" if item.conversation is None else f", conversation {item.conversation}"
    click.echo(f"{item.id}, {item.role}, {item.time:%Y-%m-%d %H:%M:%S} UTC{where}")
    click.echo(shown(item.text))


@command.command("forget")
@options
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.argument("memory_id", metavar="ID")
def forget_command(
    store: str | None, user: str | None, namespace: str, as_json_: bool, yes: bool, memory_id: str
) -> None:
    """Forget a memory completely, such as turn:17 or fact:3, and print the receipt."""
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
