"""``memstream serve``: an OpenAI-compatible server that keeps conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from memstream.config import WeightsChoice, read_toml
from memstream.errors import MissingExtraError


@click.command("serve")
@click.option(
    "--config", "config_file", type=click.Path(), default=None, help="TOML: an agent's settings, and [serve]."
)
@click.option("--model", default=None, help="Alias, hub id, folder or .gguf file.  [default: smollm2-135m]")
@click.option(
    "--weights", type=click.Choice(get_args(WeightsChoice)), default=None, help="Form of the model's weights."
)
@click.option("--store", default=None, help="Store: a path or URL; 'memory' keeps nothing.")
@click.option("--system", default=None, help="System text where a request brings none.")
@click.option("--rows", type=click.IntRange(1), default=None, help="Conversations that reply at once.  [default: 8]")
@click.option("--cache-tokens", type=int, default=None, help="Size of each one's cache.  [default: 2048]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address; beyond this machine it takes a key.")
@click.option("--port", type=int, default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--api-key",
    "keys",
    multiple=True,
    envvar="MEMSTREAM_API_KEY",
    help="KEY or NAMESPACE=KEY, repeatable; better in $MEMSTREAM_API_KEY, where other users do not see it.",
)
@click.option(
    "--metrics-key", envvar="MEMSTREAM_METRICS_KEY", default=None, help="Reads the metrics of all namespaces."
)
@click.option("--page/--no-page", default=True, show_default=True, help="The page at /, to talk in a browser.")
@click.pass_context
def command(
    context: click.Context,
    config_file: str | None,
    model: str | None,
    weights: WeightsChoice | None,
    store: str | None,
    system: str | None,
    rows: int | None,
    cache_tokens: int | None,
    host: str,
    port: int,
    keys: tuple[str, ...],
    metrics_key: str | None,
    page: bool,
) -> int:
    """Serve a model over HTTP, as OpenAI's API; conversations are kept by the server, and remembered.

    SIGTERM ends it once running replies are done; SIGHUP begins it anew with the same settings, while clients wait.
    """
    values: dict[str, Any] = {
        "rows": 8,
        "model": "smollm2-135m",
        **({} if config_file is None else read_toml(config_file)),
    }
    limits = values.pop("serve", {})
    given = {"model": model, "weights": weights, "store": store, "system": system, "rows": rows}
    values.update({name: value for name, value in given.items() if value is not None})
    if cache_tokens is not None:
        values["cache"] = {**values.get("cache", {}), "cache_tokens": cache_tokens}
    try:
        from memstream.serving import (
            Keys,
            Server,
            ServerConfig,
            begin_anew,
            check_exposed,
            create_app,
            has_page,
            listen,
        )
    except ImportError as error:
        raise MissingExtraError(f"serving needs {error.name}: pip install 'memstream[serve]'") from error

    config = ServerConfig.from_mapping(limits)
    allowed = Keys(keys, metrics_key=metrics_key, default=values.get("namespace", "default"))
    check_exposed(host, allowed)
    if page and not has_page():
        page = False
        click.echo("there is no page, as nicegui is not installed: pip install 'memstream[serve]'", err=True)
    listening = listen(host, port)
    from memstream.agent import Agent

    with listening:
        click.echo("loading the model ...", err=True)
        with Agent.from_mapping(values) as agent:
            name = Path(values["model"]).name
            app = create_app(
                agent, model=name, rows=values["rows"], config=config, keys=allowed, hosts=[host], with_page=page
            )
            at, size = listening.getsockname()[:2], agent.cache_bytes / 2**20
            where = f"http://{f'[{at[0]}]' if ':' in at[0] else at[0]}:{at[1]}"
            told = (
                f"{name} at {where}/v1: {values['rows']} conversations at once, {size:.0f} MiB of cache; Ctrl-C stops"
            )
            if page:
                told += f"\nto talk in a browser: {where}/"
            server = Server(
                app,
                config,
                access_log=context.find_root().params["verbose"] > 0,
                ready=lambda: click.echo(told, err=True),
            )
            server.run_on(listening)
        if server.reloads:
            begin_anew(listening)
    return 0
