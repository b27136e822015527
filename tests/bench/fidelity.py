"""Does streaming compute what it should? Parity with the stock model, independence of chunk sizes, perplexity.

    python tests/bench/fidelity.py --data DIR --out fidelity.jsonl

DIR holds tinyshakespeare.txt and mobydick.txt. All figures are of SmolLM2-135M-Instruct in float32 on the CPU. The
perplexities of one text are over the same tokens, so they can be compared with each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from common import Results, data_file, say
from torch import Tensor

from memstream.config import CacheConfig
from memstream.engine import Engine
from memstream.models import load_model
from memstream.streaming.attention import NAME
from memstream.streaming.model import StreamingModel

MODEL = "smollm2-135m"
TESTS = ("tests/unit/test_layout.py", "tests/integration/test_oracles.py")
STRIDE = 64  # tokens scored by one forward of the recomputing baseline; also evict_tokens, so contexts are alike
PROSE = "mobydick.txt"
PLAY = "tinyshakespeare.txt"


@dataclass(frozen=True, slots=True)
class Bench:
    """The model under test and where results go."""

    stock: Any
    tokenizer: Any
    streaming: StreamingModel
    results: Results

    def read(self, path: Path, n_tokens: int) -> list[int]:
        """The first n tokens of a text."""
        text = path.read_text(encoding="utf-8")[: 20 * n_tokens]  # tokens are far shorter than 20 characters
        ids: list[int] = self.tokenizer(text)["input_ids"][:n_tokens]
        assert len(ids) == n_tokens
        return ids

    @contextmanager
    def unchanged(self, attention: str = "sdpa") -> Iterator[Any]:
        """The stock model with attention of transformers' own."""
        self.stock.set_attn_implementation(attention)
        try:
            with torch.inference_mode():
                yield self.stock
        finally:
            self.stock.set_attn_implementation(NAME)


def perplexity(scores: Sequence[Tensor] | Tensor) -> float:
    """exp of the mean negative log-probability; the first token of a stream, which has none, is left out."""
    flat = (scores if isinstance(scores, Tensor) else torch.cat(list(scores))).double()
    return float(torch.exp(-flat[~flat.isnan()].mean()))


def stream_logits(bench: Bench, ids: list[int], config: CacheConfig) -> tuple[Tensor, int]:
    """Logits [n, V] of one stream, every token of it, and how many tokens left the window."""
    engine = Engine(bench.streaming, config)
    row = engine.admit()
    row.layout.open_group("text")
    # The engine keeps only the last logits of a piece; here all are wanted.
    logits = torch.cat([bench.streaming.head(hidden).float() for _, hidden in engine._pieces(row, ids)])
    return logits, row.layout.start


def stream_scores(bench: Bench, ids: list[int], config: CacheConfig, *, one_token_groups: bool = False) -> Tensor:
    """Log-probabilities [n] of one stream; NaN for the first token."""
    engine = Engine(bench.streaming, config)
    row = engine.admit()
    scores: list[Tensor] = []
    if not one_token_groups:
        row.layout.open_group("text")
        for start in range(0, len(ids), 5000):
            scores.append(engine.score(row, ids[start : start + 5000]))
            say(f"  {min(start + 5000, len(ids))} of {len(ids)} tokens")
        return torch.cat(scores)
    for t, token in enumerate(ids):
        row.layout.open_group(t)
        scores.append(engine.score(row, [token]))
        row.layout.close_group()
    return torch.cat(scores)


def dense_scores(bench: Bench, ids: list[int], n: int) -> Tensor:
    """Log-probabilities of the last n of these tokens, n < len(ids), by one stock forward over all of them."""
    with bench.unchanged() as model:
        logits = model(torch.tensor([ids]), use_cache=False, logits_to_keep=n + 1).logits[0, :-1].float()
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids[-n:])[:, None])[:, 0]


def recompute_scores(bench: Bench, ids: list[int], width: int) -> Tensor:
    """Log-probabilities [n] by a stock forward over the last ``width`` tokens for every 64 scored; NaN for the first.

    The first ``width`` tokens are scored by one forward, as nothing has to be forgotten yet.
    """
    scores = [torch.full((1,), torch.nan), dense_scores(bench, ids[:width], width - 1)]
    for done, start in enumerate(range(width, len(ids), STRIDE)):
        end = min(start + STRIDE, len(ids))
        scores.append(dense_scores(bench, ids[end - width : end], end - start))
        if done % 40 == 39:
            say(f"  {end} of {len(ids)} tokens")
    return torch.cat(scores)


