"""``memstream serve``: an OpenAI-compatible server that keeps conversations."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from memstream.bots import open_agent, read_settings
from memstream.config import WeightsChoice
from memstream.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from memstream.serving import Keys, ServerConfig


@click.command("serve")
@click.option(
    "--config", "config_file", type=click.Path(), default=None, help="TOML: an agent's settings, [serve], and [bot]."
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
@click.option("--ray", "on_ray", is_flag=True, help="Serve with several replicas on Ray, over a PostgreSQL store.")
@click.option("--replicas", type=click.IntRange(1), default=None, help="With --ray: how many.  [default: 2]")
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
    on_ray: bool,
    replicas: int | None,
) -> int:
    """Serve a model over HTTP, as OpenAI's API; conversations are kept by the server, and remembered.

    SIGTERM ends it once running replies are done; SIGHUP begins it anew with the same settings, while clients wait.
    """
    if replicas is not None and not on_ray:
        raise ConfigError("--replicas needs --ray: without it, one process serves")
    values: dict[str, Any] = {} if config_file is None else read_settings(Path(config_file))
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
        from memstream.serving.settings import DEFAULTS
    except ImportError as error:
        raise MissingExtraError(f"serving needs {error.name}: pip install 'memstream[serve]'") from error

    values = {**DEFAULTS, **values}
    config = ServerConfig.from_mapping(limits)
    allowed = Keys(keys, metrics_key=metrics_key, default=values.get("namespace", "default"))
    check_exposed(host, allowed)
    if page and not has_page():
        page = False
        click.echo("there is no page, as nicegui is not installed: pip install 'memstream[serve]'", err=True)
    listening = listen(host, port)
    if on_ray:
        with listening:
            host, port = listening.getsockname()[:2]  # it is free, and from now on Ray's
        return _on_ray(values, config, allowed, host=host, port=port, replicas=replicas or 2)
    with listening:
        click.echo("loading the model ...", err=True)
        agent, talk = open_agent(values)
        with agent:
            name = Path(values["model"]).name
            app = create_app(
                agent,
                model=name,
                rows=values["rows"],
                config=config,
                keys=allowed,
                talk=talk,
                hosts=[host],
                with_page=page,
            )
            at, size = listening.getsockname()[:2], agent.cache_bytes / 2**20
            where = _address(*at)
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


def _on_ray(values: dict[str, Any], config: ServerConfig, keys: Keys, *, host: str, port: int, replicas: int) -> int:
    try:
        from memstream.serving.replicas import running
    except ImportError as error:
        raise MissingExtraError(f"--ray needs {error.name}: pip install 'memstream[postgres,ray,serve]'") from error

    stopped = threading.Event()
    click.echo("starting Ray and the replicas ...", err=True)
    with running(values, config, keys, host=host, port=port, replicas=replicas):
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(sig, lambda *_: stopped.set())
        click.echo(
            f"{Path(values['model']).name} at {_address(host, port)}/v1: {replicas} replicas with {values['rows']} "
            "conversations at once each; Ctrl-C stops",
            err=True,
        )
        stopped.wait()
    return 0


def _address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
