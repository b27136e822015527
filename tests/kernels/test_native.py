"""The native kernels: what the compiler makes of them, and what they compute, against dense products and whole models.

Compiled as ``PLAIN``, inputs stay in float32. With the processor's byte products they are rounded to half a 254th of a
127th of the largest of 32.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from memstream.config import CacheConfig
from memstream.engine import Engine
from memstream.errors import KernelUnavailableError
from memstream.kernels.native import NativeProduct, build, native_runs, packs, pieces, why_no_native
from memstream.models import packed
from memstream.models.packed import GROUP, pack
from memstream.streaming.model import StreamingModel
from tests.integration.families import FAMILIES
from tests.integration.test_oracles import tokens

pytestmark = pytest.mark.skipif(why_no_native() is not None, reason=f"no native kernels: {why_no_native()}")
SHAPED = ["llama", "llama_yarn", "llama_llama3", "mistral", "mistral_sliding", "qwen2", "qwen3", "smollm3"]
VOCABULARY = 112
EXACT = 2e-4  # of logits between 1 and 10, float32
NEAR = 3e-2  # where inputs are rounded, and a hot softmax makes more of it


@pytest.fixture(params=["bytes", "plain"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels as this processor has them, and as others do."""
    if request.param == "plain":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DPLAIN"))


@pytest.fixture
def wide_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "multiplies_bfloat16", lambda: False)