def measure_parity(bench: Bench, ids: list[int]) -> None:
    """Logits against the stock model's while everything fits."""
    config = CacheConfig(cache_tokens=512, memory_tokens=0, chunk_tokens=100)
    got, evicted = stream_logits(bench, ids, config)
    assert evicted == 0, "parity is defined while nothing has left the window"
    with bench.unchanged() as model:
        want = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    gap = float((got - want).abs().max())
    settings = {"tokens": len(ids), "cache_tokens": 512, "chunk_tokens": 100, "largest_logit": float(want.abs().max())}
    bench.results.add("parity", "max_abs_logit_diff", gap, "logit", text=PLAY, **settings)


def measure_chunk_invariance(bench: Bench, ids: list[int]) -> None:
    """Logits of the same stream, with eviction, computed in pieces of 1, 17 and 128 tokens."""
    sizes = (1, 17, 128)
    runs = []
    for size in sizes:
        config = CacheConfig(cache_tokens=256, memory_tokens=0, chunk_tokens=size)
        logits, evicted = stream_logits(bench, ids, config)
        assert evicted > 0, "the streams must evict"
        runs.append(logits)
    gap = max(float((a - b).abs().max()) for a in runs for b in runs)
    settings = {"tokens": len(ids), "cache_tokens": 256, "evict_tokens": 64, "chunk_tokens": list(sizes)}
    bench.results.add("chunk_invariance", "max_abs_logit_diff", gap, "logit", text=PLAY, evicted=evicted, **settings)


def measure_attention_mass(bench: Bench, ids: list[int]) -> None:
    """How much of the stock model's attention goes to the first four tokens: why sinks are kept."""
    with bench.unchanged("eager") as model:
        layers = model(torch.tensor([ids]), use_cache=False, output_attentions=True, logits_to_keep=1).attentions
    half = len(ids) // 2  # queries far from the start
    mass = float(torch.stack([layer[0, :, half:, :4].sum(dim=-1).mean() for layer in layers]).mean())
    settings = {
        "tokens": len(ids),
        "queries": len(ids) - half,
        "layers": len(layers),
        "even_share": 4 / (0.75 * len(ids)),
    }
    bench.results.add("attention", "mass_on_first_4", mass, "share", text=PLAY, **settings)


def measure_short_perplexity(bench: Bench, ids: list[int]) -> None:
    """The paper's method token for token, eviction by 64, and the stock model, which forgets nothing."""
    cache = {"sink_tokens": 4, "memory_tokens": 0, "window_tokens": 508}
    common = {"text": PLAY, "tokens": len(ids), "tokens_scored": len(ids) - 1}
    dense = perplexity(dense_scores(bench, ids, len(ids) - 1))
    bench.results.add("ppl", "dense_1500", dense, "perplexity", **common)
    for evict, single in ((64, False), (1, True)):
        settings = {**cache, "evict_tokens": evict, "chunk_tokens": 1 if single else 128}
        value = perplexity(stream_scores(bench, ids, CacheConfig(**settings), one_token_groups=single))
        groups = "one token" if single else "one text"
        bench.results.add(
            "ppl", f"streaming_512_evict{evict}", value, "perplexity", groups=groups, **settings, **common
        )


def measure_sinks(bench: Bench, ids: list[int]) -> dict[int, float]:
    """Perplexity against the number of sinks, over the tokens that come after the cache has first been full."""
    found = {}
    for sinks in (0, 1, 2, 4, 8):
        settings = {"sink_tokens": sinks, "memory_tokens": 0, "cache_tokens": 1024, "evict_tokens": STRIDE}
        scores = stream_scores(bench, ids, CacheConfig(**settings))[1024:]
        found[sinks] = perplexity(scores)
        common = {"text": PROSE, "tokens": len(ids), "tokens_scored": len(scores)}
        bench.results.add("ppl", f"sinks_{sinks}", found[sinks], "perplexity", scored_from=1024, **settings, **common)
    return found


