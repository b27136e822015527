"""What SQLite leaves of deleted rows although ``secure_delete`` is on: bytes in the unused middle of its pages.

When rows are moved to a neighbouring page, the page they leave is built anew over its old bytes; whatever the new rows
do not cover stays there until the page is built again. The rows deleted from the neighbour later are wiped there only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from memstream.stores import fulltext, held

_INTERIOR, _LEAF = (2, 5), (10, 13)  # types of b-tree pages, see "The SQLite database file format", section 1.6
_READ_PAGES = 1024
_LEAST = 4  # bytes; fewer are an old pointer's
_MOST_WORDS = 200  # more are not looked for one by one: any leftover counts
_LONG = 9  # bytes of a word that full text may have stemmed, or stored from its fourth letter on


def found(descriptor: int, texts: Iterable[str] | None) -> bool:
    """Whether the unused bytes of a file's pages hold a word of any of the texts; None: or anything at all.

    Read when the WAL is empty. Stop words are not looked for.

    Args:
        descriptor: of the file, from ``held``.
        texts: what was deleted.
    """
    needles = None if texts is None else _needles(texts)
    if needles is None or len(needles) > _MOST_WORDS:
        return any(True for _ in unused(descriptor))
    return any(needle in gap for gap in map(bytes.lower, unused(descriptor)) for needle in needles)


def _needles(texts: Iterable[str]) -> set[bytes]:
    needles = set()
    for text in texts:
        meant = set(fulltext.query_terms(text, _MOST_WORDS + 1))
        whole = {word.lower().encode() for word in text.split() if not meant.isdisjoint(fulltext.words(word))}
        needles |= whole | {_core(word.encode()) for word in meant}
    return needles


def _core(word: bytes) -> bytes:
    return word if len(word) < _LONG else word[3:-2]


def unused(descriptor: int) -> Iterator[bytes]:
    """The unused middles of a file's b-tree pages that hold more than zeros."""
    header = held.read(descriptor, 100, 0)
    if len(header) < 100:
        return
    (size,) = struct.unpack_from(">H", header, 16)
    size = 65536 if size == 1 else size
    offset = 0
    while block := held.read(descriptor, size * _READ_PAGES, offset):
        for start in range(0, len(block), size):
            gap = _middle(block[start : start + size], 0 if offset + start else len(header))
            if len(gap.strip(b"\0")) >= _LEAST:
                yield gap
        offset += len(block)


def _middle(page: bytes, header: int) -> bytes:
    """What lies between a b-tree page's pointers and its cells; the first page's header follows the file's."""
    kind = page[header]
    if kind not in _INTERIOR + _LEAF:
        return b""
    n_cells, cells = struct.unpack_from(">HH", page, header + 3)
    return page[header + (12 if kind in _INTERIOR else 8) + 2 * n_cells : cells or 65536]
