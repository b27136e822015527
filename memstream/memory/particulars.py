"""The sentences of a turn that tell something particular: by rules, no model. English, but for names and numbers.

A turn of several sentences has one vector, which a single name or taste in it hardly moves. Sentences that name
somebody or a place, a number or a day, or tell a preference, get a vector of their own.
"""

from __future__ import annotations

import re
from datetime import date

from memstream.memory.dates import find_dates
from memstream.memory.query import is_question
from memstream.memory.summarizer import names, sentences
from memstream.stores.fulltext import query_terms
from memstream.stores.rows import Turn

MOST = 8  # of one turn: those that tell most
SPEAKER = re.compile(r"\s*((?:[^\W\d_][\w.'’-]{0,30} ?){1,3}): ")  # "Ann: ..." of a talk taken over from elsewhere


def _pattern(expression: str) -> re.Pattern[str]:
    return re.compile(expression, re.IGNORECASE)


_NUMBER = _pattern(r"\d|\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|dozen|hundred|thousand)\b")
_DAY = _pattern(r"\b(?:yesterday|today|tonight|tomorrow|last|next|this (?:week|month|year|weekend)|ago|recently)\b")
_PREFERENCE = _pattern(
    r"\b(?:i|we|my|our)\b.*\b(?:likes?|liked|lov(?:e|es|ed|ing)|hated?|prefer(?:red)?|enjoy(?:ed|ing)?|favou?rite"
    r"|fan of|into|allergic|can't stand|passionate|dream)\b"
)


def particulars(turn: Turn) -> list[str]:
    """The sentences of a turn that tell something particular, in order, each after the name it begins with.

    None where the turn says only one thing: its own vector is that thing's.
    """
    named = SPEAKER.match(turn.text)
    speaker, said = (named[0].strip() + " ", turn.text[named.end() :]) if named is not None else ("", turn.text)
    told = [part for part in sentences(said) if not is_question(part) and len(query_terms(part, 2)) == 2]
    if len(told) < 2:
        return []
    weighed = [(_n_told(part, turn.created.date()), -i) for i, part in enumerate(told)]
    best = sorted((item for item in weighed if item[0]), reverse=True)[:MOST]
    return [speaker + told[-i] for _, i in sorted(best, key=lambda item: -item[1])]


def _n_told(sentence: str, day: date) -> int:
    """In how many ways a sentence said on a day tells something particular."""
    found = sum(rule.search(sentence) is not None for rule in (_NUMBER, _DAY, _PREFERENCE))
    return found + bool(names(sentence)) + bool(find_dates(sentence, today=day, oldest=day)[0])
