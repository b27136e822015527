"""Settings: frozen, keyword-only, checking themselves. Standard library only."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

from memstream.errors import ConfigError, StoreError

MemoryPosition = Literal["before_turn", "after_sinks"]
KernelChoice = Literal["auto", "torch", "native", "triton"]
KvDtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
SummarizerChoice = Literal["extractive", "model"]
WeightsChoice = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]


def memstream_home() -> Path:
    """Folder for converted models and the default store: ``$MEMSTREAM_HOME`` or ``~/.cache/memstream``."""
    return Path(os.environ.get("MEMSTREAM_HOME") or "~/.cache/memstream").expanduser()


def default_store() -> Path:
    """``$MEMSTREAM_HOME/memstream.db``; the folder is made, for its owner only.

    Raises:
        StoreError: it cannot be made.
    """
    home = memstream_home()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot create {home}: {error.strerror}; set MEMSTREAM_HOME to a folder of yours") from error
    return home / "memstream.db"


def kernel_choice() -> KernelChoice:
    """Which implementation of the kernels is asked for by ``$MEMSTREAM_KERNELS``: ``auto`` (the default), ``torch``,
    ``native`` (C, on the CPU) or ``triton`` (on a card).

    Raises:
        ConfigError: another value.
    """
    asked = os.environ.get("MEMSTREAM_KERNELS") or "auto"
    if asked not in get_args(KernelChoice):
        raise ConfigError(f"MEMSTREAM_KERNELS is {asked!r}; allowed: {_listed(KernelChoice)}")
    return cast(KernelChoice, asked)


def _listed(choice: Any) -> str:
    """The allowed values of a Literal, for a message."""
    return ", ".join(repr(value) for value in get_args(choice))


def check_range(owner: object, field: str, low: float, high: float | None = None) -> None:
    """Raises ConfigError unless ``low <= owner.field <= high``."""
    value = getattr(owner, field)
    allowed = f"at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ConfigError(f"{type(owner).__name__}.{field} is {value!r}; it must be a number {allowed}")
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{type(owner).__name__}.{field} is {value}; allowed is {allowed}")


def check_choice(owner: object, field: str, choice: Any) -> None:
    """Raises ConfigError unless ``owner.field`` is one of a Literal's values."""
    value = getattr(owner, field)
    if value not in get_args(choice):
        raise ConfigError(f"{type(owner).__name__}.{field} is {value!r}; allowed: {_listed(choice)}")


def retention_of(days: float | None) -> timedelta | None:
    """How long turns are kept; None where they are kept for ever.

    Raises:
        ConfigError: it is not a number of days above 0, up to a hundred years.
    """
    if days is None:
        return None
    if isinstance(days, bool) or not isinstance(days, (int, float)) or not 0 < days <= 36_525:
        raise ConfigError(f"retention_days is {days!r}; it must be a number above 0, up to 36525")
    return timedelta(days=days)


