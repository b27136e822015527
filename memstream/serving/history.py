"""What a client sends again, compared with what is stored: integers and texts only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Said(NamedTuple):
    """One turn.

    Attributes:
        role: ``user``, also of the results of tools, or ``assistant``.
        text: as the model reads or said it.
        cut: True where it is stored only as far as it went.
        results: of tools, where it is these; calls with their results.
    """

    role: str
    text: str
    cut: bool = False
    results: tuple[Any, ...] = ()


class Plan(NamedTuple):
    """What to do with a request.

    Attributes:
        keep: how many of the stored turns stay; those after them are taken back.
        new: the turns of the request that are not stored, the last of them to be answered.
    """

    keep: int
    new: tuple[Said, ...]


class _Place(NamedTuple):
    """A turn, or several of one role in a row, and the index of the first."""

    said: Said
    first: int


def compare(stored: Sequence[Said], sent: Sequence[Said]) -> Plan:
    """Finds where a request goes on from what is stored.

    A single turn goes on from all that is stored. A longer request is a history and a turn; the history may begin
    anywhere in what is stored, as clients drop what is old. The request goes on behind the last exchange that both
    have; where they have none, behind everything, so that nothing is lost. A turn that was never answered is asked
    once, however often it is sent.

    Args:
        stored: the turns of the conversation, in order; each user's turn begins an exchange.
        sent: the turns of the request, the last of them a user's that is to be answered.
    """
    ours, theirs = _joined(stored), [place.said for place in _joined(sent)]
    history = theirs[:-1]
    if not history:
        unanswered = bool(ours) and ours[-1].said.role == "user" and _same(ours[-1].said, theirs[0])
        return Plan(ours[-1].first if unanswered else len(stored), tuple(theirs))
    known = [place.said for place in ours]
    longest = max(
        ((_common(known, start, history), start) for start in range(len(known)) if known[start].role == "user"),
        default=(0, 0),
    )
    n, start = longest
    if n:
        end = start + n
        return Plan(ours[end].first if end < len(ours) else len(stored), tuple(theirs[n:]))
    edited = bool(known) and _same(known[0], theirs[0])  # the very first reply was
    return Plan(0 if edited else len(stored), tuple(theirs))


def _joined(turns: Sequence[Said]) -> list[_Place]:
    """The turns without empty ones, those of one role in a row as one."""
    places: list[_Place] = []
    for i, turn in enumerate(turns):
        if not turn.text.strip():
            continue
        if places and places[-1].said.role == turn.role:
            before, first = places.pop()
            turn = Said(turn.role, f"{before.text}\n\n{turn.text}", before.cut or turn.cut)
            places.append(_Place(turn, first))
        else:
            places.append(_Place(turn, i))
    return places


def _common(stored: Sequence[Said], start: int, sent: Sequence[Said]) -> int:
    """How many turns, in whole exchanges, both have from a start on."""
    n = 0
    while start + n < len(stored) and n < len(sent) and _same(stored[start + n], sent[n]):
        n += 1
    return n - n % 2


def _same(stored: Said, sent: Said) -> bool:
    """Whether both say the same, but for white space; of a reply that was cut, either may know more."""
    if stored.role != sent.role:
        return False
    ours, theirs = " ".join(stored.text.split()), " ".join(sent.text.split())
    return ours == theirs or (stored.cut and (ours.startswith(theirs) or theirs.startswith(ours)))
