"""Times on a CUDA card: ops against the bandwidth floor, torch's attention and FlashInfer; decode of whole models."""

from __future__ import annotations

import importlib.util
import statistics
import time
from typing import Any

import roofline
import torch
import transformers
from common import Results, say
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from memstream.config import CacheConfig
from memstream.engine import Engine
from memstream.kernels.rebase import rebase
from memstream.kernels.ring_write import ring_write
from memstream.kernels.segment_attention import segment_attention, work_floats
from memstream.kernels.token_nll import token_nll
from memstream.streaming.cache import Cache
from memstream.streaming.frames import Rope
from memstream.streaming.layout import Arc, Part, Piece
from memstream.streaming.model import StreamingModel
from memstream.streaming.row import Row
from memstream.streaming.step import Step

CUDA = torch.device("cuda")
ITEM = roofline.ITEM


def median_us(run: Any) -> float:
    """Median time of one call, caches flushed in between."""
    from triton.testing import do_bench

    return 1e3 * float(do_bench(run, warmup=50, rep=200, return_mode="median"))


def copy_bandwidth() -> float:
    """Bytes/s read and written by a large copy: the practical limit."""
    source = torch.empty(2**30, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-6 * median_us(lambda: target.copy_(source)))


def full_step(model: roofline.Model, *, batch: int, n: int, cached: int, dtype: torch.dtype) -> tuple[Cache, Step]:
    """A cache whose rows are full: sinks, memory, a window around the ring's end, and the piece."""
    cache = Cache([(model.kv_heads, model.dim)], rows=batch, cache_tokens=cached, dtype=dtype, device=CUDA)
    for side in (cache.keys[0], cache.values[0]):
        side.copy_(torch.randint(-99, 99, side.shape, device=CUDA) if dtype == torch.int8 else torch.randn_like(side))
    for scales in (cache.key_scales[0], cache.value_scales[0]):
        if scales is not None:
            scales.fill_(0.01)
    rope = Rope(10000.0 ** -(torch.arange(0, model.dim, 2, device=CUDA) / model.dim).double(), model.dim)
    step = Step(cache, [rope], rows=batch, n=n)
    window, head = cached - 68, (cached - 68) // 3
    parts = (
        Part(0, 4, 0, 50 - window),
        Part(4, 64, 4, 70 - window),
        Part(68 + head, window - head, 68, 0),
        Part(68, head, 68 + window - head, 0),
    )
    piece = Piece(n, 68 + window - n, (Arc(68 + head - n, n),), parts)
    step.fill(range(batch), [piece] * batch, [[0] * n] * batch)
    step.prepare()
    return cache, step


def attention_run(model: roofline.Model, cache: Cache, step: Step, *, batch: int, n: int) -> Any:
    """The op as a decode step calls it, with buffers of its own."""
    query = torch.randn(batch, n, model.heads, model.dim, dtype=torch.bfloat16, device=CUDA).transpose(1, 2)
    cos, sin, partner = step.turns(step.ropes[0])
    out = torch.empty(batch, n, model.heads, model.dim, dtype=torch.bfloat16, device=CUDA)
    work = torch.empty(work_floats(query, cache.keys[0]), device=CUDA)
    return lambda: segment_attention(
        query,
        cache.keys[0],
        cache.values[0],
        rows=step.rows,
        positions=step.positions,
        parts=step.parts,
        cos=cos,
        sin=sin,
        partner=partner,
        scaling=model.dim**-0.5,
        key_scales=cache.key_scales[0],
        value_scales=cache.value_scales[0],
        out=out,
        work=work,
    )


def others(model: roofline.Model, cache: Cache, *, batch: int) -> dict[str, Any]:
    """What else attends one token over as many keys: torch, and FlashInfer where it is installed."""
    query = torch.randn(batch, model.heads, 1, model.dim, dtype=torch.bfloat16, device=CUDA)
    keys, values = cache.keys[0], cache.values[0]
    found = {"torch_sdpa": lambda: scaled_dot_product_attention(query, keys, values, enable_gqa=True)}
    if importlib.util.find_spec("flashinfer") and batch == 1:
        import flashinfer

        one = query[0, :, 0]
        found["flashinfer"] = lambda: flashinfer.single_decode_with_kv_cache(one, keys[0], values[0], kv_layout="HND")
    return found


