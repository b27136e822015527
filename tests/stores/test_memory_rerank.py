"""A reranker puts the best hits into another order; the gate stays what it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memstream.config import RecallConfig
from memstream.errors import ModelError, ModelNotFoundError
from memstream.memory import CrossEncoderReranker, Memory, Scope, SqlStore
from tests.stores.tiny import TinyEmbedder, count_words, say

SCOPE = Scope("n", "u", "c")
SAID = ("amber river one", "amber grove two", "amber pearl three", "amber willow four")


class Knows:
    """Knows the right order; keeps what it was asked."""

    def __init__(self, order: Sequence[str] = (), broken: Any = None) -> None:
        self.order, self.broken = order, broken
        self.asked: list[tuple[str, list[str]]] = []

    def score(self, query: str, texts: list[str]) -> Any:
        self.asked.append((query, list(texts)))
        if self.broken is not None:
            return self.broken
        return [-float(self.order.index(text)) if text in self.order else -99.0 for text in texts]


@pytest.fixture
def make() -> Iterator[Callable[..., Memory]]:
    opened: list[Memory] = []

    def build(reranker: Any, **recall: Any) -> Memory:
        config = RecallConfig(**{"gate": -1.0, "max_notes": 64, **recall})
        memory = Memory(SqlStore.open("memory"), TinyEmbedder(), config, index="exact", reranker=reranker)
        opened.append(memory)
        with memory.open_conversation(SCOPE) as handle:
            for text in SAID:
                say(handle, text, "")
        memory.flush()
        return memory

    yield build
    for memory in opened:
        memory.close()


def notes(memory: Memory, question: str, budget: int = 999) -> list[str]:
    found = memory.recall(SCOPE, ["hello", question], window_from=None, budget_tokens=budget, count_tokens=count_words)
    return [note.text for note in found.notes if note.text]


def test_the_order_of_the_reranker_decides_what_is_packed(make: Callable[..., Memory]) -> None:
    plain = [hit.text for hit in make(None).search(SCOPE, "amber river")]
    assert plain[0] == SAID[0]
    right = [SAID[2], SAID[3], SAID[0], SAID[1]]
    knows = Knows(right)
    memory = make(knows)
    found = memory.search(SCOPE, "amber river")
    assert [hit.text for hit in found if hit.text] == right
    assert [hit.why.rerank for hit in found if hit.text] == [0.0, -1.0, -2.0, -3.0]
    assert found[2].why.score > found[0].why.score  # which tells how the memory itself saw it
    assert notes(memory, "amber river", budget=3) == [SAID[2]]
    assert notes(memory, "amber river", budget=6) == [SAID[2], SAID[3]]
    assert {query for query, _ in knows.asked} == {"amber river"}


def test_only_the_best_are_read(make: Callable[..., Memory]) -> None:
    plain = [hit.text for hit in make(None).search(SCOPE, "amber river")]
    knows = Knows(plain[1::-1])
    found = make(knows, rerank_hits=2).search(SCOPE, "amber river")
    assert [len(texts) for _, texts in knows.asked] == [2]
    assert [hit.text for hit in found] == [plain[1], plain[0], *plain[2:]]
    assert [hit.why.rerank for hit in found[:3]] == [0.0, -1.0, None]
    assert sorted(found, key=lambda hit: hit.why.order)[-1].text == plain[1]  # before those it has not read


def test_what_the_gate_keeps_out_is_not_read(make: Callable[..., Memory]) -> None:
    knows = Knows(SAID)
    memory = make(knows, gate=1.0)
    assert notes(memory, "zephyr") == []
    assert knows.asked == []


@pytest.mark.parametrize("broken", [[1.0], [float("nan")] * 8, [[1.0], [2.0]]])
def test_a_reranker_that_gives_no_score_for_each_is_refused(make: Callable[..., Memory], broken: Any) -> None:
    memory = make(Knows(broken=broken))
    with pytest.raises(ModelError, match="one score for each"):
        memory.search(SCOPE, "amber river")
    assert memory.forget(SCOPE, "turn:1").verified  # which asks no reranker


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Saves a tiny cross-encoder with random weights, of so many outputs."""
    import torch
    from sentence_transformers import CrossEncoder
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    def save(n_outputs: int) -> Path:
        folder = tmp_path_factory.mktemp("cross")
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({word for text in SAID for word in text.split()})]
        built = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
        built.pre_tokenizer = pre_tokenizers.Whitespace()
        pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
        ends = [("[CLS]", 2), ("[SEP]", 3)]
        built.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, ends)
        marks = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        PreTrainedTokenizerFast(tokenizer_object=built, **marks).save_pretrained(folder / "base")
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=64, num_labels=n_outputs, initializer_range=0.5,
        )  # fmt: skip
        BertForSequenceClassification(config).save_pretrained(folder / "base")
        CrossEncoder(str(folder / "base"), device="cpu", local_files_only=True).save_pretrained(str(folder / "saved"))
        return folder / "saved"

    return save


def test_a_cross_encoder_is_read_from_its_folder(
    make: Callable[..., Memory], cross_encoder: Callable[[int], Path]
) -> None:
    from sentence_transformers import CrossEncoder

    folder = cross_encoder(1)
    reranker = CrossEncoderReranker(folder)
    scores = np.asarray(reranker.score("amber", list(SAID)))
    own = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    np.testing.assert_allclose(scores, own.predict([("amber", text) for text in SAID], show_progress_bar=False))
    assert len({round(float(score), 4) for score in scores}) == 4
    found = [hit for hit in make(reranker).search(SCOPE, "amber") if hit.text]
    assert [hit.text for hit in found] == [SAID[i] for i in np.argsort(-scores)]
    assert [hit.why.rerank for hit in found] == pytest.approx(sorted(scores.tolist(), reverse=True), abs=1e-4)


def test_a_reranker_that_is_not_there_is_told_at_once(
    cross_encoder: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstream.models.hub.constants.HF_HUB_OFFLINE", True)
    for name in (str(tmp_path / "nowhere"), "cross-encoder/not-in-the-cache"):
        with pytest.raises(ModelNotFoundError, match=r"there is no reranker '.*'.*folder of a sentence-transformers"):
            CrossEncoderReranker(name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    for folder in ("empty", "broken"):
        with pytest.raises(ModelNotFoundError, match="cannot be read"):
            CrossEncoderReranker(tmp_path / folder)
    with pytest.raises(ModelError, match="gives 3 numbers"):
        CrossEncoderReranker(cross_encoder(3))
