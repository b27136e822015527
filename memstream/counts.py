"""What an engine has done, counted."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Counts:
    """What was done since an engine was made. Only ever more; see ``EngineState``."""

    steps: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    evictions: int = 0
    swap_outs: int = 0
    swap_out_ms: float = 0.0
    swap_ins: int = 0
    swap_in_ms: float = 0.0
    rebuilds: int = 0
    pressure_events: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """All of them by name."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "_lock"}

    def add(self, **numbers: float) -> None:
        """Adds to some of them; from any thread."""
        with self._lock:
            for name, number in numbers.items():
                setattr(self, name, getattr(self, name) + number)
