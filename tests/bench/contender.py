"""One measurement of one way to decode, as a process of its own; ``speed.py`` starts it, in the environment it needs.

    python contender.py KIND --model FOLDER_OR_FILE --threads N --prompt FILE --history N --cache N --tokens N

The prompt is a JSON list of token ids, of which ``history`` are fed before anything is timed. Prints one line of JSON:
milliseconds for each decoded token, tokens a second when the history was fed, bytes of the cache. Imports nothing of
the benchmarks: most of the environments have neither memstream nor what it needs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHUNK = 256  # tokens fed at once
Measured = Iterator[float]  # the first: seconds for the history; then seconds for each token; last: bytes


def timed(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def memstream(options: argparse.Namespace, ids: list[int]) -> Measured:
    """The fixed cache; ``--form`` is the form of the weights."""
    from memstream.config import CacheConfig
    from memstream.engine import Engine
    from memstream.models import load_model
    from memstream.streaming.model import StreamingModel

    loaded = load_model(options.model, device="cpu", weights=options.form)
    engine = Engine(StreamingModel(loaded.model), CacheConfig(cache_tokens=options.cache, memory_tokens=0))
    row = engine.admit()
    row.layout.open_group(0)
    yield timed(lambda: engine.feed(row, ids[: options.history]))
    for token in ids[options.history :]:
        yield timed(lambda token=token: (engine.feed(row, [token]), row.logits.argmax()))  # type: ignore[misc]
    yield engine.cache_bytes


def _stock(options: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(options.model).to(getattr(torch, options.form)).eval()


def transformers(options: argparse.Namespace, ids: list[int]) -> Measured:
    """The stock model with a cache that grows; ``--form`` is its type."""
    import torch
    from transformers import DynamicCache

    model, cache = _stock(options), DynamicCache()

    def feed(part: list[int]) -> None:
        model(torch.tensor([part]), past_key_values=cache, logits_to_keep=1).logits.argmax()

    with torch.inference_mode():
        yield timed(lambda: [feed(ids[i : min(i + CHUNK, options.history)]) for i in range(0, options.history, CHUNK)])
        for token in ids[options.history :]:
            yield timed(lambda token=token: feed([token]))  # type: ignore[misc]
    yield sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def recompute(options: argparse.Namespace, ids: list[int]) -> Measured:
    """A sliding window whose keys and values are computed anew for every token."""
    import torch

    model = _stock(options)
    with torch.inference_mode():
        yield 0.0
        for end in range(options.history + 1, len(ids) + 1):
            window = torch.tensor([ids[max(0, end - options.cache) : end]])
            yield timed(lambda window=window: model(window, use_cache=False).logits[0, -1].argmax())  # type: ignore[misc]
    yield 0


def attention_sinks(options: argparse.Namespace, ids: list[int]) -> Measured:
    """The PyPI package of that name."""
    import torch
    from attention_sinks import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        options.model, attention_sink_size=4, attention_sink_window_size=options.cache - 4
    )
    model.to(getattr(torch, options.form)).eval()
    yield from _with_past(model, options, ids)


def streaming_llm(options: argparse.Namespace, ids: list[int]) -> Measured:
    """The code of the paper, from a checkout."""
    sys.path.insert(0, str(options.checkout))
    from streaming_llm.enable_streaming_llm import enable_streaming_llm

    model = _stock(options)
    shrink = enable_streaming_llm(model, start_size=4, recent_size=options.cache - 4)
    yield from _with_past(model, options, ids, shrink)


def _with_past(model: Any, options: argparse.Namespace, ids: list[int], shrink: Any = None) -> Measured:
    """Token by token, as these two are used."""
    import torch

    past: Any = None

    def feed(token: int) -> None:
        nonlocal past
        out = model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
        past = out.past_key_values if shrink is None else shrink(out.past_key_values)
        out.logits[0, -1].argmax()

    with torch.inference_mode():
        yield timed(lambda: [feed(token) for token in ids[: options.history]])
        for token in ids[options.history :]:
            yield timed(lambda token=token: feed(token))  # type: ignore[misc]
    yield sum(side.nbytes for layer in past for side in layer)


def llama_cpp(options: argparse.Namespace, ids: list[int]) -> Measured:
    """llama.cpp through its Python bindings, on the GGUF file itself."""
    from llama_cpp import Llama

    model = Llama(
        options.model,
        n_ctx=options.cache,
        n_batch=CHUNK,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        verbose=False,
    )
    yield timed(lambda: model.eval(ids[: options.history]))
    for token in ids[options.history :]:
        yield timed(lambda token=token: (model.eval([token]), model.sample(temp=0.0)))  # type: ignore[misc]
    kind = model.metadata["general.architecture"]
    layers, heads, kv_heads, width = (
        int(model.metadata[f"{kind}.{name}"])
        for name in ("block_count", "attention.head_count", "attention.head_count_kv", "embedding_length")
    )
    yield 2 * 2 * model.n_ctx() * layers * width // heads * kv_heads  # keys and values in 16 bits


KINDS = {
    kind.__name__: kind for kind in (memstream, transformers, recompute, attention_sinks, streaming_llm, llama_cpp)
}


def main() -> None:
    """Measures, and prints what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--form", default="float32")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt", type=Path, required=True)
    parser.add_argument("--history", type=int, required=True)
    parser.add_argument("--cache", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--checkout", type=Path)
    options = parser.parse_args()
    if options.kind != "llama_cpp":
        import torch

        torch.set_num_threads(options.threads)
    ids = json.loads(options.prompt.read_text())[: options.history + options.tokens]
    prefill_s, *token_s, n_bytes = KINDS[options.kind](options, ids)
    found = {
        "token_ms": [1e3 * seconds for seconds in token_s],
        "prefill_tokens_per_s": options.history / prefill_s if prefill_s else None,
        "cache_bytes": int(n_bytes),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
