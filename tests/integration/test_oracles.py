"""The oracles of the streaming core: what it computes equals a stock dense forward wherever that is defined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memstream.config import CacheConfig
from memstream.engine import Engine
from memstream.streaming import snapshot
from memstream.streaming.model import StreamingModel
from memstream.streaming.row import Row
from tests.integration.families import FAMILIES, VOCABULARY, tiny_model

EXACT = 1e-3  # on logits of size 2 to 40, float32
POSITIONS = ("before_turn", "after_sinks")
PAIR = pytest.mark.parametrize("position", POSITIONS)
ALL = pytest.mark.parametrize("family", FAMILIES)
SOME = pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "smollm3"])


def tokens(n: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()


def dense(model: Any, ids: list[int]) -> Tensor:
    """[n, V] logits of the stock model over exactly these tokens at positions 0..n-1."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    model.set_attn_implementation("memstream")
    return logits


def engine_for(model: Any, *, rows: int = 1, **cache: Any) -> Engine:
    settings: dict[str, Any] = {"cache_tokens": 96, "memory_tokens": 16, "evict_tokens": 8, "chunk_tokens": 16}
    return Engine(StreamingModel(model), CacheConfig(**{**settings, **cache}), rows=rows)


def feed(engine: Engine, row: Row, ids: list[int], *, sizes: tuple[int, ...] = (1000,)) -> Tensor:
    """Feeds ids, split into calls of the given sizes in turn; returns the logits [n, V] of all of them."""
    out, done, turn = [], 0, 0
    while done < len(ids):
        size = sizes[turn % len(sizes)]
        for _, hidden in engine._pieces(row, ids[done : done + size]):
            logits = engine.model.head(hidden).float()
            row.logits = logits[-1]
            out.append(logits)
        done, turn = done + size, turn + 1
    return torch.cat(out)


def exchange(engine: Engine, row: Row, key: int, ids: list[int], **how: Any) -> Tensor:
    row.layout.open_group(key)
    logits = feed(engine, row, ids, **how)
    row.layout.close_group()
    return logits


def retained(row: Row) -> list[int]:
    """The tokens a query sees, in the order it sees them, the open turn last."""
    window = list(row.window_ids)
    split = len(window) - (row.layout.open.n_tokens if row.layout.open else 0)
    if row.layout.memory_position == "before_turn":
        return row.sink_ids + window[:split] + row.memory_ids + window[split:]
    return row.sink_ids + row.memory_ids + window


# 1. Window not full


@ALL
def test_logits_equal_the_stock_model_while_everything_fits(family: str) -> None:
    model = tiny_model(family)
    ids = tokens(70)
    engine = engine_for(model)
    row = engine.admit()
    torch.testing.assert_close(exchange(engine, row, 0, ids), dense(model, ids), atol=EXACT, rtol=0)


def test_real_model_equals_stock(smollm2: Any) -> None:
    text = "The whale is the largest animal that has ever lived. It breathes air, and it sings. " * 8
    ids = smollm2.tokenizer(text)["input_ids"]
    engine = engine_for(smollm2.model, cache_tokens=512, chunk_tokens=50)
    row = engine.admit()
    got = exchange(engine, row, 0, ids)
    torch.testing.assert_close(got, dense(smollm2.model, ids), atol=EXACT, rtol=0)


@pytest.mark.slow
def test_real_gemma_equals_stock_beyond_its_sliding_window() -> None:
    from memstream.models import load_model, pull

    pull("gemma3-270m")
    loaded = load_model("gemma3-270m", device="cpu", weights="float32")
    assert loaded.model.config.sliding_window == 512
    ids = loaded.tokenizer("The whale is the largest animal that has ever lived. It breathes air, and it sings. " * 48)
    ids = ids["input_ids"][:700]
    engine = engine_for(loaded.model, cache_tokens=1024, chunk_tokens=90)
    row = engine.admit()
    got = exchange(engine, row, 0, ids)
    expected = dense(loaded.model, ids)
    assert len(ids) == 700
    torch.testing.assert_close(got, expected, atol=EXACT, rtol=0)


# 2. One layer, with eviction and memory


@PAIR
@ALL
def test_one_layer_equals_dense_over_the_retained_tokens(family: str, position: str) -> None:
    model = tiny_model(family, layers=1)
    engine = engine_for(model, memory_position=position)
    row = engine.admit()
    for turn in range(7):
        engine.set_memory(row, tokens(5 + turn, seed=100 + turn) if row.layout.sinks == 4 else [])
        row.layout.open_group(turn)
        logits = feed(engine, row, tokens(13 + 5 * turn, seed=turn))
        kept = retained(row)
        assert len(kept) <= 96
        torch.testing.assert_close(logits[-1], dense(model, kept)[-1], atol=EXACT, rtol=0)
        row.layout.close_group()
    assert row.gone, "the test must evict"


