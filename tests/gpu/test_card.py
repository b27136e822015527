"""What only a card can show: the captured step equals the step computed kernel by kernel, whatever happens between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from memstream.config import CacheConfig
from memstream.engine import Engine
from memstream.errors import ModelNotFoundError
from memstream.streaming.model import StreamingModel
from tests.integration.families import FAMILIES, tiny_model
from tests.integration.test_oracles import tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]
# The first two look at positions on the host, the experts of gpt_oss in float32 at how many tokens each of them has.
CAPTURED = [name for name in FAMILIES if name not in ("llama_dynamic", "phi3_longrope", "gpt_oss")]


def engine_for(model: Any, *, rows: int = 3, **settings: Any) -> Engine:
    config = {"cache_tokens": 96, "memory_tokens": 16, "evict_tokens": 8, "chunk_tokens": 16, **settings}
    return Engine(StreamingModel(model), CacheConfig(**config), rows=rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_stock_models_while_everything_fits(family: str) -> None:
    model, ids = tiny_model(family).cuda(), tokens(60)
    engine = engine_for(model)
    row = engine.admit()
    row.layout.open_group("text")
    engine.feed(row, ids[:30])
    for token in ids[30:]:
        engine.step([row], [token])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(torch.tensor([ids], device="cuda")).logits[0, -1].float()
    assert row.logits is not None
    torch.testing.assert_close(row.logits, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", CAPTURED)
def test_replay_equals_computing(family: str, kv_dtype: str) -> None:
    """The same stream twice: through the graph, and kernel by kernel; evictions, memory and rebases on the way."""
    logits = []
    for captured in (True, False):
        engine = engine_for(tiny_model(family).cuda(), kv_dtype=kv_dtype)
        engine.limit = 150
        rows = [engine.admit(), engine.admit()]
        seen = []
        for turn in range(12):
            for i, row in enumerate(rows):
                row.layout.open_group(turn)
                engine.feed(row, tokens(7 + 6 * i + turn, seed=turn))
            engine.set_memory(rows[turn % 2], tokens(3 + turn, seed=turn))
            for token in range(5, 11):
                engine.step(rows, [token, token + 1])
                decode = engine._decoders[2, 1]
                if not captured:
                    decode._capturable, decode._graph = False, None
                seen += [row.logits for row in rows if row.logits is not None]
            for row in rows:
                row.layout.close_group()
        assert all(row.layout.base > 0 for row in rows)
        assert (engine._decoders[2, 1]._graph is not None) == captured
        logits.append(torch.stack(seen))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=0)  # the same kernels


def test_real_smollm2_in_float32_and_its_greedy_text(request: pytest.FixtureRequest) -> None:
    try:
        smollm2 = request.getfixturevalue("smollm2")
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    model = copy.deepcopy(smollm2.model).cuda()  # the fixture is for all tests
    ids = smollm2.tokenizer("The capital of France is Paris. " * 30)["input_ids"][:200]
    engine = engine_for(model, cache_tokens=512, memory_tokens=0)
    row = engine.admit()
    row.layout.open_group("text")
    engine.feed(row, ids)
    for _ in range(20):
        assert row.logits is not None
        ids.append(int(row.logits.argmax()))
        engine.step([row], [ids[-1]])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(torch.tensor([ids], device="cuda")).logits[0].float()
    torch.testing.assert_close(row.logits, expected[-1], atol=5e-3, rtol=0)
    assert ids[200:] == expected[199:-1].argmax(-1).tolist()


def test_the_cache_takes_what_it_says() -> None:
    model = tiny_model("llama").cuda()
    streaming = StreamingModel(model)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    cache = streaming.new_cache(CacheConfig(cache_tokens=2048), rows=8)
    assert torch.cuda.memory_allocated() - before == pytest.approx(cache.bytes, rel=0.01)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_rows_go_on_in_a_cache_made_anew(kv_dtype: str) -> None:
    """They keep what they hold, other graphs are captured, and a state that was in host memory comes back."""
    model = tiny_model("llama").cuda()
    engines = [engine_for(model, rows=4, kv_dtype=kv_dtype) for _ in range(2)]
    rows = [[engine.admit() for _ in range(4)] for engine in engines]
    for engine, mine in zip(engines, rows, strict=True):
        for i, row in enumerate(mine):
            row.layout.open_group(0)
            engine.feed(row, tokens(20 + i, seed=i))
    engine, other = engines
    state = engine.take(rows[0][2])
    assert all(tensor.device.type == "cpu" for tensor in state[0].values())
    for i in (0, 2):
        engine.leave(rows[0][i])
    for n_rows in (2, 4, 3):
        engine.resize(n_rows)
        if n_rows == 4:
            rows[0][2] = engine.admit()
            engine.put(rows[0][2], state)
            other_rows = [row for i, row in enumerate(rows[1]) if i]
            for token in range(9, 12):
                engine.step(rows[0][1:], [token] * 3)
                other.step(other_rows, [token] * 3)
            engine.leave(rows[0][2])
        for token in range(5, 8):
            engine.step([rows[0][1], rows[0][3]], [token, token + 1])
            other.step([rows[1][1], rows[1][3]], [token, token + 1])
            for i in (1, 3):
                assert torch.equal(rows[0][i].logits, rows[1][i].logits)
