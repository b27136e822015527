"""The server as a Ray Serve deployment: replicas with an agent each, over one PostgreSQL store."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from prometheus_client.core import Metric
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from memstream.bots import open_agent
from memstream.errors import ConfigError, MemstreamError
from memstream.memory import SqlStore
from memstream.serving.access import Keys
from memstream.serving.affinity import ConversationRouter
from memstream.serving.app import create_app
from memstream.serving.settings import DEFAULTS, ServerConfig
from memstream.stores.postgres import is_url

_NAME = "memstream"
_BESIDES = 1000  # requests at once that do not wait: turns that have a row or are refused, and what is no turn
_CLOSING_S = 10  # beyond the drain time
_TRIES = 1  # of a replica on this machine; in a cluster, Ray's own number


@serve.ingress()
class Replica:
    """An agent, and the server over it.

    Args:
        values: an agent's settings.
        config: limits of the server.
        keys: who may ask.
    """

    def __init__(self, values: Mapping[str, Any], config: ServerConfig, keys: Keys) -> None:
        self._open = contextlib.ExitStack()
        agent, talk = open_agent(values)
        self._open.enter_context(agent)
        self._app = create_app(
            agent, model=Path(values["model"]).name, rows=values["rows"], config=config, keys=keys, talk=talk
        )
        self._app.state.metrics.gather = self._gather

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def __del__(self) -> None:
        self._open.close()

    async def _gather(self) -> Mapping[str, list[Metric]]:
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        counted = await handle.broadcast("counted").results_async(return_exceptions=True)
        return dict(each for each in counted if not isinstance(each, BaseException))

    async def counted(self) -> tuple[str, list[Metric]]:
        """The replica's name, and what it has counted."""
        return serve.get_replica_context().replica_id.unique_id, list(self._app.state.metrics.registry.collect())

    async def drain(self) -> None:
        """Takes no new turn, and waits for the running ones; after the drain time they are stored as cut."""
        await self._app.state.turns.drain()


def application(args: dict[str, Any]) -> serve.Application:
    """What a Serve config file names as its ``import_path``; keys come from ``$MEMSTREAM_API_KEY``.

    Args:
        args: an agent's settings, and a table ``serve``, as in the TOML file of ``memstream serve``.

    Raises:
        ConfigError: a setting is wrong, or there is no key.
        StoreError: the store cannot be used.
    """
    values = {**DEFAULTS, **args}
    config = ServerConfig.from_mapping(values.pop("serve", {}))
    keys = Keys(
        os.environ.get("MEMSTREAM_API_KEY", "").split(),
        metrics_key=os.environ.get("MEMSTREAM_METRICS_KEY"),
        default=values.get("namespace", "default"),
    )
    if not keys:
        raise ConfigError("a cluster can be reached by others, so it needs a key: set MEMSTREAM_API_KEY on its nodes")
    return deployment(values, config).bind(values, config, keys)


def deployment(values: Mapping[str, Any], config: ServerConfig) -> serve.Deployment:
    """The deployment of ``Replica``: requests of one conversation go to one replica.

    Raises:
        ConfigError: the store is none that several replicas can share.
        StoreError: it cannot be used.
    """
    store = values.get("store")
    if store is None or not is_url(store):
        raise ConfigError("replicas share one database; give --store postgresql://USER@HOST/DATABASE")
    SqlStore.open(store).close()  # its tables are made before the replicas need them
    return serve.deployment(
        name=_NAME,
        max_ongoing_requests=config.max_waiting + _BESIDES,
        graceful_shutdown_timeout_s=config.drain_s + _CLOSING_S,
        request_router_config=RequestRouterConfig(request_router_class=ConversationRouter),
        logging_config=_logging(),
    )(Replica)


def share(resources: Mapping[str, float], replicas: int, *, device: str) -> dict[str, float]:
    """What each of a machine's replicas gets of its CPUs and GPUs: whole ones where there are enough."""

    def of(name: str) -> float:
        each = resources.get(name, 0.0) / replicas
        return float(int(each)) if each >= 1 else each

    return {"num_cpus": of("CPU"), "num_gpus": 0.0 if device == "cpu" else min(of("GPU"), 1.0)}


@contextlib.contextmanager
def running(
    values: Mapping[str, Any], config: ServerConfig, keys: Keys, *, host: str, port: int, replicas: int
) -> Iterator[None]:
    """Serves on Ray on this machine; in the end, running replies have the drain time.

    Args:
        values: an agent's settings, with those of ``DEFAULTS``.
        config: limits of each replica.
        keys: who may ask.
        host: address to listen on.
        port: the same.
        replicas: how many.

    Raises:
        ConfigError: the store is none that several replicas can share.
        StoreError: it cannot be used.
        MemstreamError: a replica could not be started; the message has its error.
    """
    made = deployment(values, config)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray.init("local", include_dashboard=False, logging_level=logging.WARNING)
    try:
        serve.start(http_options=HTTPOptions(host=host, port=port), logging_config=_logging())
        actor = share(ray.cluster_resources(), replicas, device=values.get("device", "auto"))
        made = made.options(num_replicas=replicas, ray_actor_options=actor, max_constructor_retry_count=_TRIES)
        try:
            handle = serve.run(made.bind(values, config, keys), name=_NAME)
        except RuntimeError as error:
            raise MemstreamError(f"the replicas cannot be started: {_reason(error)}") from error
        yield
        handle.broadcast("drain").results(return_exceptions=True)
        serve.delete(_NAME)
    finally:
        ray.shutdown()


def _reason(error: RuntimeError) -> str:
    """The error of the replica that failed last; Ray's own where there is none."""
    told = [
        part.message.strip().splitlines()[-1]
        for application in serve.status().applications.values()
        for part in application.deployments.values()
        if part.message.strip()
    ]
    return told[-1] if told else str(error)


def _logging() -> LoggingConfig:
    return LoggingConfig(log_level="WARNING", enable_access_log=False)