@PAIR
def test_a_turn_longer_than_the_window_keeps_its_newest_tokens(position: str) -> None:
    model = tiny_model("llama", layers=1)
    engine = engine_for(model, memory_position=position)
    row = engine.admit()
    exchange(engine, row, 0, tokens(30))
    engine.set_memory(row, tokens(9, seed=5))
    row.layout.open_group(1)
    long = tokens(250, seed=1)
    logits = feed(engine, row, long)
    window = list(row.window_ids)
    assert window == long[-len(window) :]
    torch.testing.assert_close(logits[-1], dense(model, retained(row))[-1], atol=EXACT, rtol=0)


@pytest.mark.parametrize("family", ["llama", "llama_yarn", "llama_dynamic", "phi3_longrope", "glm", "gemma3"])
def test_rebase_changes_nothing(family: str) -> None:
    model = tiny_model(family, layers=1)
    engine = engine_for(model, memory_position="before_turn")
    engine.limit = 150  # instead of thousands: many rebases in a short stream
    row = engine.admit()
    for turn in range(40):
        row.layout.open_group(turn)
        logits = feed(engine, row, tokens(11 + turn % 7, seed=turn))
        row.layout.close_group()
    assert row.layout.base > 300
    row.layout.open_group("last")
    logits = feed(engine, row, tokens(9, seed=99))
    torch.testing.assert_close(logits[-1], dense(model, retained(row))[-1], atol=EXACT, rtol=0)


def test_positions_stay_below_the_limit_where_frequencies_would_change() -> None:
    engine = engine_for(tiny_model("phi3_longrope"))
    assert engine.limit == 1024
    row = engine.admit()
    row.layout.open_group(0)
    stock = engine.model.body.rotary_emb.inv_freq.clone()
    feed(engine, row, tokens(1500))
    assert torch.equal(engine.model.body.rotary_emb.inv_freq, stock)


# 3. Chunk sizes and splits


@ALL
def test_the_result_does_not_depend_on_how_tokens_are_cut(family: str) -> None:
    model = tiny_model(family)
    turns = [tokens(20 + 9 * i, seed=i) for i in range(6)]
    results = []
    for chunk, sizes in ((1, (1000,)), (7, (3, 11)), (64, (1000,))):
        engine = engine_for(model, chunk_tokens=chunk)
        row = engine.admit()
        results.append(torch.cat([exchange(engine, row, i, ids, sizes=sizes) for i, ids in enumerate(turns)]))
        assert row.gone
    torch.testing.assert_close(results[1], results[0], atol=EXACT, rtol=0)
    torch.testing.assert_close(results[2], results[0], atol=EXACT, rtol=0)


# 4. Memory inserted and removed


@PAIR
@SOME
def test_memory_that_was_removed_leaves_no_trace(family: str, position: str) -> None:
    model = tiny_model(family)
    plain, visited = (engine_for(model, memory_position=position) for _ in range(2))
    rows = [plain.admit(), visited.admit()]
    for engine, row in zip((plain, visited), rows, strict=True):
        for turn in range(4):
            exchange(engine, row, turn, tokens(30, seed=turn))
    visited.set_memory(rows[1], tokens(12, seed=50))
    visited.set_memory(rows[1], tokens(15, seed=51))
    visited.set_memory(rows[1], [])
    results = [exchange(engine, row, 9, tokens(10, seed=9)) for engine, row in zip((plain, visited), rows, strict=True)]
    assert torch.equal(results[0], results[1])


@SOME
def test_memory_equals_a_dense_run_with_it_in_front(family: str) -> None:
    model = tiny_model(family)
    engine = engine_for(model, memory_position="after_sinks")
    row = engine.admit()
    sinks, memory, turn = tokens(4, seed=1), tokens(14, seed=2), tokens(20, seed=3)
    engine.feed(row, sinks)
    engine.set_memory(row, memory)
    logits = exchange(engine, row, 0, turn)
    torch.testing.assert_close(logits, dense(model, sinks + memory + turn)[18:], atol=EXACT, rtol=0)


# 5. Rows


@PAIR
@SOME
def test_rows_in_one_forward_equal_the_same_rows_alone(family: str, position: str) -> None:
    model = tiny_model(family)
    history = [tokens(17, seed=1), tokens(140, seed=2), tokens(63, seed=3)]
    engine = engine_for(model, rows=3, memory_position=position)
    rows = [engine.admit(pinned_tokens=4 + 3 * i) for i in range(3)]
    alone = [engine_for(model, memory_position=position) for _ in range(3)]
    single = [e.admit(pinned_tokens=4 + 3 * i) for i, e in enumerate(alone)]
    for i in range(3):
        for e, row in ((engine, rows[i]), (alone[i], single[i])):
            exchange(e, row, 0, history[i])
            e.set_memory(row, tokens(3 * i, seed=60 + i))
            row.layout.open_group(1)
    for step in range(70):
        ids = [(5 * step + i) % VOCABULARY for i in range(3)]
        engine.step(rows, ids)
        for i in range(3):
            alone[i].step([single[i]], [ids[i]])
            torch.testing.assert_close(rows[i].logits, single[i].logits, atol=EXACT, rtol=0)
    assert all(row.gone for row in rows)


