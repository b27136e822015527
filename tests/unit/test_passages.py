"""Documents cut into passages: worked out by hand, and for any text exact, in order and whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstream.memory.chunker import MAX_PIECES, estimated_pieces
from memstream.memory.passages import MAX_HEADING_PIECES, cut
from memstream.stores.documents import NewPassage

HANDBOOK = """\
---
title: The desk
tags:
  - orders
---
# Handbook

What we promise.

## Returns

Within 30 days.

### Refunds

Five days, to the card.

| paid by | days |
|---------|------|
| card    | 5    |

```python
days = 5

card = True
```

## No gift cards

Hours
-----
- Monday
- Tuesday

  from ten
"""


def cut_texts(text: str, *, markdown: bool = True) -> list[tuple[str, str]]:
    return [(passage.heading, passage.text) for passage in cut(text, markdown=markdown)[1]]


def test_a_passage_knows_its_headings_and_its_lines() -> None:
    title, passages = cut(HANDBOOK, markdown=True)
    assert title == "The desk"
    table = "| paid by | days |\n|---------|------|\n| card    | 5    |"
    code = "```python\ndays = 5\n\ncard = True\n```"
    assert [(p.heading, p.text, p.first_line, p.last_line) for p in passages] == [
        ("Handbook", "What we promise.", 8, 8),
        ("Handbook > Returns", "Within 30 days.", 12, 12),
        ("Handbook > Returns > Refunds", f"Five days, to the card.\n\n{table}\n\n{code}", 16, 26),
        ("Handbook > No gift cards", "## No gift cards", 28, 28),  # nothing stands below it
        ("Handbook > Hours", "- Monday\n- Tuesday\n\n  from ten", 32, 35),
    ]
    assert passages[1].key == "Handbook > Returns\nWithin 30 days."
    assert HANDBOOK[passages[1].first : passages[1].last] == "Within 30 days."


def test_the_first_heading_is_the_title_where_nothing_else_is() -> None:
    assert cut("text\n\n## Second *level*\n\n# First", markdown=True)[0] == "Second *level*"
    assert cut("# Not\n\nread as Markdown", markdown=False)[0] == ""


def test_two_rules_with_text_between_them_are_no_front_matter() -> None:
    assert cut_texts("---\n\nRead me.\n\n---\n\nAnd me.") == [("", "Read me.\n\n---\n\nAnd me.")]
    assert cut_texts("---\nRead me\n---\n") == [("Read me", "Read me\n---")]  # a heading, underlined


def test_what_the_parser_takes_out_is_still_read() -> None:
    assert cut_texts("[desk]: http://example.org 'The desk'\n") == [("", "[desk]: http://example.org 'The desk'")]
    assert cut_texts("<div>\nhello\n</div>") == [("", "<div>\nhello\n</div>")]


def sentence(word: str, n: int) -> str:
    """``n`` word pieces: words of four letters at most are one each, and so is the point."""
    return " ".join([word] * (n - 1)) + "."


def test_paragraphs_are_joined_up_to_what_the_embedder_reads() -> None:
    room = MAX_PIECES - 2
    first, second, third = sentence("oak", 100), sentence("elm", room - 100), sentence("ash", 3)
    text = f"{first}\n\n{second}\n\n{third}"
    assert cut_texts(text, markdown=False) == [("", f"{first}\n\n{second}"), ("", third)]
    assert cut_texts(f"# Four\n\n{text}") == [("Four", first), ("Four", f"{second}\n\n{third}")]  # it takes room, too


def test_code_and_tables_that_fit_are_not_torn() -> None:
    code = "```\n" + "\n\n".join(["oak elm"] * 90) + "\n```"
    table = "| a | b |\n|---|---|\n" + "\n".join(["| oak | elm |"] * 20)
    text = f"{sentence('ash', 80)}\n\n{code}\n\n{table}\n\n{sentence('fir', 90)}"
    found = [value for _, value in cut_texts(text)]
    assert any(code in value for value in found)
    assert any(table in value for value in found)


def test_a_long_table_is_cut_between_rows_and_a_long_list_between_items() -> None:
    rows = [f"| row{i} | {'oak ' * 20}|" for i in range(30)]
    found = [value for _, value in cut_texts("| a | b |\n|---|---|\n" + "\n".join(rows))]
    assert len(found) > 2
    assert [line for value in found for line in value.split("\n")][2:] == rows
    items = [f"- item{i} oak\n  elm ash" for i in range(100)]
    found = [value for _, value in cut_texts("\n".join(items))]
    assert len(found) > 1
    assert all(value.startswith("- item") and value.endswith("elm ash") for value in found)


def test_a_long_paragraph_is_cut_between_sentences() -> None:
    sentences = [sentence(word, 60) for word in ("oak", "elm", "ash", "fir", "yew", "bay", "box")]
    found = [value for _, value in cut_texts(" ".join(sentences))]
    assert found == [" ".join(sentences[:4]), " ".join(sentences[4:])]
    wrapped = "\n".join(sentences)  # lines are no ends of sentences, but these happen to be
    assert [value for _, value in cut_texts(wrapped)] == ["\n".join(sentences[:4]), "\n".join(sentences[4:])]


def test_a_line_without_an_end_is_cut_within() -> None:
    text = "x" * 5000
    found = cut(text, markdown=False)[1]
    assert "".join(passage.text for passage in found) == text
    assert {passage.first_line for passage in found} == {1}
    check(text, found)


def test_a_change_in_one_section_leaves_the_others_as_they_are() -> None:
    sections = [f"## Part {i}\n\n{sentence('oak', 90 + i)}\n\n{sentence('elm', 120)}" for i in range(6)]
    before = cut_texts("\n\n".join(sections))
    after = cut_texts("\n\n".join(["## New\n\ntext", sections[0] + " More words.", *sections[1:]]))
    assert before[1:] == after[2:]


@pytest.mark.parametrize("markdown", [True, False])
@pytest.mark.parametrize("text", ["", "\ufeff", "\n", " \r\n\t\r\n", "\ufeff\n\n"])
def test_nothing_gives_nothing(text: str, markdown: bool) -> None:
    assert cut(text, markdown=markdown) == ("", [])


def test_the_byte_order_mark_is_counted_but_not_read() -> None:
    (passage,) = cut("\ufeffHours\r\n=====\r\nTen", markdown=True)[1]
    assert (passage.heading, passage.text, passage.first, passage.first_line) == ("Hours", "Ten", 15, 3)


def check(text: str, passages: list[NewPassage]) -> None:
    """What holds for every document."""
    before = 0
    for passage in passages:
        assert text[passage.first : passage.last] == passage.text
        assert passage.text == passage.text.strip() != ""
        assert passage.first >= before
        before = passage.last
        assert passage.first_line == len(read_lines(text[: passage.first]))
        assert passage.last_line == passage.first_line + len(read_lines(passage.text)) - 1
        assert passage.key.endswith(passage.text)
        assert sum(estimated_pieces(word) for word in passage.key.split()) <= MAX_PIECES - 2
        heading = passage.key.removesuffix(passage.text)
        assert sum(estimated_pieces(word) for word in heading.split()) <= MAX_HEADING_PIECES


letters = st.text(st.sampled_from("ab .!?\n\r\t#-`|*>=:~[]()1é订。\u2028\x0b\x85\ufeff"), max_size=300)
lines = st.lists(
    st.sampled_from([
        "# One", "## Two", "Under", "---", "===", "", " ", "```", "| a | b |", "|---|---|", "- x", "  y", "1. z", "> q",
        "    code", "word " * 70, "end. " * 80, "<p>", "[a]: b", "key: value", "x" * 900, "订单" * 200,
    ]),
    max_size=14,
)  # fmt: skip
made = st.builds(
    lambda lines, end, last, mark: mark + end.join(lines) + last,
    lines,
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from(["", "\n"]),
    st.sampled_from(["", "\ufeff"]),
)


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(st.text(max_size=200), letters, made))
def test_of_plain_text_every_character_is_in_one_passage(text: str) -> None:
    passages = cut(text, markdown=False)[1]
    check(text, passages)
    assert "".join("".join(p.text.split()) for p in passages) == "".join(text.removeprefix("\ufeff").split())


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(st.text(max_size=200), letters, made))
def test_of_markdown_only_headings_rules_and_front_matter_are_in_none(text: str) -> None:
    passages = cut(text, markdown=True)[1]
    check(text, passages)
    left = list(text)
    for passage in passages:
        left[passage.first : passage.last] = [char if char in "\r\n" else " " for char in passage.text]
    rest = read_lines("".join(left).removeprefix("\ufeff"))
    read = read_lines(text.removeprefix("\ufeff"))
    rules = {i for i, line in enumerate(read) if line.strip() and set("".join(line.split())) <= set("-=*_")}
    front = max(rules) if 0 in rules else -1  # what is between the first two may be about the document
    for i, line in enumerate(rest):
        below = next((j for j in range(i, len(read)) if j in rules or not read[j].strip()), -1)
        if line.strip() and i > front:
            assert line.lstrip().startswith("#") or below in rules, (i, line)


def read_lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
