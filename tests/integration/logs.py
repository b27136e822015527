"""Small logs and a replay of them on a tiny random model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memstream.config import CacheConfig
from memstream.models import LoadedModel
from memstream.replay import Alert, Event, Replay, Summary
from memstream.replay.config import ReplayConfig
from tests.integration import tiny

CACHE = CacheConfig(sink_tokens=4, memory_tokens=16, window_tokens=200, evict_tokens=16, memory_position="after_sinks")
CONFIG = ReplayConfig(burn_in_lines=20, max_line_tokens=32)


def loaded(seed: int = 0) -> LoadedModel:
    return LoadedModel(
        model=tiny.model(seed=seed),
        tokenizer=tiny.tokenizer(),
        name="tiny",
        fingerprint="tiny",
        weights="float32",
        source="code",
    )


def messages(n: int) -> list[str]:
    """Lines of four kinds, with a new kind now and then."""
    kinds = ["disk {} ok", "user u{} logged in", "cache miss at {}", "job {} done in 3 ms"]
    return [
        kinds[i % 4].format(i * 37 % 1000) if i % 50 != 49 else f"odd {'x' * (i // 50 + 1)} happened" for i in range(n)
    ]


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def bgl(message: str, i: int, *, label: str = "-", level: str = "INFO") -> str:
    node = f"R0{i % 4}-M1-N0-C:J12-U11"
    return f"{label} {1117838570 + i} 2005.06.03 {node} 2005-06-03-15.42.50.675872 {node} RAS KERNEL {level} {message}"


def replay(source: Any, config: ReplayConfig = CONFIG, **settings: Any) -> tuple[list[Alert], Summary]:
    """Runs a replay to its end; checks what holds for every run."""
    settings = {"model": loaded(), "cache": CACHE, "embedder": tiny.WordEmbedder(), **settings}
    with Replay(source, config=config, **settings) as running:
        events: list[Event] = list(running)
    *alerts, summary = events
    assert isinstance(summary, Summary)
    assert all(isinstance(alert, Alert) for alert in alerts)
    assert summary.lines == summary.scored + summary.counted + summary.empty
    assert summary.unfinished == 0
    assert summary.alerts == len(alerts)
    assert summary.cache_bytes_start == summary.cache_bytes_end
    return [alert for alert in alerts if isinstance(alert, Alert)], summary