def measure_cache_bytes(bench: Bench) -> None:
    """What a cache of 1,024 tokens takes in each type."""
    found = {
        name: bench.streaming.new_cache(CacheConfig(cache_tokens=1024, kv_dtype=name)).bytes
        for name in ("float32", "bfloat16", "int8")
    }
    for name, value in found.items():
        bench.results.add("cache", f"bytes_{name}", value, "bytes", cache_tokens=1024)
    bench.results.add("cache", "int8_over_bfloat16", found["int8"] / found["bfloat16"], "ratio", cache_tokens=1024)


def measure_long_perplexity(bench: Bench, ids: list[int]) -> dict[str, Tensor]:
    """Streaming, with int8 keys and values too, the window alone, and recomputation, at a cache of 1,024 tokens."""
    common = {"text": PROSE, "tokens": len(ids), "tokens_scored": len(ids) - 1}
    runs: dict[str, Tensor] = {}
    for name, sinks, kv_dtype in (("streaming", 4, "auto"), ("int8_kv", 4, "int8"), ("window_only", 0, "auto")):
        settings = {"sink_tokens": sinks, "memory_tokens": 0, "cache_tokens": 1024, "evict_tokens": STRIDE}
        config = CacheConfig(**settings, kv_dtype=kv_dtype)
        runs[name] = stream_scores(bench, ids, config)
        bench.results.add("ppl", name, perplexity(runs[name]), "perplexity", kv_dtype=kv_dtype, **settings, **common)
    ratio = perplexity(runs["int8_kv"]) / perplexity(runs["streaming"])
    bench.results.add("ppl", "int8_kv_over_float32", ratio, "ratio", **common)
    runs["recompute"] = recompute_scores(bench, ids, 1024)
    value = perplexity(runs["recompute"])
    bench.results.add("ppl", "recompute", value, "perplexity", dense_tokens=1024, stride=STRIDE, **common)
    ratio = perplexity(runs["streaming"]) / value
    bench.results.add("ppl", "streaming_over_recompute", ratio, "ratio", **common)
    return runs


def plot(path: Path, runs: dict[str, Tensor], sinks: dict[int, float]) -> None:
    """Draws perplexity along the text and against the number of sinks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 1), layout="constrained")
    for name, scores in runs.items():
        blocks = [perplexity(block) for block in scores.split(500)]
        style = {"linestyle": "--", "zorder": 3} if name == "recompute" else {}  # lies on streaming
        at = [500 * (i + 1) for i in range(len(blocks))]
        left.plot(at, blocks, label=name.replace("_", " "), linewidth=1.2, **style)
    left.set(xlabel="tokens", ylabel="perplexity of 500 tokens", yscale="log", title=f"{PROSE}, cache of 1,024 tokens")
    left.legend()
    bars = right.bar([str(n) for n in sinks], list(sinks.values()))
    right.bar_label(bars, fmt="%.1f")
    right.set(xlabel="sink tokens", ylabel="perplexity", title="after the first eviction")
    figure.savefig(path, dpi=120)
    say(f"drawn: {path}")


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help=f"Folder with {PLAY} and {PROSE}.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out/fidelity.jsonl"), show_default=True)
@click.option("--skip-tests", is_flag=True, help="Measure even where the tests were not run; noted in the output.")
def main(data: Path | None, out: Path, skip_tests: bool) -> None:
    """Fidelity: parity, chunk invariance, perplexity. The short measurements come first."""
    play, prose = data_file(data, PLAY), data_file(data, PROSE)
    if play is None and prose is None:
        raise SystemExit("nothing to measure: neither text was found; give --data DIR")
    results = Results("fidelity", out, tests=TESTS, skip_tests=skip_tests)
    loaded = load_model(MODEL, device="cpu", weights="float32")
    streaming = StreamingModel(loaded.model, fingerprint=loaded.fingerprint)
    bench = Bench(stock=loaded.model, tokenizer=loaded.tokenizer, streaming=streaming, results=results)
    measure_cache_bytes(bench)
    if play is not None:
        measure_parity(bench, bench.read(play, 500))
        measure_chunk_invariance(bench, bench.read(play, 600))
        measure_attention_mass(bench, bench.read(play, 512))
        measure_short_perplexity(bench, bench.read(play, 1500))
    if prose is not None:
        sinks = measure_sinks(bench, bench.read(prose, 5000))
        runs = measure_long_perplexity(bench, bench.read(prose, 20_000))
        plot(out.with_suffix(".png"), runs, sinks)
    results.close()


if __name__ == "__main__":
    main()
