"""Settings of a replay: frozen, keyword-only, checking themselves."""

from __future__ import annotations

import codecs
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from memstream.config import CacheConfig, Settings, check_choice, check_range
from memstream.errors import ConfigError

LogFormat = Literal["auto", "raw", "json", "logfmt", "syslog", "bgl"]
ThresholdKind = Literal["quantile", "deviations", "surprise"]


class Threshold(NamedTuple):
    """When a line stands out: above a quantile of the scores, so many deviations above their mean, or so surprising."""

    kind: ThresholdKind
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig(Settings):
    """How a log is read, scored and judged.

    Attributes:
        format: how lines begin: ``bgl``, ``json``, ``logfmt``, ``syslog``, ``raw`` (no header), or ``auto``, which
            tells line by line.
        encoding: of streams without a byte order mark.
        follow: True waits for more at the end of a file, through rotation and truncation.
        idle_s: after so many seconds without bytes a followed line without its end is taken as it is.
        score: which lines the language model reads: ``novel`` those of new or changed templates, ``all``, or
            ``sample:K`` every K-th line besides.
        threshold: ``q0.98`` alerts above what 98 % of the scores so far stay below; ``z4`` above their mean plus 4
            deviations; ``nll6`` where the surprise of a line is above 6 nats per token.
        burn_in_lines: lines that are read before the first alert, so that there is something to compare with.
        incident_lines: an incident ends when its template has not been seen for this many lines,
        incident_s: or for so many seconds of the log's own time.
        max_alerts_per_hour: of the log's own time; further ones are held back and counted. 0: no limit.
        rates: also alert where a template comes much more often than it did, or falls silent.
        ignore_level: True leaves the severity that a line states out of its score.
        sinks: how many of the first scored lines are pinned at the start of the cache; where they would take more than
            it can pin, their beginnings.
        dictionary_lines: the most frequent templates are put into the memory segment anew after so many scored lines.
        piece_lines: most lines computed in one forward; changes speed, never a score.
        max_line_tokens: a longer message is scored by its first so many tokens.
        max_line_bytes: a longer line is cut there while it is read, and marked as truncated.
        max_event_lines: most lines, such as those of a stack trace, that are joined into one event.
        max_templates: most line templates kept; the one not seen for longest leaves first.
        checkpoint_lines: with a state folder, progress is saved after so many lines at the latest.
    """

    format: LogFormat = "auto"
    encoding: str = "utf-8"
    follow: bool = False
    idle_s: float = 2.0
    score: str = "novel"
    threshold: str = "q0.98"
    burn_in_lines: int = 100
    incident_lines: int = 1000
    incident_s: float = 1800.0
    max_alerts_per_hour: int = 60
    rates: bool = True
    ignore_level: bool = False
    sinks: int = 2
    dictionary_lines: int = 1000
    piece_lines: int = 64
    max_line_tokens: int = 128
    max_line_bytes: int = 102_400
    max_event_lines: int = 200
    max_templates: int = 10_000
    checkpoint_lines: int = 5000

    def __post_init__(self) -> None:
        check_choice(self, "format", LogFormat)
        for field in ("burn_in_lines", "sinks", "max_alerts_per_hour"):
            check_range(self, field, 0)
        for field in (
            "incident_lines",
            "piece_lines",
            "dictionary_lines",
            "max_line_tokens",
            "max_event_lines",
            "max_templates",
            "checkpoint_lines",
        ):
            check_range(self, field, 1)
        check_range(self, "idle_s", 0.05, 3600)
        check_range(self, "incident_s", 1)
        check_range(self, "max_line_bytes", 64)
        try:
            codecs.lookup(self.encoding)
        except (LookupError, TypeError) as error:
            raise ConfigError(f"ReplayConfig.encoding is {self.encoding!r}, which Python does not know") from error
        _ = self.limit, self.sample

    @property
    def sample(self) -> int:
        """Every how many lines one is scored besides those of new templates; 0: none, 1: all."""
        if self.score in ("novel", "all"):
            return int(self.score == "all")
        kind, _, number = str(self.score).partition(":")
        if kind != "sample" or not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"ReplayConfig.score is {self.score!r}; allowed: 'novel', 'all', 'sample:K', K from 1")
        return int(number)

    @property
    def limit(self) -> Threshold:
        """What ``threshold`` names."""
        text = self.threshold if isinstance(self.threshold, str) else ""
        kinds: tuple[tuple[str, ThresholdKind, float], ...] = (
            ("q", "quantile", 1.0),
            ("z", "deviations", math.inf),
            ("nll", "surprise", math.inf),
        )
        for prefix, kind, below in kinds:
            try:
                value = float(text[len(prefix) :]) if text.startswith(prefix) else 0.0
            except ValueError:
                continue
            if 0.0 < value < below:
                return Threshold(kind, value)
        raise ConfigError(
            f"ReplayConfig.threshold is {self.threshold!r}; allowed: q and a number between 0 and 1, as in q0.99, z "
            "and a number of deviations, as in z4, or nll and nats per token, as in nll6"
        )

    def pinned_line_tokens(self, cache: CacheConfig) -> int:
        """How many tokens of each of the first ``sinks`` lines are pinned: all, or as many as the cache can pin.

        Raises:
            ConfigError: the cache cannot pin so many lines, or its memory is not ``after_sinks``.
        """
        if cache.memory_position != "after_sinks":
            raise ConfigError(f"CacheConfig.memory_position is {cache.memory_position!r}; a replay needs 'after_sinks'")
        most = min(cache.max_pinned, cache.total - cache.memory_tokens - cache.evict_tokens)
        if self.sinks > most:
            raise ConfigError(
                f"ReplayConfig.sinks is {self.sinks}, but a cache of {cache.total} tokens can pin {most} at most; "
                "lower it or raise cache_tokens"
            )
        return min(self.max_line_tokens, most // max(1, self.sinks))
