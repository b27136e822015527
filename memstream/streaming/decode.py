"""Decoding n tokens in each of B rows at fixed addresses; on a card, as one captured graph."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memstream.kernels.dispatch import triton_runs
from memstream.streaming.cache import Cache
from memstream.streaming.layout import Piece
from memstream.streaming.step import Step

if TYPE_CHECKING:
    from memstream.streaming.model import StreamingModel

log = logging.getLogger(__name__)
_CAPTURING = threading.Lock()  # one capture at a time in a process


class Decode:
    """The decode step of B rows: one token each, or n where some were drafted.

    On a card it is captured once as a CUDA graph and replayed for every token: what changes between tokens lies in the
    step's table, so evictions, new memory and rebases need no other graph. The model's forward stays Hugging Face's.

    Args:
        model: the model.
        cache: its cache.
        rows: B.
        n: tokens in each row.
    """

    def __init__(self, model: StreamingModel, cache: Cache, *, rows: int, n: int = 1) -> None:
        self._model = model
        self._graph: torch.cuda.CUDAGraph | None = None
        triton = triton_runs(cache.keys[0])
        self._capturable = cache.keys[0].is_cuda and triton and not model.reads_positions_on_host
        self.step = Step(cache, model.ropes, rows=rows, n=n)
        self._native = model.native if model.native is not None and model.native.is_few(self.step) else None
        self.logits = torch.empty(rows, n, model.vocabulary, dtype=torch.float32, device=model.device)

    @torch.inference_mode()
    def __call__(self, rows: Sequence[int], pieces: Sequence[Piece], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Computes n tokens in each row. Returns [B, n, V] float32 logits, the caller's own."""
        with self._model.on_device():
            self.step.fill(rows, pieces, tokens)
            if self._capturable and self._graph is None:
                self._capture()
            if self._graph is not None:
                self._graph.replay()
            else:
                self.compute()
            return self.logits.clone()

    @torch.inference_mode()
    def compute(self) -> None:
        """The step itself: reads the table, writes the cache and ``logits``; memstream reads nothing on the host."""
        if self._native is not None:
            self._native.logits(self.step, self.logits)
            return
        self.logits.copy_(self._model.head(self._model.run(self.step)))

    def _capture(self) -> None:
        """Captures ``compute``; a model that cannot be captured is decoded kernel by kernel from then on."""
        stream = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with _CAPTURING:
            try:
                aside.wait_stream(stream)
                with torch.cuda.stream(aside):  # compiles kernels and settles buffers; the replay writes the same again
                    for _ in range(2):
                        self.compute()
                stream.wait_stream(aside)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                    self.compute()
                self._graph = graph
            except RuntimeError as error:
                torch.cuda.set_stream(stream)  # a capture that was broken off leaves the thread on its own
                self._capturable = False
                log.warning("decoding without a CUDA graph, which is slower: %s", str(error).splitlines()[0])
