"""Serves counts of a replay to Prometheus: numbers only, no text of the log in any label."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from memstream.errors import ReplayError
from memstream.replay.events import Alert, Event, Summary

_COUNTERS = {
    "lines": "Lines read.",
    "scored": "Events that the model read.",
    "counted": "Events of known templates.",
    "joined": "Lines that belong to the event before them.",
    "empty": "Lines without a message.",
    "truncated": "Lines longer than the cap.",
    "decode_errors": "Bytes that could not be decoded.",
    "held_back": "Lines above the threshold that gave no alert.",
    "repeats": "Lines counted into open incidents.",
    "stored": "Lines written to the store.",
    "tokens": "Tokens computed.",
    "evicted": "Lines that have left the window.",
}
_GAUGES = {
    "templates": ("templates", "Templates known."),
    "cache_bytes_end": ("cache_bytes", "Size of the key/value cache."),
    "lag_bytes": ("lag_bytes", "Bytes of followed files that were not read yet."),
}


def exposition(summary: Summary, alerts: Counter[str]) -> str:
    """The text that Prometheus reads (format 0.0.4)."""
    lines: list[str] = []
    for name, text in _COUNTERS.items():
        full = f"memstream_replay_{name}_total"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} counter", f"{full} {getattr(summary, name)}"]
    lines += ["# HELP memstream_replay_alerts_total Alerts given.", "# TYPE memstream_replay_alerts_total counter"]
    lines += [
        f'memstream_replay_alerts_total{{reason="{reason}"}} {alerts[reason]}'
        for reason in ("score", "rate", "silence")
    ]
    for field, (name, text) in _GAUGES.items():
        full = f"memstream_replay_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} gauge", f"{full} {getattr(summary, field)}"]
    return "\n".join(lines) + "\n"


class MetricsServer:
    """A sink that counts alerts, and serves ``/metrics`` on a port of this machine.

    Args:
        port: 0 takes a free one.
        summary: asked at each request how far the replay is.

    Attributes:
        port: the port.

    Raises:
        ReplayError: the port is taken, or may not be used.
    """

    def __init__(self, port: int, summary: Callable[[], Summary]) -> None:
        alerts: Counter[str] = Counter()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != "/metrics":
                    self.send_error(404)
                    return
                data = exposition(summary(), alerts).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are not logged."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise ReplayError(f"cannot serve metrics on port {port}: {error}") from error
        self.port = int(self._server.server_address[1])
        self._alerts = alerts
        self._thread = threading.Thread(target=self._server.serve_forever, name="memstream-metrics", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Counts alerts by reason."""
        if isinstance(event, Alert):
            self._alerts[event.reason] += 1

    def close(self) -> None:
        """Ends serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
