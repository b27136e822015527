"""Cutting a document into passages: what is embedded, recalled and cited.

Headings end a passage. Under each, neighbouring blocks (paragraphs, lists, code, tables) are joined up to the length
the embedder reads. A block that is longer is cut at its items, lines or sentences; only what has none, within.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from markdown_it import MarkdownIt
from markdown_it.token import Token

from memstream.memory.chunker import MAX_PIECES, estimated_pieces, window_text
from memstream.memory.summarizer import SENTENCE_END
from memstream.stores.documents import NewPassage

MAX_HEADING_PIECES = 64  # of a heading that is embedded with its passage
_BREAK = re.compile(r"\r\n?|\n")  # what markdown-it counts as the end of a line; str.splitlines knows more
_SENTENCE = re.compile(SENTENCE_END)
_WORD = re.compile(r"\S+")
_FRONT_MATTER = re.compile(  # each line a key, or what belongs to one: two rules with text between them are none
    r"---[ \t]*(?:\r\n?|\n)[\w.-]+:[^\r\n]*(?:\r\n?|\n)"
    r"(?:(?:[\w.-]+:|[ \t]+[^\s]|-[ \t]|#)[^\r\n]*(?:\r\n?|\n))*---[ \t]*(?:\r\n?|\n|\Z)"
)
_TITLE = re.compile(r"^title:[ \t]*(['\"]?)(.*?)\1[ \t]*\r?$", re.MULTILINE)
_PARSER = MarkdownIt("commonmark").enable("table")
_PARSER.core.ruler.enableOnly(["normalize", "block"])
_ITEMS = ("list_item_open",)

Span = tuple[int, int]  # first and last (exclusive) character
_Cut = Callable[[str, int, int], list[Span]]


@dataclass(slots=True)
class _Block:
    """A paragraph, list, code block or table, and where it may be cut if it must."""

    span: Span
    ways: tuple[_Cut, ...]


@dataclass(slots=True)
class _Section:
    """What stands under one heading. ``own`` is the heading's line, for one that has nothing below it."""

    heading: str = ""
    own: Span | None = None
    blocks: list[_Block] = field(default_factory=list)


def cut(text: str, *, markdown: bool) -> tuple[str, list[NewPassage]]:
    """The title of a document (``""`` where it tells none) and its passages, in order, not overlapping.

    Args:
        text: the whole document; ``text[passage.first:passage.last] == passage.text``.
        markdown: False takes it as paragraphs between blank lines.
    """
    lines = _Lines(text)
    if markdown:
        title, sections = _markdown(text, lines)
    else:
        title, sections = "", [_Section(blocks=_paragraphs(text, lines, 0, len(lines)))]
    found: list[NewPassage] = []
    for section in sections:
        heading = window_text([section.heading], MAX_HEADING_PIECES)
        room = MAX_PIECES - 2 - _cost(heading)
        spans = [span for block in section.blocks for span in _fit(text, *block.span, room, block.ways)]
        for first, last in _pack(text, spans, room):
            value = text[first:last]
            found.append(
                NewPassage(
                    first=first,
                    last=last,
                    first_line=lines.number(first),
                    last_line=lines.number(last - 1),
                    heading=section.heading,
                    text=value,
                    key=f"{heading}\n{value}" if heading else value,
                )
            )
    return title, found


class _Lines:
    """Where each line begins; a byte order mark belongs to none."""

    def __init__(self, text: str) -> None:
        self._starts = [int(text.startswith("\ufeff")), *(match.end() for match in _BREAK.finditer(text))]
        self._starts.append(len(text))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def span(self, begin: int, end: int) -> Span:
        """The characters of lines ``begin`` to ``end`` (exclusive), counted from 0."""
        return self._starts[min(begin, len(self))], self._starts[min(end, len(self))]

    def number(self, at: int) -> int:
        """The line a character is on, counted from 1."""
        return max(1, bisect_right(self._starts, at, hi=len(self)))


# --- what a document is made of


def _paragraphs(text: str, lines: _Lines, begin: int, end: int) -> list[_Block]:
    """Runs of lines that are not blank."""
    found: list[_Block] = []
    first: int | None = None
    for line in range(begin, end + 1):
        blank = line == end or not text[slice(*lines.span(line, line + 1))].strip()
        if blank and first is not None:
            found.append(_block(text, lines.span(first, line), _PROSE))
            first = None
        elif not blank and first is None:
            first = line
    return found


def _block(text: str, span: Span, ways: tuple[_Cut, ...]) -> _Block:
    return _Block(_trim(text, *span), ways)


