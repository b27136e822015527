"""What each op must move and compute, and what its kernel's own loads and stores add up to: arithmetic, no card."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Card(NamedTuple):
    """Peak figures from the maker's data sheets: bytes/s of memory, dense bfloat16 operations/s, multiprocessors."""

    bytes_per_s: float
    operations_per_s: float
    processors: int


CARDS = {
    "A100": Card(2.039e12, 312e12, 108),
    "H100": Card(3.35e12, 989e12, 132),
    "H200": Card(4.8e12, 989e12, 132),
}


@dataclass(frozen=True)
class Model:
    """Shapes of one model: layers L, query heads H, kv heads K, head dimension D, hidden size E, vocabulary V."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    vocabulary: int
    parameters: float


MODELS = {
    "Llama-3-8B": Model(32, 32, 8, 128, 4096, 128_256, 8.03e9),
    "SmolLM2-135M": Model(30, 9, 3, 64, 576, 49_152, 134.5e6),
}
ITEM = 2  # bfloat16
PARTS = 5


class Work(NamedTuple):
    """One launch: bytes it must move, operations it must do, bytes its code moves."""

    op: str
    setting: str
    bytes: float
    operations: float
    own_bytes: float

    def floor_us(self, card: Card) -> float:
        """The least time on a card, in microseconds."""
        return 1e6 * max(self.bytes / card.bytes_per_s, self.operations / card.operations_per_s)


def attention(model: Model, *, batch: int, n: int, cached: int, kv_bytes: float, queries: int, splits: int) -> Work:
    """One layer. ``kv_bytes``: of one stored number, its share of the scale included."""
    heads, dim = model.heads, model.dim
    store = 2 * batch * model.kv_heads * cached * dim * kv_bytes
    tokens = 2 * batch * n * heads * dim * ITEM  # queries in, results out
    tiles = math.ceil(n * heads / model.kv_heads / queries)
    meetings = tiles * batch * model.kv_heads * (PARTS + splits - 1)  # of a program and a part in its share
    group = min(queries, n * heads // model.kv_heads)
    turned = meetings * (group * dim * ITEM + 2 * dim * 4)
    shares = 2 * batch * n * heads * splits * (dim + 2) * 4 if splits > 1 else 0
    own = tiles * store + turned + shares + batch * n * heads * dim * ITEM
    kind = "int8" if kv_bytes < ITEM else "16 bit"
    name = "decode" if n == 1 else f"prefill of {n}"
    return Work(
        "segment_attention",
        f"{name}, {batch} x {cached:,} cached, {kind}",
        store + tokens,
        4 * batch * n * heads * cached * dim,
        own,
    )


def works(model: Model) -> Iterator[Work]:
    """The launches of one layer (and of the output layer) at typical sizes."""
    int8 = 1 + 2 / model.dim
    for batch, cached in ((1, 1024), (1, 4096), (8, 4096)):
        for kv_bytes in (ITEM, int8):
            splits = min(64, 2 ** math.ceil(math.log2(max(1, 132 / (batch * model.kv_heads)))), cached // 64)
            yield attention(model, batch=batch, n=1, cached=cached, kv_bytes=kv_bytes, queries=16, splits=splits)
    queries = 128 if model.dim <= 64 else 64
    yield attention(model, batch=1, n=512, cached=4096, kv_bytes=ITEM, queries=queries, splits=1)
    new = 2 * model.kv_heads * model.dim
    yield Work("ring_write", "1 token, 16 bit", 2 * new * ITEM, 0, 2 * new * ITEM + 8)
    yield Work("ring_write", "1 token, int8", new * (ITEM + int8), 2 * new, new * (ITEM + int8) + 8)
    keys = model.kv_heads * 4096 * model.dim * ITEM
    yield Work("rebase", "4,096 slots, 16 bit", 2 * keys, 3 * keys / ITEM, 3 * keys)
    weights = model.vocabulary * model.hidden * ITEM
    for n in (64, 512):
        states = n * model.hidden * ITEM
        own = math.ceil(n / 64) * weights + math.ceil(model.vocabulary / 128) * states
        yield Work("token_nll", f"{n} tokens", weights + states, 2 * n * model.vocabulary * model.hidden, own)


def tables() -> str:
    """Markdown: one table per model."""
    lines = []
    for name, model in MODELS.items():
        lines += [f"\n**{name}**, one layer (`token_nll`: the output layer)\n"]
        cards = " | ".join(f"{card}, us" for card in CARDS)
        lines += [f"| op | | MB it must move | MFLOP | {cards} | own loads and stores, of that |", "|---" * 8 + "|"]
        for work in works(model):
            floors = " | ".join(f"{work.floor_us(card):.2f}" for card in CARDS.values())
            lines.append(
                f"| `{work.op}` | {work.setting} | {work.bytes / 1e6:.3g} | {work.operations / 1e6:.3g} | {floors} "
                f"| x {work.own_bytes / work.bytes:.2f} |"
            )
    return "\n".join(lines) + "\n"