def measure_ops(results: Results, bandwidth: float) -> None:
    """Every op at the shapes of the roofline page."""
    for name, model in roofline.MODELS.items():
        for batch, cached in ((1, 1024), (1, 4096), (8, 4096)):
            for dtype in (torch.bfloat16, torch.int8):
                cache, step = full_step(model, batch=batch, n=1, cached=cached, dtype=dtype)
                taken = median_us(attention_run(model, cache, step, batch=batch, n=1))
                floor = 1e6 * cache.bytes / bandwidth
                kind = str(dtype).removeprefix("torch.")
                settings: dict[str, Any] = {"model": name, "batch": batch, "cached": cached, "kv_dtype": kind}
                results.add("decode_attention", "us", taken, "us", floor_us=floor, of_floor=floor / taken, **settings)
                if dtype == torch.bfloat16:
                    for other, run in others(model, cache, batch=batch).items():
                        try:
                            results.add(f"decode_attention/{other}", "us", median_us(run), "us", **settings)
                        except (RuntimeError, ValueError, OSError) as error:
                            say(f"missing: {other} at {settings}: {error}")
        cache, step = full_step(model, batch=1, n=512, cached=4096, dtype=torch.bfloat16)
        taken = median_us(attention_run(model, cache, step, batch=1, n=512))
        results.add("prefill_attention", "us", taken, "us", model=name, n=512, cached=4096)
        new = torch.randn(2, 1, model.kv_heads, 512, model.dim, dtype=torch.bfloat16, device=CUDA)
        taken = median_us(
            lambda c=cache, s=step, x=new: ring_write(c.keys[0], c.values[0], *x, rows=s.rows, slots=s.slots)
        )
        results.add("ring_write", "us", taken, "us", model=name, n=512)
        turn = step.ropes[0].turn(-100)
        taken = median_us(lambda c=cache, t=turn: rebase(c.keys[0], None, 0, [(68, 4028)], *t))
        results.add("rebase", "us", taken, "us", model=name, floor_us=1e6 * cache.bytes / bandwidth, slots=4028)
        hidden: Tensor = torch.randn(512, model.hidden, dtype=torch.bfloat16, device=CUDA)
        weight = torch.randn(model.vocabulary, model.hidden, dtype=torch.bfloat16, device=CUDA) / 50
        targets = torch.randint(0, model.vocabulary, (512,), device=CUDA)
        taken = median_us(lambda h=hidden, t=targets, w=weight: token_nll(h, t, w))
        plain = median_us(lambda h=hidden, t=targets, w=weight: torch.nn.functional.cross_entropy((h @ w.T).float(), t))
        results.add("token_nll", "us", taken, "us", model=name, n=512, stored_logits_us=plain)


def step_us(engine: Engine, rows: list[Row], steps: int = 100) -> float:
    """Median time of a decode step by the clock, from the host's table to logits that can be read."""
    taken = []
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.step(rows, [5] * len(rows))
        torch.cuda.synchronize()
        taken.append(1e6 * (time.perf_counter() - began))
    return statistics.median(taken)


def measure_models(results: Results, bandwidth: float) -> None:
    """Tokens per second of a decode step, with random weights of the real shapes, beside the bandwidth floor."""
    for name, model in roofline.MODELS.items():
        config = transformers.LlamaConfig(
            vocab_size=model.vocabulary,
            hidden_size=model.hidden,
            intermediate_size=14336 if model.hidden == 4096 else 1536,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            max_position_embeddings=8192,
            tie_word_embeddings=model.hidden == 576,
        )
        torch.cuda.reset_peak_memory_stats()
        with torch.device(CUDA):
            torch.set_default_dtype(torch.bfloat16)
            built = transformers.LlamaForCausalLM(config).eval()
            torch.set_default_dtype(torch.float32)
        for rows, kv_dtype in ((1, "auto"), (1, "int8"), (8, "auto")):
            engine = Engine(StreamingModel(built), CacheConfig(cache_tokens=4096, kv_dtype=kv_dtype), rows=rows)
            admitted = [engine.admit() for _ in range(rows)]
            for row in admitted:
                row.layout.open_group("text")
                engine.feed(row, torch.randint(0, model.vocabulary, (5000,)).tolist())
            taken = step_us(engine, admitted)
            weights = sum(p.numel() * p.element_size() for p in built.parameters())
            if not config.tie_word_embeddings:  # of the input embedding only one row is read
                weights -= model.vocabulary * model.hidden * ITEM
            held = sum(row.layout.sinks + row.layout.window for row in admitted) / (rows * 4096)
            floor = 1e6 * (weights + held * engine.cache_bytes) / bandwidth
            results.add(
                "decode",
                "tokens_per_s",
                rows * 1e6 / taken,
                "tokens/s",
                model=name,
                rows=rows,
                kv_dtype=kv_dtype,
                step_us=taken,
                floor_us=floor,
                captured=engine._decoders[rows, 1]._graph is not None,
                peak_bytes=torch.cuda.max_memory_allocated(),
            )
            del engine, admitted
        del built
        torch.cuda.empty_cache()


def measure(results: Results) -> None:
    """Everything, the ops first."""
    card = torch.cuda.get_device_properties(0)
    bandwidth = copy_bandwidth()
    results.add("card", "copy_bytes_per_s", bandwidth, "bytes/s", card=card.name, processors=card.multi_processor_count)
    say(f"on {card.name}")
    measure_ops(results, bandwidth)
    measure_models(results, bandwidth)
