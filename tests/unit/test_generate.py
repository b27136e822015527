"""Pieces of text, stop texts and sampling."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstream.config import GenerationConfig
from memstream.streaming.generate import Decoding, Sampler, StopTexts, TextPieces
from tests.integration import tiny

TOKENIZER = tiny.tokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=100, deadline=None)
def test_pieces_join_to_the_text_and_never_cut_a_character(text: str) -> None:
    pieces = TextPieces(TOKENIZER)
    ids = TOKENIZER(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    given_out = [pieces.push(token) for token in ids]
    if "\ufffd" not in text:
        assert not [piece for piece in given_out if "\ufffd" in piece]
    assert "".join(given_out) + pieces.finish() == text


def test_an_unfinished_character_is_shown_as_such_at_the_end() -> None:
    pieces = TextPieces(TOKENIZER)
    ids = TOKENIZER("a語", add_special_tokens=False)["input_ids"]
    assert len(ids) == 4  # one byte, three bytes
    assert [pieces.push(token) for token in ids[:3]] == ["a", "", ""]
    assert pieces.finish() == "\ufffd"


@given(st.text("ab.", max_size=20), st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_stop_texts_cut_where_the_whole_text_would_be_cut(text: str, stops: list[str]) -> None:
    held = StopTexts(stops)
    out = ""
    for character in text:
        out += held.push(character)
        if held.hit:
            break
    out += held.finish()
    # The first stop text to be complete cuts; of several complete at once, the one that begins first.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (out, held.hit) == (text, False)
        return
    seen = text[: min(ends)]
    assert out == seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    assert held.hit


def sample(n: int, **config: object) -> Counter[int]:
    sampler = Sampler(GenerationConfig(seed=1, **config))  # type: ignore[arg-type]
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    return Counter(sampler(lambda: [0], logits) for _ in range(n))


def test_greedy_takes_the_likeliest() -> None:
    assert sample(10) == {0: 10}


def test_sampling_follows_the_distribution() -> None:
    counts = sample(4000, temperature=1.0)
    expected = torch.softmax(torch.tensor([2.0, 1.0, 0.0, -1.0]), 0).tolist()
    for token, share in enumerate(expected):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)


def test_top_k_top_p_temperature_and_penalty_change_the_distribution() -> None:
    assert set(sample(500, temperature=1.0, top_k=2)) == {0, 1}
    assert set(sample(500, temperature=1.0, top_p=0.5)) == {0}
    assert sample(500, temperature=5.0)[3] > sample(500, temperature=1.0)[3]
    assert sample(1, repetition_penalty=4.0) == {1: 1}  # token 0 was seen: 2.0 / 4 < 1.0


def test_a_seed_repeats_and_no_seed_does_not() -> None:
    assert sample(50, temperature=1.0) == sample(50, temperature=1.0)
    logits = torch.zeros(1000)
    free = [Sampler(GenerationConfig(temperature=1.0))(lambda: [], logits) for _ in range(5)]
    assert len(set(free)) > 1


def decode(text: str, config: GenerationConfig, *, stop_ids: frozenset[int] = frozenset({2})) -> Decoding:
    """Decodes a model that says ``text`` and then its end token."""
    script = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], 2]
    fed: list[int] = []
    decoding = Decoding(
        TOKENIZER,
        config,
        stop_ids=stop_ids,
        logits=lambda: torch.nn.functional.one_hot(torch.tensor(script[len(fed)]), 259).float(),
        advance=fed.append,
        seen=lambda: fed,
        cancelled=lambda: False,
    )
    assert "".join(decoding) == decoding.text
    return decoding


def test_a_reply_ends_where_its_rules_say() -> None:
    assert (decode("hi there", GenerationConfig()).text, decode("hi", GenerationConfig()).finish_reason) == (
        "hi there",
        "stop",
    )
    cut = decode("hi there", GenerationConfig(max_new_tokens=3))
    assert (cut.text, cut.n_tokens, cut.finish_reason) == ("hi ", 3, "length")
    stopped = decode("hi there you", GenerationConfig(stop=("the", "you")))
    assert (stopped.text, stopped.finish_reason) == ("hi ", "stop")
    assert decode("語語", GenerationConfig(max_new_tokens=4)).text == "語\ufffd"