def test_interleaved_conversations_equal_the_same_apart() -> None:
    model = tiny_model("llama")
    engine = engine_for(model, rows=2)
    apart = [engine_for(model) for _ in range(2)]
    rows, single = [engine.admit() for _ in range(2)], [e.admit() for e in apart]
    for turn in range(6):
        for i in range(2):
            ids = tokens(25, seed=10 * turn + i)
            together = exchange(engine, rows[i], turn, ids)
            assert torch.equal(together, exchange(apart[i], single[i], turn, ids))


# 6. Long streams


def test_sinks_never_change_and_freed_slots_are_never_read() -> None:
    model = tiny_model("llama")
    engine = engine_for(model, cache_tokens=1024, evict_tokens=256, chunk_tokens=256)
    row = engine.admit()
    engine.feed(row, tokens(4))
    before = [side[:, :, :4].clone() for side in (*engine.cache.keys, *engine.cache.values)]
    size = engine.cache_bytes
    engine.cache.poison(row.index, 4, 1020)
    row.layout.open_group(0)
    stream = tokens(100_000)
    for start in range(0, len(stream), 1000):
        engine.feed(row, stream[start : start + 1000])
        assert torch.isfinite(row.logits).all()
        used = {s for slot, n in row.layout.window_arcs() for s in range(slot, slot + n)}
        for slot in sorted(set(range(4, 1024)) - used):
            engine.cache.poison(row.index, slot, 1)
    after = [side[:, :, :4] for side in (*engine.cache.keys, *engine.cache.values)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert engine.cache_bytes == size == 2 * 2 * 2 * 8 * 1024 * 4


# 7. bfloat16 does not drift


def test_bfloat16_stays_as_near_as_it_began() -> None:
    gaps = []
    stream = tokens(50_000)
    scores = []
    for dtype in (torch.float32, torch.bfloat16):
        engine = engine_for(tiny_model("llama").to(dtype), cache_tokens=512, evict_tokens=128, chunk_tokens=128)
        row = engine.admit()
        row.layout.open_group(0)
        scores.append(engine.score(row, stream))
    gaps = (scores[0] - scores[1]).abs()
    first, last = gaps[1:1000].mean(), gaps[-1000:].mean()
    assert first > 0
    assert last < 1.25 * first


# 8. Snapshots


@SOME
def test_a_restored_row_goes_on_bit_for_bit(family: str, tmp_path: Any) -> None:
    model = tiny_model(family)
    engine = engine_for(model)
    row = engine.admit(pinned_tokens=6)
    for turn in range(5):
        exchange(engine, row, turn, tokens(33, seed=turn))
    engine.set_memory(row, tokens(11, seed=77))
    path = tmp_path / "row.safetensors"
    snapshot.save(path, *snapshot.take(engine.cache, row), fingerprint="f")
    assert path.stat().st_mode & 0o777 == 0o600
    other = engine_for(model, rows=2)
    other.admit()
    loaded = snapshot.load(path, fingerprint="f")
    assert loaded is not None
    restored = other.admit(pinned_tokens=loaded[1]["sink_tokens"])
    snapshot.put(other.cache, restored, *loaded)
    assert torch.equal(restored.logits, row.logits)
    for turn in range(5, 8):
        ids = tokens(20, seed=turn)
        assert torch.equal(exchange(engine, row, turn, ids), exchange(other, restored, turn, ids))
    assert [g.key for g in row.layout.closed] == [g.key for g in restored.layout.closed]
    assert snapshot.load(path, fingerprint="another model") is None
    path.write_bytes(path.read_bytes()[:-7])
    assert snapshot.load(path, fingerprint="f") is None


# 10. Prompts around the window's size


@pytest.mark.parametrize("n", [74, 75, 76, 77, 78, 80, 81, 151, 152, 153, 240])
def test_prompts_around_the_windows_size(n: int) -> None:
    model = tiny_model("llama", layers=1)
    results = []
    for chunk in (1, 13, 128):
        engine = engine_for(model, chunk_tokens=chunk)  # window: 96 - 4 - 16 = 76
        row = engine.admit()
        logits = exchange(engine, row, 0, tokens(n))
        assert len(row.window_ids) == row.layout.window <= 76
        results.append(logits)
        torch.testing.assert_close(logits[-1], dense(model, retained(row))[-1], atol=EXACT, rtol=0)
    torch.testing.assert_close(results[1], results[0], atol=EXACT, rtol=0)
    torch.testing.assert_close(results[2], results[0], atol=EXACT, rtol=0)
