"""How much a message reads like a failure, against dense forwards of the stock model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from memstream.models import LoadedModel
from memstream.replay.meaning import HEADERS, MAX_TOKENS, LikelihoodMeaning
from memstream.streaming.model import StreamingModel

MESSAGES = (
    "data TLB error interrupt",
    "ok",
    "",
    "generating core.2275 for a program that was started at 12:04:11 on node R02-M1-N0-C:J12-U11, which is not known",
    "session opened for user root by (uid=0)",
    "CE sym 20, at 0x0b85eee0, mask 0x05",
)


def dense(model: Any, tokenizer: Any, message: str) -> float:
    """Nats per token by which a message fits the first header better than the second."""
    own = tokenizer(message, add_special_tokens=False)["input_ids"][:MAX_TOKENS]
    if not own:
        return 0.0
    losses = []
    for header in HEADERS:
        ids = tokenizer(header, add_special_tokens=False)["input_ids"] + own
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -len(own) - 1 : -1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(own)).item())
    return losses[1] - losses[0]


@pytest.fixture
def expected(smollm2: LoadedModel) -> list[float]:
    return [dense(smollm2.model, smollm2.tokenizer, message) for message in MESSAGES]


def test_a_reading_is_that_of_dense_forwards(expected: list[float], smollm2: LoadedModel) -> None:
    found = LikelihoodMeaning(StreamingModel(smollm2.model), smollm2.tokenizer)(MESSAGES)
    assert np.abs(found - np.array(expected)).max() < 1e-4
    assert found[2] == 0.0
    assert len({round(value, 3) for value in found}) == len(MESSAGES)


def test_what_else_is_read_changes_no_bit(smollm2: LoadedModel) -> None:
    meaning = LikelihoodMeaning(StreamingModel(smollm2.model), smollm2.tokenizer)
    together = meaning(MESSAGES)
    assert meaning(MESSAGES[::-1]).tolist() == together[::-1].tolist()
    assert [meaning([message])[0] for message in MESSAGES] == together.tolist()
    assert meaning([]).tolist() == []
