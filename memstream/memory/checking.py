"""Reading a whole export before anything of it is stored."""

from __future__ import annotations

from collections import Counter
from typing import BinaryIO

import numpy as np

from memstream.errors import ConfigError, InputError
from memstream.memory.portable import (
    Checksum,
    ConversationLine,
    EndLine,
    FactLine,
    HeaderLine,
    Line,
    TurnLine,
    decode,
    read_lines,
)
from memstream.stores.base import Scope


def check(file: BinaryIO) -> HeaderLine:
    """Reads a whole export without storing anything. Returns its header.

    Raises:
        InputError: it is no export, damaged or cut off; says where.
    """
    checksum, counts, header = Checksum(), Counter[str](), None
    place: ConversationLine | None = None
    missing, last = 0, -1
    for number, data in read_lines(file):
        line = decode(number, data)
        if header is None:
            if not isinstance(line, HeaderLine):
                raise InputError("this is not an export of memstream: its first line is no header")
            header = line
        elif isinstance(line, HeaderLine):
            raise InputError(f"line {number} is a second header; import one export at a time")
        elif missing and not isinstance(line, TurnLine):
            raise InputError(f"line {number}: {missing} turns of the conversation before it are missing")
        elif isinstance(line, EndLine):
            _check_end(number, line, counts, header, str(checksum))
            if file.read(1):
                raise InputError(f"something follows line {number}, the last line of the export")
            return header
        elif isinstance(line, ConversationLine):
            scope_of(number, line)
            place, missing, last = line, line.turns, -1
        elif isinstance(line, TurnLine):
            if place is None or not missing or line.sequence <= last:
                raise InputError(f"line {number} is a turn that belongs nowhere")
            if line.state not in ("complete", "cut"):
                raise InputError(f"line {number} (turn): the field 'state' must be 'complete' or 'cut'")
            missing, last = missing - 1, line.sequence
        elif place is None and not (isinstance(line, FactLine) and line.conversation is None):
            raise InputError(f"line {number} belongs to no conversation")
        elif isinstance(line, FactLine):
            _check_fact(number, line, place)
        _check_vector(number, line, header)
        counts[line.kind] += 1
        checksum.update(data)
    if header is None:
        raise InputError("the file is empty")
    raise InputError(f"the file ends after line {sum(counts.values())} without its last line: it was cut off")


def _check_end(number: int, end: EndLine, counts: Counter[str], header: HeaderLine, checksum: str) -> None:
    said = (end.conversations, end.turns, end.windows, end.summaries, end.facts)
    if said != tuple(counts[kind] for kind in ("conversation", "turn", "window", "summary", "fact")) or (
        header.conversations, header.turns, header.facts,
    ) != (end.conversations, end.turns, end.facts):  # fmt: skip
        raise InputError(f"line {number}: the export holds other counts than it says; lines were added or lost")
    if end.checksum != checksum:
        raise InputError("the checksum of the export is wrong: it was changed or damaged after it was written")


def scope_of(number: int, line: ConversationLine | FactLine) -> Scope:
    name = line.name if isinstance(line, ConversationLine) else line.conversation
    try:
        return Scope(line.namespace, line.user, name)
    except ConfigError as error:
        raise InputError(f"line {number} ({line.kind}): {error}") from None


def _check_fact(number: int, fact: FactLine, place: ConversationLine | None) -> None:
    scope_of(number, fact)
    if fact.conversation is None and fact.user is None:
        raise InputError(f"line {number} is a fact of nobody: it names neither a user nor a conversation")
    there = place and (place.namespace, place.user, place.name)
    if fact.conversation is not None and there != (fact.namespace, fact.user, fact.conversation):
        raise InputError(f"line {number} is a fact of another conversation than the one before it")
    if not fact.text.strip():
        raise InputError(f"line {number} is a fact without a text")


def _check_vector(number: int, line: Line, header: HeaderLine) -> None:
    vector = getattr(line, "vector", None)
    if vector is None:
        return
    if header.embedder is None:
        raise InputError(f"line {number} has a vector, but the header names no embedder")
    if len(vector) != 2 * header.embedder.dimension:
        raise InputError(f"line {number}: the vector is not of {header.embedder.dimension} float16 numbers")
    length = float(np.linalg.norm(np.frombuffer(vector, dtype="<f2").astype(np.float32)))
    if not abs(length - 1.0) <= 0.01:  # also where it is not a number
        raise InputError(f"line {number}: the vector is not of length 1")
