"""Keys and values stored in another type than the model computes in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from memstream.config import CacheConfig
from memstream.errors import ConfigError
from memstream.streaming import snapshot
from memstream.streaming.cache import Cache
from tests.integration import tiny
from tests.integration.families import tiny_model
from tests.integration.test_oracles import engine_for, exchange, tokens

KINDS = pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8"])
SOME = pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "glm"])


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_per_vector"), [("float32", 32), ("bfloat16", 16), ("float16", 16), ("int8", 8 + 2)]
)
def test_bytes(kv_dtype: str, bytes_per_vector: int) -> None:
    engine = engine_for(tiny_model("llama"), rows=3, kv_dtype=kv_dtype)
    # keys and values, 2 layers, 2 kv heads, 96 slots, 3 rows
    assert engine.cache_bytes == 2 * 2 * 2 * 96 * 3 * bytes_per_vector


def test_auto_is_the_models_type() -> None:
    assert engine_for(tiny_model("llama")).cache.dtype == torch.float32
    assert engine_for(tiny_model("llama").bfloat16()).cache.dtype == torch.bfloat16


def test_another_type_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"CacheConfig.kv_dtype is 'int4'; allowed: 'auto', 'float32'"):
        CacheConfig(kv_dtype="int4")  # type: ignore[arg-type]


@KINDS
@SOME
def test_logits_stay_near_and_freed_slots_are_never_read(family: str, kv_dtype: str) -> None:
    model, ids = tiny_model(family), tokens(400)
    exact, rounded = (engine_for(model, kv_dtype=kind) for kind in ("float32", kv_dtype))
    rounded.cache.poison(0, 0, 96)
    rows = exact.admit(), rounded.admit()
    for key in range(8):
        piece = ids[50 * key : 50 * key + 50]
        want, got = exchange(exact, rows[0], key, piece), exchange(rounded, rows[1], key, piece)
        layout = rows[1].layout
        if layout.window < layout.window_room:  # what an eviction freed
            used = {slot for arc in layout.window_arcs() for slot in range(arc.slot, arc.slot + arc.length)}
            origin = layout.sink_tokens + layout.memory_room
            for slot in set(range(origin, origin + layout.window_room)) - used:
                rounded.cache.poison(0, slot, 1)
        assert not got.isnan().any()
        log_p, log_q = want.double().log_softmax(-1), got.double().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        assert kl < {"float32": 1e-9, "float16": 1e-6, "bfloat16": 1e-4, "int8": 1e-2}[kv_dtype]


@KINDS
def test_a_snapshot_goes_on_bit_for_bit(kv_dtype: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    first, second = (engine_for(model, kv_dtype=kv_dtype) for _ in range(2))
    row = first.admit()
    for key in range(6):
        exchange(first, row, key, tokens(30, seed=key))
    first.set_memory(row, tokens(9))
    snapshot.save(tmp_path / "s", *snapshot.take(first.cache, row), fingerprint="f")
    found = snapshot.load(tmp_path / "s", fingerprint="f")
    assert found is not None
    other = second.admit()
    snapshot.put(second.cache, other, *found)
    assert torch.equal(exchange(first, row, 9, tokens(40)), exchange(second, other, 9, tokens(40)))


def test_a_snapshot_of_another_type_is_not_taken() -> None:
    names = {
        snapshot.fingerprint("m", engine.config, engine.cache.dtype)
        for engine in (engine_for(tiny_model("llama"), kv_dtype=kind) for kind in ("float32", "bfloat16", "int8"))
    }
    assert len(names) == 3


@pytest.mark.parametrize("size", [1, 7, 64])
def test_pieces_of_any_size_see_the_same_rounded_tokens(size: int) -> None:
    """What a token's own piece sees of it is what later ones will: the rounded form."""
    ids = tokens(200)
    whole, cut = (engine_for(tiny_model("llama", layers=1), kv_dtype="int8") for _ in range(2))
    one, many = whole.admit(), cut.admit()
    want, got = exchange(whole, one, 0, ids), exchange(cut, many, 0, ids, sizes=(size,))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)  # one layer: no rounding feeds another


def test_int8_takes_half_of_a_16_bit_cache_of_smollm2() -> None:
    sizes = {
        dtype: Cache([(3, 64)] * 30, rows=1, cache_tokens=1024, dtype=dtype, device=torch.device("cpu")).bytes
        for dtype in (torch.bfloat16, torch.int8)
    }
    assert sizes[torch.bfloat16] == 2 * 30 * 3 * 1024 * 64 * 2
    assert sizes[torch.int8] / sizes[torch.bfloat16] == 66 / 128


def test_an_agent_with_int8_goes_on_after_a_restart(make: Any, tmp_path: Path) -> None:
    cache = dataclasses.replace(tiny.CACHE, kv_dtype="int8")
    whole, first = (make(cache=cache, store=tmp_path / name) for name in ("whole.db", "parted.db"))
    for turn in range(8):
        assert whole.chat(f"turn {turn}", user="a").text == first.chat(f"turn {turn}", user="a").text
    first.close()
    second = make(cache=cache, store=tmp_path / "parted.db")
    for turn in range(8, 12):
        assert whole.chat(f"turn {turn}", user="a").text == second.chat(f"turn {turn}", user="a").text
