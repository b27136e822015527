"""Weights in four and eight bits: what is found again, what is rounded, what the products give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from memstream.models import packed
from memstream.models.packed import GROUP, Blocks, PackedLinear, Siblings, pack, save_blocks
from tests.integration.families import tiny_model

N, K = 48, 96
SMALL = LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)


def blocks_of(kind: str, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [N, K], steps and lows [N, K/32] as GGUF has them: float16 numbers, Q4_0 around zero, Q4_1 anywhere."""
    draw = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 16, (N, K), generator=draw)
    step = (torch.rand(N, K // GROUP, generator=draw) * 0.02 + 1e-3).half().float()
    low = -8 * step if kind == "q4_0" else (torch.randn(N, K // GROUP, generator=draw) * 0.1).half().float()
    return levels, step, low


def wide(levels: Tensor, step: Tensor, low: Tensor) -> Tensor:
    """low + step x level, weight by weight."""
    out = torch.empty(levels.shape)
    for row in range(levels.shape[0]):
        for column in range(levels.shape[1]):
            group = column // GROUP
            out[row, column] = low[row, group] + step[row, group] * levels[row, column]
    return out


@pytest.mark.parametrize("kind", ["q4_0", "q4_1"])
def test_blocks_are_found_again(kind: str) -> None:
    weight = wide(*blocks_of(kind))
    found = Blocks.found(weight)
    assert found is not None
    assert found.levels.max() <= 15
    again = wide(found.levels, found.step, found.low)
    torch.testing.assert_close(again, weight, rtol=0, atol=1e-6)


def test_blocks_without_neighbouring_levels_and_without_any_difference_are_found() -> None:
    levels, step, low = blocks_of("q4_1")
    levels[0, :GROUP] = torch.tensor([0, 2, 5, 15]).repeat(GROUP // 4)  # the smallest gap is two steps
    levels[1, :GROUP] = 7
    weight = wide(levels, step, low)
    found = Blocks.found(weight)
    assert found is not None
    torch.testing.assert_close(wide(found.levels, found.step, found.low), weight, rtol=0, atol=1e-6)


def test_weights_of_no_blocks_are_not_taken_for_some() -> None:
    assert Blocks.found(torch.randn(N, K)) is None
    weight = wide(*blocks_of("q4_1"))
    weight[3, 40] += 0.3 * (weight[3, 32:64].sort().values.diff()).amax()  # one weight between two levels
    assert Blocks.found(weight) is None
    levels, step, low = blocks_of("q4_1")
    levels[5, :GROUP] = torch.arange(GROUP)  # 32 levels: five bits
    assert Blocks.found(wide(levels, step, low)) is None


def test_rounding_moves_a_weight_by_half_a_step_at_most() -> None:
    weight = torch.randn(N, K)
    rounded = Blocks.rounded(weight)
    moved = (wide(rounded.levels, rounded.step, rounded.low) - weight).abs().view(N, -1, GROUP)
    assert (moved <= 0.5001 * rounded.step[..., None] + 1e-6).all()
    spans = weight.view(N, -1, GROUP)
    assert torch.allclose(rounded.step * 15, spans.amax(-1) - spans.amin(-1), atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_the_rounded_weights(bits: packed.Bits, rows: int, bias: bool) -> None:
    layer = nn.Linear(K, N, bias=bias).requires_grad_(False)
    layer.weight.copy_(wide(*blocks_of("q4_1")))
    x = torch.randn(3, rows, K)[:1]
    got = PackedLinear([layer], bits)(x)
    assert got.shape == (1, rows, N)
    assert got.dtype == torch.float32
    # bfloat16 keeps 8 bits of each factor and of the sum, and the bytes of the native kernels half a 127th of the
    # largest of 32 inputs; eight-bit weights add half a 127th of a row's largest
    size = x.abs().double() @ layer.weight.abs().double().T
    slack = (3 * 2**-8 + (0.5 / 127 if bits == 8 else 2**-8)) * size
    largest = x.view(1, rows, -1, GROUP).abs().amax(-1).repeat_interleave(GROUP, dim=-1)
    slack += 0.5 / 127 * largest.double() @ layer.weight.abs().double().T
    if bits == 8:
        slack += 0.5 / 127 * x.abs().sum(-1, keepdim=True) * layer.weight.abs().amax(-1)
    expected = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0.0)
    assert ((got - expected).abs() <= slack + 1e-4).all()


def test_a_shape_that_four_bits_cannot_take_is_held_in_eight() -> None:
    for shape in ((K, 24), (40, N)):
        dense = nn.Linear(*shape).requires_grad_(False)
        layer = PackedLinear([dense], 4)
        assert layer.bits == 8
        for rows in (1, 4, 16, 64):
            x = torch.randn(rows, shape[0])
            torch.testing.assert_close(layer(x), dense(x), atol=0.03, rtol=0.02)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt_neox", "phi3_longrope", "gpt_oss"])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_linear_layer_of_a_model_is_packed(family: str, bits: packed.Bits) -> None:
    model = tiny_model(family)
    ids = torch.randint(0, 30, (1, 3))
    with torch.inference_mode():
        before = model(ids).logits
        pack(model, bits)
        after = model(ids).logits
    assert not [name for name, layer in model.named_modules() if type(layer) is nn.Linear]
    assert model.get_output_embeddings().bits == 8
    cosine = torch.cosine_similarity(before.flatten(), after.flatten(), dim=0)
    assert cosine > (0.95 if bits == 4 else 0.998)
    assert not torch.equal(before, after)


def test_blocks_are_kept_in_a_file_and_taken_from_it(tmp_path: Path) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        made = LlamaForCausalLM(SMALL).requires_grad_(False)
        for name, layer in made.named_modules():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                layer.weight.data = _on_a_grid(layer.weight.data)
        return made

    assert save_blocks(model(), tmp_path)
    taken, rounded = model(), model()
    pack(taken, 4, tmp_path)
    pack(rounded, 4)
    layer = taken.model.layers[0].mlp.down_proj
    found = Blocks.found(model().model.layers[0].mlp.down_proj.weight.data)
    assert found is not None
    assert torch.equal(layer.packed, PackedLinear([model().model.layers[0].mlp.down_proj], 4, [found]).packed)
    other = rounded.model.layers[0].mlp.down_proj
    assert not (torch.equal(layer.packed, other.packed) and torch.equal(layer.scales, other.scales))


def _on_a_grid(weight: Tensor) -> Tensor:
    """Levels 0 to 14 of each group in steps of 1/64: rounding between smallest and largest would take other steps."""
    grouped = weight.view(len(weight), -1, GROUP)
    low = grouped.amin(-1, keepdim=True)
    levels = ((grouped - low) / (grouped.amax(-1, keepdim=True) - low) * 14).round()
    return (low + levels / 64).view_as(weight)


def test_a_model_of_other_weights_leaves_no_file(tmp_path: Path) -> None:
    assert not save_blocks(tiny_model("llama"), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_siblings_compute_once_what_each_would_alone(bits: packed.Bits, rows: int, bias: bool) -> None:
    layers = [nn.Linear(K, n, bias=bias).requires_grad_(False) for n in (48, 16, 32)]
    product = PackedLinear(layers, bits)
    siblings = Siblings(product, [48, 16, 32])
    inputs: list[Tensor] = []
    product.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
    one, other = torch.randn(2, 1, rows, K)
    for x in (one, other, one):
        for layer, part in zip(layers, siblings.parts, strict=True):
            alone = PackedLinear([layer], bits)(x)
            torch.testing.assert_close(part(x), alone, rtol=0, atol=1e-5)
    assert [any(x is given for given in (one, other)) for x in inputs] == [True] * 3
    siblings.parts[0](one)
    torch.testing.assert_close(siblings.parts[1](other), PackedLinear([layers[1]], bits)(other))
    torch.testing.assert_close(siblings.parts[1](other), PackedLinear([layers[1]], bits)(other))


def test_siblings_of_a_model_share_a_product() -> None:
    model = tiny_model("qwen2")
    n_layers = model.config.num_hidden_layers
    before = sum(isinstance(layer, nn.Linear) for layer in model.modules())
    pack(model, 4)
    assert before == 7 * n_layers + 1
    assert sum(isinstance(layer, PackedLinear) for layer in model.modules()) == 4 * n_layers + 1
