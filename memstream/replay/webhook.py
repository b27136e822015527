"""Posts alerts to a receiver that takes Alertmanager's webhook bodies (version 4)."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import urllib.request
from datetime import UTC, datetime
from typing import Any

from memstream.errors import ConfigError
from memstream.replay.events import Alert, Event
from memstream.report import as_json

_log = logging.getLogger(__name__)
_NEVER = "0001-01-01T00:00:00Z"  # what Alertmanager says of an alert that has not ended


def body(alert: Alert) -> dict[str, Any]:
    """The body that Alertmanager would send; free text is in annotations only."""
    labels = {"alertname": f"memstream.{alert.reason}", "stream": alert.stream, "incident": str(alert.incident)}
    if alert.level:
        labels["severity"] = alert.level.lower()
    annotations = {"summary": alert.message, "template": alert.template, "place": f"{alert.stream}:{alert.line}"}
    starts = alert.time or datetime.now(UTC)
    return {
        "version": "4",
        "groupKey": f"memstream:{alert.incident}",
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "memstream",
        "groupLabels": {"alertname": labels["alertname"]},
        "commonLabels": labels,
        "commonAnnotations": annotations,
        "externalURL": "",
        "alerts": [
            {
                "status": "firing",
                "labels": labels,
                "annotations": annotations,
                "startsAt": as_json(starts),
                "endsAt": _NEVER,
                "generatorURL": "",
                "fingerprint": f"{alert.incident:016x}",
            }
        ],
    }


class Webhook:
    """A sink that posts each alert from a thread of its own; a slow or dead receiver never holds up reading.

    Args:
        url: http or https.
        waiting: most alerts that wait to be sent; further ones are dropped and counted.
        retries: how often an alert is sent again after a failure, each time after twice as long.
        retry_s: seconds before the first retry.
        timeout_s: for one request.

    Attributes:
        n_sent: alerts that the receiver took.
        n_dropped: alerts that it did not, or that found no room.

    Raises:
        ConfigError: not an http address.
    """

    def __init__(
        self, url: str, *, waiting: int = 100, retries: int = 3, retry_s: float = 0.5, timeout_s: float = 5.0
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"webhook is {url!r}; it must begin with http:// or https://")
        self._url, self._retries, self._retry_s, self._timeout_s = url, retries, retry_s, timeout_s
        self._waiting: queue.Queue[Alert | None] = queue.Queue(waiting)
        self._closing = threading.Event()
        self.n_sent = 0
        self.n_dropped = 0
        self._thread = threading.Thread(target=self._run, name="memstream-webhook", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Queues an alert; other events are passed over."""
        if not isinstance(event, Alert):
            return
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self.n_dropped += 1

    def close(self, wait_s: float = 5.0) -> None:
        """Sends what still waits, for at most so many seconds."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=wait_s)
        self._thread.join(wait_s)
        self._closing.set()

    def _run(self) -> None:
        while (alert := self._waiting.get()) is not None:
            if self._send(json.dumps(body(alert)).encode()):
                self.n_sent += 1
            else:
                self.n_dropped += 1
                _log.warning("incident %d could not be posted to the webhook", alert.incident)

    def _send(self, data: bytes) -> bool:
        request = urllib.request.Request(self._url, data, {"Content-Type": "application/json"})
        for attempt in range(self._retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                    return bool(200 <= response.status < 300)
            except OSError as error:
                _log.info("webhook: %s", error)
            if attempt < self._retries and self._closing.wait(self._retry_s * 2**attempt):
                break
        return False
