"""Millions of tokens through one fixed cache: does anything drift, slow down or grow?

    python tests/bench/soak.py --data DIR --out soak.jsonl [--tokens 4000000]

One stream reads mobydick.txt over and over. After each 100,000 tokens it saves itself beside ``--out``, and the next
run goes on from there, so millions of tokens can be run in several sittings. Every block is scored in a fresh stream
as well, once: the long stream must find the same text as predictable. Of each 1,000 tokens the last 20 go one by one
and are timed.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from common import Results, data_file, say

from memstream.config import CacheConfig
from memstream.engine import Engine
from memstream.models import load_model
from memstream.streaming import snapshot
from memstream.streaming.model import StreamingModel
from memstream.streaming.row import Row

MODEL = "smollm2-135m"
PROSE = "mobydick.txt"
TESTS = ("tests/integration/test_oracles.py",)
BLOCK = 100_000
PIECE, SINGLE = 1000, 20


@dataclass(frozen=True, slots=True)
class Block:
    """What 100,000 tokens of the long stream came to."""

    end: int
    perplexity: float
    token_ms: float
    prefill: float
    resident_mib: float
    cache_bytes: int


class Soak:
    """The long stream and what is known of it, kept in a folder.

    Args:
        folder: of the state.
        ids: of the text, as many as whole blocks take.
        weights: the form of the weights.
    """

    def __init__(self, folder: Path, ids: Sequence[int], weights: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._snapshot, self._known = folder / "stream.snapshot", folder / "blocks.json"
        self._ids = ids
        loaded = load_model(MODEL, device="cpu", weights=weights)  # type: ignore[arg-type]
        cache = CacheConfig(cache_tokens=1024, memory_tokens=0)
        model = StreamingModel(loaded.model, fingerprint=f"{loaded.fingerprint}:{loaded.weights}")
        self._engine = Engine(model, cache)
        self._beside = Engine(model, cache)
        self._mark = snapshot.fingerprint(model.fingerprint, cache, model.kv_dtype(cache))
        self.blocks: list[Block] = []
        self.fresh: dict[int, float] = {}
        self._row = self._engine.admit()
        found = snapshot.load(self._snapshot, fingerprint=self._mark)
        if found is None:
            self._row.layout.open_group(0)
            return
        snapshot.put(self._engine.cache, self._row, *found)
        known = json.loads(self._known.read_text())
        self.blocks = [Block(**block) for block in known["blocks"]]
        self.fresh = {int(start): perplexity for start, perplexity in known["fresh"].items()}
        say(f"going on after {self.n_tokens:,} tokens")

    @property
    def n_tokens(self) -> int:
        """Tokens the long stream has read."""
        return self.blocks[-1].end if self.blocks else 0

    def step(self, results: Results) -> Block:
        """Reads the next 100,000 tokens, and keeps them and what they came to."""
        start = self.n_tokens % len(self._ids)
        ids = self._ids[start : start + BLOCK]
        if start not in self.fresh:
            row = self._beside.admit()
            row.layout.open_group(0)
            self.fresh[start], _, _ = read(self._beside, row, ids, results, "fresh stream, thousands of tokens")
            self._beside.leave(row)
        perplexity, token_ms, prefill = read(self._engine, self._row, ids, results, "long stream, thousands of tokens")
        resident = psutil.Process().memory_info().rss / 2**20
        block = Block(self.n_tokens + BLOCK, perplexity, token_ms, prefill, resident, self._engine.cache_bytes)
        self.blocks.append(block)
        self._save()
        return block

    def _save(self) -> None:
        tensors, plain = snapshot.take(self._engine.cache, self._row)
        snapshot.save(self._snapshot, tensors, plain, fingerprint=self._mark)
        text = json.dumps({"blocks": [asdict(block) for block in self.blocks], "fresh": self.fresh})
        partial = self._known.with_suffix(".partial")
        partial.write_text(text)
        os.replace(partial, self._known)

    def ratio(self, block: Block) -> float:
        """Perplexity in the long stream over that in a fresh one."""
        return block.perplexity / self.fresh[(block.end - BLOCK) % len(self._ids)]


def read(engine: Engine, row: Row, ids: Sequence[int], results: Results, label: str) -> tuple[float, float, float]:
    """Perplexity of a text, median milliseconds of a single token, and tokens a second of the pieces."""
    total, n, pieces_s, singles = 0.0, 0, 0.0, []
    for at in results.progress(range(0, len(ids), PIECE), label):
        began = time.perf_counter()
        scores = [engine.score(row, ids[at : at + PIECE - SINGLE])]
        pieces_s += time.perf_counter() - began
        for token in ids[at + PIECE - SINGLE : at + PIECE]:
            began = time.perf_counter()
            scores.append(engine.score(row, [token]))
            singles.append(1e3 * (time.perf_counter() - began))
        row.layout.close_group()
        row.layout.open_group(0)
        row.take_gone()
        found = torch.cat(scores).double()
        found = found[~found.isnan()]  # the start of a stream
        total, n = total - float(found.sum()), n + len(found)
    pieces = len(ids) // PIECE * (PIECE - SINGLE)
    return math.exp(total / n), statistics.median(singles), pieces / pieces_s


def report(results: Results, soak: Soak, weights: str, picture: Path) -> None:
    """The figures of all blocks there are, and a picture of them."""
    settings: dict[str, Any] = {"tokens": soak.n_tokens, "weights": weights}
    ratios = [soak.ratio(block) for block in soak.blocks]
    for block, ratio in zip(soak.blocks, ratios, strict=True):
        results.add("soak", "ppl_over_fresh", ratio, "ratio", weights=weights, **asdict(block))
    results.add("soak", "ppl_over_fresh_max", max(ratios), "ratio", **settings)
    results.add("soak", "ppl_over_fresh_min", min(ratios), "ratio", **settings)
    first, last = soak.blocks[0], soak.blocks[-1]
    results.add("soak", "token_ms_last_over_first", last.token_ms / first.token_ms, "ratio", **settings)
    results.add("soak", "resident_growth", last.resident_mib - first.resident_mib, "MiB", **settings)
    same = len({block.cache_bytes for block in soak.blocks}) == 1
    results.add("soak", "cache_bytes", last.cache_bytes, "bytes", constant=same, **settings)
    draw(soak, ratios, picture)
    say(f"picture: {picture}")


def draw(soak: Soak, ratios: Sequence[float], path: Path) -> None:
    """Perplexity, time and memory against tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    millions = [block.end / 1e6 for block in soak.blocks]
    figure, axes = pyplot.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
    for axis, values, label, most in (
        (axes[0], ratios, "perplexity / that of a\nfresh stream", max(1.03, *ratios)),
        (axes[1], [block.token_ms for block in soak.blocks], "ms a token, median", None),
        (axes[2], [block.resident_mib for block in soak.blocks], "process memory, MiB", None),
    ):
        axis.plot(millions, values, marker=".")
        axis.set_ylabel(label)
        axis.set_ylim(0.97 if most else 0, most or 1.2 * max(values))
        axis.grid(alpha=0.3)
    axes[0].axhspan(0.98, 1.02, alpha=0.1)
    axes[2].set_xlabel("million tokens read by one stream in a cache of 1,024")
    figure.savefig(path, dpi=120)


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder with mobydick.txt.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out/soak.jsonl"), show_default=True)
@click.option("--tokens", default=4_000_000, show_default=True, help="How many the stream is to have read in all.")
@click.option("--weights", default="auto", show_default=True, help="The form of the weights.")
@click.option("--threads", default=2, show_default=True)
@click.option("--skip-tests", is_flag=True, help="Measure even where the tests were not run; noted in the output.")
def main(data: Path | None, out: Path, tokens: int, weights: str, threads: int, skip_tests: bool) -> None:
    """Reads text without end; Ctrl-C stops after the blocks that are kept."""
    path = data_file(data, PROSE)
    if path is None:
        raise SystemExit("nothing to read")
    torch.set_num_threads(threads)
    results = Results("soak", out, tests=TESTS, skip_tests=skip_tests)
    ids: list[int] = load_model(MODEL, device="cpu").tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
    whole = ids[: len(ids) // BLOCK * BLOCK]
    soak = Soak(out.with_suffix(f".{weights}.state"), whole, weights)
    try:
        while soak.n_tokens < tokens:
            block = soak.step(results)
            say(f"{block.end:,} tokens: {soak.ratio(block):.4f} of a fresh stream's, {block.token_ms:.1f} ms a token")
    except KeyboardInterrupt:
        say("stopped; the same command goes on after the last whole block")
    if soak.blocks:
        report(results, soak, weights, out.with_suffix(".png"))
    results.close()


if __name__ == "__main__":
    main()
