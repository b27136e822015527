"""A replay in a process of its own, on a tiny random model, to be killed.

    python replay_process.py LOG STATE RECORDS DONE

Follows LOG until the file DONE is there and everything was read.
"""

from __future__ import annotations

import sys
from pathlib import Path

from memstream.replay import Replay, ReplayConfig
from tests.integration import tiny
from tests.integration.logs import CACHE, loaded

CONFIG = ReplayConfig(
    burn_in_lines=50, max_line_tokens=32, threshold="q0.9", checkpoint_lines=40, follow=True, idle_s=0.3, sinks=1,
    piece_lines=4, incident_lines=60, format="raw",
)  # fmt: skip


def main(log: str, state: str, records: str, done: Path) -> None:
    """Replays; says when it begins."""
    print("ready", flush=True)
    with Replay(
        log,
        model=loaded(),
        cache=CACHE,
        config=CONFIG,
        embedder=tiny.WordEmbedder(),
        scorer=lambda line, scores: scores.novelty + scores.meaning,
        state=state,
        records=records,
        stop=done.exists,
    ) as replay:
        for _ in replay:
            pass
    print("finished", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