def weights(bits: int, n: int, k: int) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]:
    """What a product is made of, and the same as a dense matrix in float64."""
    if bits == 8:
        levels, step = (
            torch.randint(-127, 128, (n, k), dtype=torch.int8),
            (torch.rand(n, k // GROUP) / 64).half().float(),
        )
        return (levels, step, None), levels.double() * step.double().repeat_interleave(GROUP, dim=-1)
    levels = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    step, low = (torch.rand(n, k // GROUP) / 64).half().float(), torch.randn(n, k // GROUP).half().float()
    grouped = levels.double().view(n, -1, GROUP) * step.double()[..., None] + low.double()[..., None]
    return (levels, step, low), grouped.view(n, k)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize(("n", "k"), [(16, 32), (48, 96), (144, 608)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_its_weights(bits: int, rows: int, n: int, k: int, bias: bool) -> None:
    made, dense = weights(bits, n, k)
    added = torch.randn(n) if bias else None
    x = torch.randn(rows, k) * torch.rand(rows, k).exp()
    x[-1, : k // 2] = 0  # a block of nothing
    got = NativeProduct(*made, added)(x)
    expected = x.double() @ dense.T + (0.0 if added is None else added.double())
    largest = x.view(rows, -1, GROUP).abs().amax(-1).repeat_interleave(GROUP, dim=-1)
    slack = largest.double() / (2 * 127 * 254) @ dense.abs().T + 2e-6 * (x.abs().double() @ dense.abs().T)
    assert ((got - expected).abs() <= slack + 1e-6).all()


@pytest.mark.usefixtures("either")
def test_another_default_type_changes_nothing() -> None:
    """transformers sets it while it loads a model, for all threads."""
    made, dense = weights(4, 48, 96)
    product, x = NativeProduct(*made, None), torch.randn(16, 96)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = product(x)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got.double(), x.double() @ dense.T, rtol=1e-3, atol=1e-2)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_no_number_stays_none(bits: int) -> None:
    made, _ = weights(bits, 16, 64)
    x = torch.randn(2, 64)
    x[0, 40] = torch.nan
    got = NativeProduct(*made, None)(x)
    assert got[0].isnan().all()
    assert got[1].isfinite().all()


def test_which_shapes_can_be_packed() -> None:
    assert packs(16, 32)
    assert packs(49152, 576)
    assert not packs(24, 32)
    assert not packs(16, 48)


def model_on_a_grid(family: str, bits: int) -> Any:
    """A tiny model whose weights are what packing makes of them, so nothing is lost by it."""
    kind, settings = FAMILIES[family]
    values = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0,
        "tie_word_embeddings": False, **settings,
    }  # fmt: skip
    if family == "smollm3":
        values["no_rope_layers"] = [1, 0, 1]
    torch.manual_seed(5)
    config = getattr(transformers, kind)(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            if layer.bias is not None:
                layer.bias.copy_(0.2 * torch.randn_like(layer.bias))
            eight = bits == 8 or layer is model.get_output_embeddings()
            layer.weight.copy_(on_grid_8(layer.weight) if eight else on_grid_4(layer.weight))
    return model


def on_grid_8(weight: Tensor) -> Tensor:
    levels = torch.randint(-127, 128, weight.shape).float()
    levels[:, ::GROUP] = 127
    return levels / 512


def on_grid_4(weight: Tensor) -> Tensor:
    levels = torch.randint(0, 16, (len(weight), weight.shape[1] // GROUP, GROUP)).float()
    levels[..., 0], levels[..., 1] = 0, 15
    return (levels / 32 - torch.randint(4, 10, levels.shape[:2])[..., None] / 32).view_as(weight)


def stream(model: Any, *, kv_dtype: Any = "auto", position: Any = "before_turn", chunk: int = 16) -> Tensor:
    """Logits of two ragged rows in which all happens: eviction, memory, rebase, one token and many, one row and two."""
    config = CacheConfig(
        cache_tokens=56, memory_tokens=12, evict_tokens=8, chunk_tokens=chunk, memory_position=position,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    engine = Engine(StreamingModel(model), config, rows=3)
    engine.limit = 60
    engine.admit()
    rows = [engine.admit(), engine.admit()]
    engine.cache.poison(rows[0].index, 0, 56)
    engine.cache.poison(rows[1].index, 0, 56)
    seen = []
    for turn in range(5):
        for i, row in enumerate(rows):
            row.layout.open_group(turn)
            engine.feed(row, tokens(9 + 4 * i + turn, seed=turn))
            seen.append(row.logits)
        engine.set_memory(rows[turn % 2], tokens(5 + turn, seed=50 + turn))
        for token in (5, 6):
            engine.step(rows, [token, token + 1])
            seen += [row.logits for row in rows]
        engine.step(rows[:1], [7])
        seen.append(rows[0].logits)
        for row in rows:
            row.layout.close_group()
    assert all(row.layout.start > 0 for row in rows)
    assert any(row.layout.base > 0 for row in rows)
    rows[0].layout.open_group("scored")
    seen_of_all = torch.stack([logits for logits in seen if logits is not None]).flatten()
    return torch.cat([seen_of_all, engine.score(rows[0], tokens(11, seed=99))])


@pytest.mark.usefixtures("either", "wide_in_float32")
@pytest.mark.parametrize("position", ["before_turn", "after_sinks"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", SHAPED)
def test_a_decode_step_is_that_of_the_model(
    family: str, bits: packed.Bits, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stream(model_on_a_grid(family, bits), position=position)
    model = model_on_a_grid(family, bits)
    pack(model, bits)
    ran = []
    run = Engine._decode
    monkeypatch.setattr(Engine, "_decode", lambda self, *args: ran.append(self) or run(self, *args))
    got = stream(model, position=position)
    assert all(decode._native is not None for engine in ran for decode in engine._decoders.values())
    torch.testing.assert_close(got, expected, atol=EXACT if "-DPLAIN" in build.FLAGS else NEAR, rtol=0)


@pytest.mark.usefixtures("either", "wide_in_float32")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", SHAPED)
def test_tokens_computed_at_once_are_to_the_bit_those_computed_one_by_one(family: str, bits: packed.Bits) -> None:
    """So that drafts are checked by the very numbers that decoding without them would see."""
    model = model_on_a_grid(family, bits)
    pack(model, bits)
    config = CacheConfig(cache_tokens=72, memory_tokens=12, evict_tokens=20, chunk_tokens=16)
    engines = [Engine(StreamingModel(model), config, rows=2) for _ in range(2)]
    for engine in engines:
        engine.admit()
    once, each = (engine.admit() for engine in engines)
    for turn in range(6):
        for engine, row in zip(engines, (once, each), strict=True):
            row.layout.open_group(turn)
            engine.feed(row, tokens(9 + 4 * turn, seed=turn))
            engine.set_memory(row, tokens(5 + turn, seed=50 + turn))
        for n in (2, 5, 16, 11):
            ids = tokens(n, seed=100 * turn + n)[: 1 + engines[0].spare(once)]
            got = engines[0].verify(once, ids) if len(ids) > 1 else None
            seen = []
            for token in ids:
                engines[1].step([each], [token])
                seen.append(each.logits)
            if got is None:
                engines[0].step([once], ids)
                continue
            assert torch.equal(got, torch.stack([logits for logits in seen if logits is not None]))
        arcs = once.layout.window_arcs()
        held = (engine.cache.read(row.index, arcs) for engine, row in zip(engines, (once, each), strict=True))
        assert all(torch.equal(one, other) for one, other in zip(*(parts.values() for parts in held), strict=True))
        for row in (once, each):
            row.layout.close_group()
        engines[0].resize(2 + turn)  # keys and values lie elsewhere from now on
    assert once.layout.start > 0


@pytest.mark.usefixtures("wide_in_float32")
def test_few_tokens_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to sixteen, of one row or of several, in whatever way they come."""
    model = model_on_a_grid("llama", 8)
    pack(model, 8)
    engine = Engine(StreamingModel(model), CacheConfig(cache_tokens=90, memory_tokens=20), rows=2)
    monkeypatch.setattr(engine.model, "body", None)  # its own forward
    rows = [engine.admit(), engine.admit()]
    for row in rows:
        row.layout.open_group(0)
        engine.feed(row, tokens(20))
    engine.set_memory(rows[0], tokens(16))
    engine.verify(rows[0], tokens(16, seed=1))
    engine.step(rows, [5, 6])
    with pytest.raises(TypeError):
        engine.feed(rows[0], tokens(17, seed=2))


@pytest.mark.usefixtures("wide_in_float32")
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven threads, and three outputs' groups: some have nothing to do."""
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DPLAIN"))
    expected = stream(model_on_a_grid("llama", 8))
    model, before = model_on_a_grid("llama", 8), torch.get_num_threads()
    pack(model, 8)
    torch.set_num_threads(threads)
    try:
        torch.testing.assert_close(stream(model), expected, atol=EXACT, rtol=0)
    finally:
        torch.set_num_threads(before)


def test_widths_that_are_no_whole_vectors_run_through_the_model() -> None:
    kind, _ = FAMILIES["llama"]
    config = getattr(transformers, kind)(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=100, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=0,
    )  # fmt: skip
    found = []
    for bits in (None, 8):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        if bits:
            pack(model, bits)  # type: ignore[arg-type]
        found.append(stream(model, chunk=40))
    torch.testing.assert_close(found[1], found[0], atol=0.05, rtol=0)


def test_models_that_are_not_quite_transformers_own_run_through_their_forward() -> None:
    def packed_model() -> Any:
        model = model_on_a_grid("llama", 8)
        pack(model, 8)
        return model

    assert StreamingModel(packed_model()).native is not None
    hooked, changed, narrow = packed_model(), packed_model(), packed_model().bfloat16()
    hooked.model.layers[1].register_forward_hook(lambda *_: None)

    class Own(type(changed.model.layers[0])):  # type: ignore[misc]
        """A layer of somebody's own."""

    changed.model.layers[0].__class__ = Own
    for model in (hooked, changed, narrow):
        assert StreamingModel(model).native is None


@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16"])
def test_what_the_native_step_does_not_take_runs_through_the_model(kv_dtype: str) -> None:
    model = model_on_a_grid("llama", 8)
    pack(model, 8)
    streaming = StreamingModel(model)
    engine = Engine(streaming, CacheConfig(cache_tokens=56, memory_tokens=12, evict_tokens=8, kv_dtype=kv_dtype))  # type: ignore[arg-type]
    row = engine.admit()
    row.layout.open_group(0)
    engine.feed(row, tokens(9))
    engine.step([row], [5])
    assert engine._decoders[1, 1]._native is None
    assert row.logits is not None
    assert row.logits.isfinite().all()


@pytest.mark.skipif(not packed.multiplies_bfloat16(), reason="this processor has no bfloat16 products")
@pytest.mark.parametrize("family", SHAPED)
def test_a_piece_is_as_near_to_float32_as_torch_makes_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide products round to bfloat16 on either path; a wrong slot, turn or mask would be far from both."""
    exact = stream(model_on_a_grid(family, 8), chunk=40)
    distance = {}
    for choice in ("torch", "native"):
        monkeypatch.setenv("MEMSTREAM_KERNELS", choice)
        model = model_on_a_grid(family, 8)
        pack(model, 8)
        monkeypatch.setattr("memstream.streaming.model._FEW_TOKENS", 4)
        for layer in model.modules():
            if isinstance(layer, packed.PackedLinear):
                layer.few_rows = 2
        got = stream(model, chunk=40)
        distance[choice] = float((got - exact).norm() / exact.norm())
    assert distance["native"] < 1.3 * distance["torch"]
    assert distance["torch"] < 0.05


def test_pieces_between_products() -> None:
    x, add, weight = torch.randn(5, 48), torch.randn(5, 48).bfloat16(), torch.randn(48)
    total = x.double() + add.double()
    out = pieces.add_norm(x, add, weight, 1e-5)
    torch.testing.assert_close(x.double(), total, atol=1e-6, rtol=0)
    expected = weight.double() * total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)
    before = x.clone()
    pieces.add_norm(x, None, weight, 1e-5)
    assert torch.equal(x, before)
    gate_up = (4 * torch.randn(3, 64)).bfloat16()
    gate, up = gate_up.double().chunk(2, dim=-1)
    torch.testing.assert_close(pieces.gate(gate_up).double(), gate * gate.sigmoid() * up, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("n", [16, 97, 4099])
def test_nll(n: int) -> None:
    logits, targets = (8 * torch.randn(6, n)).bfloat16(), torch.randint(0, n, (6,))
    targets[0], targets[1] = 0, n - 1
    expected = logits.double().logsumexp(-1) - logits.double().gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(pieces.nll(logits, targets).double(), expected, atol=2e-5, rtol=1e-5)


def test_rounding_to_bfloat16_is_torchs() -> None:
    x = torch.randn(64, 16) * 10.0 ** torch.randint(-6, 6, (64, 1))
    ones = torch.ones(16)
    scaled = torch.ones_like(x)
    scaled[:, 0] = x[:, 0]
    out = pieces.add_norm(scaled.clone(), None, ones, 0.0)
    exact = scaled * (1 / (scaled.pow(2).mean(-1, keepdim=True)).sqrt())
    assert (out.float() - exact.bfloat16().float()).abs().max() <= 2**-8 * exact.abs().max()


# ---- what the compiler makes of it ----


@pytest.fixture
def fresh(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A home in which nothing has been compiled."""
    monkeypatch.setenv("MEMSTREAM_HOME", str(tmp_path / "fresh"))
    build._build.cache_clear()
    yield tmp_path / "fresh"
    build._build.cache_clear()


def test_it_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_runs()
    (made,) = (fresh / "native").iterdir()
    build._build.cache_clear()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert native_runs()
    assert list((fresh / "native").iterdir()) == [made]


def test_no_compiler_means_torch(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CC", raising=False)
    assert not native_runs()
    assert why_no_native() == "there is no C compiler (gcc, cc or clang)"
    monkeypatch.setenv("MEMSTREAM_KERNELS", "native")
    with pytest.raises(KernelUnavailableError, match=r"'native', but there is no C compiler .*; unset it"):
        native_runs()


def test_a_compiler_that_fails_says_why(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "error: no such thing" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert not native_runs()
    assert why_no_native() == f"{compiler} cannot compile them: error: no such thing"
    assert not list((fresh / "native").iterdir())


def test_a_compiler_that_is_not_there(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert not native_runs()
    assert "cannot be compiled" in (why_no_native() or "")


def test_a_compiler_with_options(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc -pipe")
    assert native_runs()


def test_a_damaged_library_is_compiled_again(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert native_runs()
    (good,) = (fresh / "native").iterdir()
    damaged = tmp_path / "other" / "native" / good.name
    damaged.parent.mkdir(mode=0o700, parents=True)
    damaged.write_bytes(good.read_bytes()[:100])
    monkeypatch.setenv("MEMSTREAM_HOME", str(tmp_path / "other"))
    build._build.cache_clear()
    assert native_runs()
    assert damaged.stat().st_size == good.stat().st_size


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_may_write_to(fresh: Path, mode: int) -> None:
    (fresh / "native").mkdir(parents=True)
    (fresh / "native").chmod(mode)
    assert not native_runs()
    assert "others may write to" in (why_no_native() or "")


def test_the_home_is_private(fresh: Path) -> None:
    assert native_runs()
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700


def test_old_libraries_are_removed(fresh: Path) -> None:
    (fresh / "native").mkdir(mode=0o700, parents=True)
    for i in range(30):
        (fresh / "native" / f"{i:016}.so").touch()
    assert native_runs()
    assert len(list((fresh / "native").iterdir())) == build.MOST_KEPT


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_that_cannot_be_written(fresh: Path) -> None:
    fresh.mkdir()
    fresh.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert not native_runs()


def test_the_choice_of_torch_compiles_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSTREAM_KERNELS", "torch")
    assert not native_runs()
    assert not fresh.exists()
