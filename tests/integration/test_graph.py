"""The decode step as a graph needs it: nothing read on the host, fixed addresses, no allocation of its own.

A card is not needed: the kernels' launches are noted instead of run, and a dispatch mode sees every other operation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memstream.config import CacheConfig
from memstream.engine import Engine
from memstream.streaming.decode import Decode
from memstream.streaming.model import StreamingModel
from tests.integration.families import FAMILIES, tiny_model
from tests.integration.test_oracles import exchange, tokens

pytest.importorskip("triton")

READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "_to_cpu")
MAKES = (
    "empty",
    "empty_like",
    "empty_strided",
    "zeros",
    "zeros_like",
    "full",
    "arange",
    "scalar_tensor",
    "lift_fresh",
    "clone",
    "_to_copy",
)
CAPTURABLE = [name for name in FAMILIES if name not in ("llama_dynamic", "phi3_longrope")]


class Spy(TorchDispatchMode):
    """Notes the name of every operation; refuses reads on the host, and tensors that memstream makes from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        assert name not in READS, f"{name} reads a device value on the host"
        if name in MAKES or name.startswith("new_"):
            assert caller() != "memstream", f"{name} allocates"
        self.seen.append(name)
        return func(*args, **(kwargs or {}))


def caller() -> str:
    """Whose code is running: ``memstream``, or ``transformers`` for the model's own."""
    frame = sys._getframe(2)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in ("memstream", "transformers"):
            return package
        frame = frame.f_back  # type: ignore[assignment]
    return "a test"


class Noted:
    """Takes a kernel's place: notes what it would be launched with, and computes nothing."""

    def __init__(self, name: str, into: list[Any]) -> None:
        self._name, self._into = name, into

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self._into.append((self._name, grid, args, options))

        return launch


def told(launches: list[Any], owned: set[int]) -> list[Any]:
    """What is fixed in a captured launch: grid, options, numbers, and addresses; of the model's own tensors only that.

    The model's activations lie where the graph's memory pool puts them, the same place in every replay.
    """
    out = []
    for name, grid, args, options in launches:
        noted = [a if not isinstance(a, Tensor) else a.data_ptr() if a.data_ptr() in owned else "model's" for a in args]
        out.append((name, grid, noted, options))
    return out


def owned(decode: Decode) -> set[int]:
    """Storages of the step and of the cache, as addresses of whatever a launch could point to in them."""
    step, cache = decode.step, decode.step.cache
    views = [step.rows, step.positions, step.parts, step.slots, *step._buffers.values()]
    views += [table for rope in set(step.ropes) for table in step.turns(rope)]
    views += [*cache.keys, *cache.values, *(s for s in (*cache.key_scales, *cache.value_scales) if s is not None)]
    work = step._buffers["work"]
    views += [work[at:] for at in range(work.numel())]
    return {view.data_ptr() for view in views}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that were launched, or would have been."""
    from memstream.kernels import dispatch
    from memstream.kernels.rebase import kernel as rebase
    from memstream.kernels.ring_write import kernel as ring_write
    from memstream.kernels.segment_attention import kernel as attention

    found: list[Any] = []
    monkeypatch.setenv("MEMSTREAM_KERNELS", "triton")
    monkeypatch.setattr(dispatch, "why_no_triton", lambda device: None)
    monkeypatch.setattr(rebase, "rebase_kernel", Noted("rebase", found))
    monkeypatch.setattr(ring_write, "write_kernel", Noted("write", found))
    monkeypatch.setattr(attention, "attention_kernel", Noted("attention", found))
    monkeypatch.setattr(attention, "merge_kernel", Noted("merge", found))
    return found


def step_under_the_spy(decode: Decode, launches: list[Any]) -> list[Any]:
    launches.clear()
    with torch.inference_mode(), Spy() as spy:
        decode.compute()
    assert {"mm", "addmm", "bmm", "linear"} & set(spy.seen)
    return told(launches, owned(decode))


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", CAPTURABLE)
def test_the_same_launches_for_every_token(family: str, kv_dtype: Any, launches: list[Any]) -> None:
    config = CacheConfig(cache_tokens=96, memory_tokens=16, evict_tokens=8, chunk_tokens=16, kv_dtype=kv_dtype)
    engine = Engine(StreamingModel(tiny_model(family)), config, rows=3)
    engine.limit = 150
    rows = [engine.admit(), engine.admit()]
    for row in rows:
        exchange(engine, row, 0, tokens(20))
        row.layout.open_group("turn")
    engine.step(rows, [5, 6])
    decode = engine._decoders[2, 1]
    first = step_under_the_spy(decode, launches)
    assert [name for name, *_ in first].count("attention") == 2  # layers
    assert [name for name, *_ in first].count("write") == 4

    rows[1].layout.close_group()  # evictions, new memory and a rebase in one row only
    for key in range(12):
        exchange(engine, rows[1], key, tokens(17, seed=key))
    engine.set_memory(rows[1], tokens(9))
    assert "rebase" in [name for name, *_ in launches]
    assert rows[1].layout.start > 0
    rows[1].layout.open_group("later")
    engine.step(rows, [7, 8])
    assert engine._decoders[2, 1] is decode
    assert step_under_the_spy(decode, launches) == first


@pytest.mark.parametrize("family", [name for name in CAPTURABLE if name != "gpt_oss"])
def test_nothing_is_read_on_the_host(family: str, launches: list[Any]) -> None:
    """On the meta device there are no values: whoever reads one, by whatever call, gets an error."""
    config = CacheConfig(cache_tokens=96, memory_tokens=16, evict_tokens=8, chunk_tokens=16)
    engine = Engine(StreamingModel(tiny_model(family).to("meta")), config)
    row = engine.admit()
    row.layout.append(config.sink_tokens)
    row.layout.open_group("turn")
    engine.step([row], [5])
    assert row.logits is not None
    assert row.logits.is_meta
    with pytest.raises(NotImplementedError, match="meta tensor"):
        row.logits.tolist()
    assert "attention" in [name for name, *_ in launches]


@pytest.mark.parametrize("family", ["llama_dynamic", "phi3_longrope"])
def test_a_model_that_reads_positions_on_the_host_is_known(family: str) -> None:
    assert StreamingModel(tiny_model(family)).reads_positions_on_host
    assert not StreamingModel(tiny_model("llama")).reads_positions_on_host