def limit_of(name: str, value: int | None) -> int | None:
    """A number that something may reach at most; None where there is no limit.

    Raises:
        ConfigError: it is not a whole number of at least 0.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 0, or left out")
    return value


class Settings:
    """Reading from mappings, shared by every settings class; unknown keys are errors."""

    __slots__ = ()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Builds the settings from a mapping such as one TOML table.

        Raises:
            ConfigError: for an unknown key, naming it and the known ones, or a value out of range.
        """
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(f"unknown key {unknown[0]!r} for {cls.__name__}; known keys: {', '.join(known)}")
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(Settings):
    """Size and shape of the key/value cache: sink | memory | window.

    Attributes:
        sink_tokens: tokens pinned at the start, never evicted; a longer system turn is pinned whole.
        memory_tokens: room for recalled text, in tokens.
        window_tokens: room for the latest turns, in tokens; None: what ``cache_tokens`` leaves.
        cache_tokens: the sum of the three, which is what is allocated; None: their sum.
        evict_tokens: how many tokens an eviction frees at least.
        chunk_tokens: the longest piece computed in one forward.
        max_pinned_tokens: the longest system turn that may be pinned; None: half of ``cache_tokens``.
        memory_position: where recalled text seems to be to a query: right before the current turn,
            or right after the sinks.
        kv_dtype: type of the stored keys and values; ``auto``: the model's. ``int8`` keeps one 16-bit scale per token
            and head, so it takes little more than half of a 16-bit cache.
    """

    sink_tokens: int = 4
    memory_tokens: int = 256
    window_tokens: int | None = None
    cache_tokens: int | None = None
    evict_tokens: int = 64
    chunk_tokens: int = 128
    max_pinned_tokens: int | None = None
    memory_position: MemoryPosition = "before_turn"
    kv_dtype: KvDtype = "auto"

    def __post_init__(self) -> None:
        check_range(self, "sink_tokens", 0)
        check_range(self, "memory_tokens", 0)
        check_range(self, "evict_tokens", 1)
        check_range(self, "chunk_tokens", 1)
        fixed = self.sink_tokens + self.memory_tokens
        if self.window_tokens is None:
            total = self.cache_tokens if self.cache_tokens is not None else 2048
            object.__setattr__(self, "window_tokens", total - fixed)
        if self.cache_tokens is None:
            object.__setattr__(self, "cache_tokens", fixed + self.window)
        if self.window < 2:
            raise ConfigError(
                f"CacheConfig.window_tokens is {self.window}; it must be at least 2 "
                f"(cache_tokens {self.total} - sink_tokens {self.sink_tokens} - memory_tokens {self.memory_tokens})"
            )
        if self.total != fixed + self.window:
            raise ConfigError(
                f"CacheConfig.cache_tokens is {self.total}, but sink_tokens + memory_tokens + window_tokens "
                f"is {fixed + self.window}; give either cache_tokens or window_tokens"
            )
        if self.evict_tokens > self.window:
            raise ConfigError(
                f"CacheConfig.evict_tokens is {self.evict_tokens}; allowed is from 1 to window_tokens ({self.window})"
            )
        if self.max_pinned_tokens is None:
            object.__setattr__(self, "max_pinned_tokens", max(self.sink_tokens, self.total // 2))
        check_range(self, "max_pinned_tokens", self.sink_tokens)
        check_choice(self, "memory_position", MemoryPosition)
        check_choice(self, "kv_dtype", KvDtype)

    @property
    def window(self) -> int:
        """``window_tokens``, resolved."""
        assert self.window_tokens is not None
        return self.window_tokens

    @property
    def total(self) -> int:
        """``cache_tokens``, resolved: the number of slots allocated."""
        assert self.cache_tokens is not None
        return self.cache_tokens

    @property
    def max_pinned(self) -> int:
        """``max_pinned_tokens``, resolved."""
        assert self.max_pinned_tokens is not None
        return self.max_pinned_tokens

    @classmethod
    def preset(cls, name: str) -> CacheConfig:
        """Named sizes: ``general``, ``chat``, ``logs``, ``server-7b``.

        Raises:
            ConfigError: for another name.
        """
        presets: dict[str, dict[str, Any]] = {
            "general": {"sink_tokens": 4, "window_tokens": 512},
            "chat": {"sink_tokens": 8, "window_tokens": 1024},
            "logs": {
                "sink_tokens": 4,
                "window_tokens": 2048,
                "evict_tokens": 256,
                "chunk_tokens": 256,
                "memory_position": "after_sinks",
            },
            "server-7b": {"sink_tokens": 4, "memory_tokens": 512, "window_tokens": 4096},
        }
        if name not in presets:
            raise ConfigError(f"no cache preset {name!r}; known: {', '.join(presets)}")
        return cls(**presets[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallConfig(Settings):
    """What is put back into the cache on each turn.

    Attributes:
        enabled: False keeps storing and indexing, but never recalls.
        max_notes: the most notes recalled at once; the memory segment's room bounds them too.
        query_turns: how many of the latest turns form the query, the newest weighing most.
        gate: least cosine similarity (-1 to 1) of a hit that holds half of the words that were asked for, each weighed
            by how rare it is; with none of them it takes 0.25 more, with all of them 0.25 less.
            None: calibrated per embedding space from random pairs.
        rerank_hits: how many of the best hits a reranker reads, where there is one.
    """

    enabled: bool = True
    max_notes: int = 3
    query_turns: int = 3
    gate: float | None = None
    rerank_hits: int = 32

    def __post_init__(self) -> None:
        check_range(self, "rerank_hits", 1, 1000)
        check_range(self, "max_notes", 1, 64)
        check_range(self, "query_turns", 1, 16)
        if self.gate is not None:
            check_range(self, "gate", -1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig(Settings):
    """How a reply is decoded.

    Attributes:
        max_new_tokens: most tokens of one reply.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: sample among this many best tokens; 0 is off.
        top_p: sample among the smallest set with this probability mass.
        repetition_penalty: above 1 makes tokens of the window and the reply less likely.
        seed: of the sampler; None draws one.
        timeout_s: most seconds of one reply; None is no limit.
        stop: texts that end a reply; they are not part of it.
        speculative: most tokens drafted at once from what the row holds and computed along with the next one; the
            reply stays the same. 0 is off. Needs ``temperature`` 0 and no other choice than the likeliest token.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    timeout_s: float | None = None
    stop: tuple[str, ...] = ()
    speculative: int = 0

    def __post_init__(self) -> None:
        check_range(self, "max_new_tokens", 1)
        check_range(self, "temperature", 0.0, 100.0)
        check_range(self, "top_k", 0)
        check_range(self, "top_p", 1e-6, 1.0)
        check_range(self, "repetition_penalty", 0.01, 100.0)
        if self.timeout_s is not None:
            check_range(self, "timeout_s", 0.0)
        check_range(self, "speculative", 0, 15)
        if self.speculative and (self.temperature or self.repetition_penalty != 1.0):
            raise ConfigError(
                f"GenerationConfig.speculative is {self.speculative}; it needs temperature 0 and repetition_penalty 1, "
                "since drafts are checked against the likeliest token"
            )
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigError(f"GenerationConfig.stop is {self.stop!r}; it must be a list of texts that are not empty")
        object.__setattr__(self, "stop", tuple(self.stop))


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a TOML file.

    Raises:
        ConfigError: the file is missing, unreadable or not TOML.
    """
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {os.fspath(path)}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{os.fspath(path)} is not valid TOML: {error}") from error