def _markdown(text: str, lines: _Lines) -> tuple[str, list[_Section]]:
    """The title and the sections of a Markdown text; what its parser leaves out (link definitions) are paragraphs."""
    begin, title = _front_matter(text, lines)
    tokens = _PARSER.parse(text[lines.span(begin, begin)[0] :])
    path: list[tuple[int, str]] = []
    sections, done = [_Section()], begin
    for i, token in enumerate(tokens):
        if token.level or token.map is None or token.nesting < 0:
            continue
        first, last = (begin + line for line in token.map)
        sections[-1].blocks += _paragraphs(text, lines, done, first)
        done = max(done, last)
        if token.type == "heading_open":
            depth, said = int(token.tag[1:]), " ".join(tokens[i + 1].content.split())
            _close(sections[-1], followed_by=depth, path=path)
            path = [step for step in path if step[0] < depth] + [(depth, said)]
            title = title or said
            whole = " > ".join(name for _, name in path if name)
            sections.append(_Section(whole, _trim(text, *lines.span(first, last))))
        elif token.type != "hr":
            items = _children(tokens, i, lines, begin) if token.type.endswith("_list_open") else []
            ways = _PROSE if token.type == "paragraph_open" else (*items, *_ROWS)
            sections[-1].blocks.append(_block(text, lines.span(first, last), ways))
    sections[-1].blocks += _paragraphs(text, lines, done, len(lines))
    _close(sections[-1], followed_by=0, path=path)
    return title, sections


def _close(section: _Section, *, followed_by: int, path: Sequence[tuple[int, str]]) -> None:
    """A heading with nothing below it, not even another heading, is all there is to read."""
    if section.own is not None and not section.blocks and followed_by <= path[-1][0]:
        section.blocks.append(_Block(section.own, _PROSE))


def _front_matter(text: str, lines: _Lines) -> tuple[int, str]:
    """The first line after YAML front matter, and the title that it tells: it is about the document, not part of it."""
    first = lines.span(0, 0)[0]
    match = _FRONT_MATTER.match(text, first)
    if match is None:
        return 0, ""
    title = _TITLE.search(match[0])
    return lines.number(match.end() - 1), "" if title is None else title[2].strip()


def _children(tokens: Sequence[Token], at: int, lines: _Lines, begin: int) -> list[_Cut]:
    """A way to cut a list between its items."""
    starts: list[int] = []
    for token in tokens[at + 1 :]:
        if token.level == 0:
            break
        if token.level == 1 and token.type in _ITEMS and token.map is not None:
            starts.append(lines.span(begin + token.map[0], 0)[0])

    def items(text: str, first: int, last: int) -> list[Span]:
        return _between(first, last, [start for start in starts if first < start < last])

    return [items]


# --- where a text may be cut


def _between(first: int, last: int, cuts: Sequence[int]) -> list[Span]:
    return list(zip((first, *cuts), (*cuts, last), strict=True))


def _at(pattern: re.Pattern[str]) -> _Cut:
    def ways(text: str, first: int, last: int) -> list[Span]:
        return _between(first, last, [match.end() for match in pattern.finditer(text, first, last)])

    return ways


def _words(text: str, first: int, last: int) -> list[Span]:
    return [match.span() for match in _WORD.finditer(text, first, last)]


_PROSE: tuple[_Cut, ...] = (_at(_SENTENCE), _at(_BREAK), _words)
_ROWS: tuple[_Cut, ...] = (_at(_BREAK), _at(_SENTENCE), _words)


def _fit(text: str, first: int, last: int, room: int, ways: Sequence[_Cut]) -> list[Span]:
    """The span, or what it has to be cut into so that each piece takes at most ``room`` word pieces."""
    first, last = _trim(text, first, last)
    if _cost(text[first:last]) <= room:
        return [(first, last)] if first < last else []
    if not ways:  # a word without an end: each of its letters is one piece at most
        return [(at, min(at + room, last)) for at in range(first, last, room)]
    parts = (part for span in ways[0](text, first, last) for part in _fit(text, *span, room, ways[1:]))
    return list(_pack(text, parts, room))


def _pack(text: str, spans: Iterator[Span] | Sequence[Span], room: int) -> Iterator[Span]:
    """Joins neighbours as long as they take at most ``room`` together."""
    first, last = -1, -1
    for span in spans:
        if first >= 0 and _cost(text[first : span[1]]) > room:  # of what lies between them too
            yield first, last
            first = -1
        first, last = (first if first >= 0 else span[0]), span[1]
    if first >= 0:
        yield first, last


def _cost(text: str) -> int:
    """Word pieces, estimated; a text of several words takes what they take."""
    return sum(estimated_pieces(word) for word in text.split())


def _trim(text: str, first: int, last: int) -> Span:
    """The span without the white space around it; empty where there is nothing else."""
    value = text[first:last]
    begin = first + len(value) - len(value.lstrip())
    return begin, max(begin, first + len(value.rstrip()))
