"""Counts for Prometheus: numbers only, no text and no user in any label; a key sees those of its namespace."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, Sample
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from memstream.report import Reply
from memstream.serving.access import Keys
from memstream.serving.turns import Turn, Turns

if TYPE_CHECKING:
    from memstream.agent import Agent

_LABELS = ("namespace",)
_GAUGES = {
    "rows": "Caches for one conversation each.",
    "rows_allowed": "Those that are used; fewer while memory is short.",
    "open": "Conversations that are open.",
    "resident": "Those that have a row.",
    "process_bytes": "Memory of the process.",
    "cache_bytes": "Memory of the rows.",
    "swap_bytes": "Memory of conversations without a row.",
    "swap_file_bytes": "Files of conversations without a row.",
}
_COUNTERS = {
    "steps": "Forwards that decoded a token in each of some rows.",
    "tokens": "Tokens decoded by them.",
    "prefill_tokens": "Tokens computed otherwise.",
    "evictions": "Exchanges that left a window.",
    "swap_outs": "Rows copied out for another conversation.",
    "swap_ins": "Rows filled with what was copied.",
    "rebuilds": "Rows filled by computing stored turns again.",
    "pressure_events": "How often memory ran out, or nearly did.",
}
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """What a server counts.

    Args:
        agent: whose cache is told.

    Attributes:
        gather: what each of several processes has counted, by its name; None where this is the only one.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.gather: Callable[[], Awaitable[Mapping[str, list[Metric]]]] | None = None
        self._turns: Turns | None = None
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"memstream_{name}", text, (*_LABELS, *labels), registry=registry)

        self.turns = counter("turns", "Turns that ended, by how.", "finish_reason")
        self.failed = counter("failed_turns", "Turns that ended in an error, by its kind.", "error")
        self.prompt = counter("prompt_tokens", "Tokens computed before replies.")
        self.reply = counter("reply_tokens", "Tokens of replies.")
        self.recalled = counter("recalled_notes", "Memories put before the model.")
        self.evicted = counter("evicted_exchanges", "Exchanges that left the window.")
        self.first = Histogram(
            "memstream_first_piece_seconds",
            "From asking to the first piece.",
            _LABELS,
            buckets=_SECONDS,
            registry=registry,
        )
        registry.register(self)

    def watch(self, turns: Turns) -> None:
        """Tells how many turns run and wait from now on."""
        self._turns = turns

    def collect(self) -> Iterator[Metric]:
        """What is now, for ``/metrics``; of no namespace in particular."""
        state = self._agent.state()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"memstream_{name}", text, getattr(state, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"memstream_{name}", text, getattr(state, name))
        if self._turns is not None:
            n, waiting = self._turns.n_running, self._turns.n_waiting
            yield GaugeMetricFamily("memstream_requests_running", "Requests whose turn has a row.", n - waiting)
            yield GaugeMetricFamily("memstream_requests_waiting", "Requests that wait.", waiting)

    def begin(self, namespace: str) -> Told:
        """A turn that begins."""
        return Told(self, namespace)

    def add_route(self, app: FastAPI) -> None:
        """Adds ``/metrics``."""

        @app.get("/metrics", response_class=Response, tags=["operation"])
        async def metrics(request: Request) -> Response:
            """In Prometheus' text format: all of it, or with a namespace's key that namespace's."""
            keys: Keys = request.app.state.keys
            whole = keys.opens_metrics(request.headers)
            namespace = keys.namespace(request.headers)
            if not whole and namespace is None:
                raise HTTPException(401, "no valid key; send it as Authorization: Bearer KEY")
            counted = self.registry.collect() if self.gather is None else side_by_side(await self.gather())
            shown = _Shown(counted if whole else of_namespace(counted, namespace))
            return Response(generate_latest(shown), media_type=CONTENT_TYPE_LATEST)


class _Shown(CollectorRegistry):
    """Metrics to be written out."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def _with_samples(metric: Metric, samples: Iterable[Sample]) -> Metric:
    part = Metric(metric.name, metric.documentation, metric.type, metric.unit)
    part.samples = list(samples)
    return part


def of_namespace(metrics: Iterable[Metric], namespace: str | None) -> Iterator[Metric]:
    """What metrics tell of one namespace."""
    for metric in metrics:
        mine = _with_samples(metric, (s for s in metric.samples if s.labels.get("namespace") == namespace))
        if mine.samples:
            yield mine


def side_by_side(counted: Mapping[str, Iterable[Metric]]) -> list[Metric]:
    """The metrics of several processes as one; the label ``replica`` tells whose each number is."""
    merged: dict[str, Metric] = {}
    for name, metrics in counted.items():
        for metric in metrics:
            told = merged.setdefault(metric.name, _with_samples(metric, ()))
            told.samples += (s._replace(labels={**s.labels, "replica": name}) for s in metric.samples)
    return list(merged.values())


class Told:
    """What is counted of one turn."""

    def __init__(self, metrics: Metrics, namespace: str) -> None:
        self._metrics, self._namespace = metrics, namespace
        self._begun = time.perf_counter()
        self._first: float | None = None

    def first(self) -> None:
        """Notes the first piece."""
        self._metrics.first.labels(self._namespace).observe(time.perf_counter() - self._begun)

    def done(self, turn: Turn) -> Reply:
        """Counts a turn that ended, and gives its report."""
        reply, metrics, namespace = turn.reply, self._metrics, self._namespace
        assert reply is not None
        metrics.turns.labels(namespace, reply.finish_reason).inc()
        metrics.prompt.labels(namespace).inc(reply.usage.prompt_tokens)
        metrics.reply.labels(namespace).inc(reply.usage.reply_tokens)
        metrics.recalled.labels(namespace).inc(len(reply.recalled))
        metrics.evicted.labels(namespace).inc(len(reply.evicted))
        return reply

    def failed(self, error: BaseException) -> None:
        """Counts a turn that ended in an error."""
        self._metrics.failed.labels(self._namespace, type(error).__name__).inc()
