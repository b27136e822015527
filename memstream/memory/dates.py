"""Dates that a text names, English and ISO, as spans of days; relative ones count from the day the text was said."""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta

_MONTH_NAMES = """
    january february march april may june july august september october november december
"""  # not the calendar module's, which speak the locale's language
_MONTHS = {name: i for i, name in enumerate(_MONTH_NAMES.split(), 1)}
_SHORT = {name[:3]: i for name, i in _MONTHS.items()} | {"sept": 9}
_WEEKDAYS = {"monday": 0, "tuesday": 1, "wednesday": 2, "thursday": 3, "friday": 4, "saturday": 5, "sunday": 6}
_NUMBERS = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "a": 1, "an": 1, "a couple of": 2, "a few": 3,
}  # fmt: skip
_DAYS_OF = {"day": 1, "week": 7, "month": 30, "year": 365}

_MONTH = "|".join(sorted([*_MONTHS, *_SHORT], key=len, reverse=True))
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_LEAD = r"(?:\b(?:on|in|of|during|since|around|about|by|until|till|before|after|as of|the)\s+){0,3}"
_CALENDAR_NEEDS = r"\b(?:in|of|during|since|around|by|until|till|before|after|early|late|mid|last|this)\s+"


@dataclass(frozen=True, slots=True)
class Span:
    """Days from ``first`` to ``last``, both included."""

    first: date
    last: date

    def distance(self, day: date) -> int:
        """Days between ``day`` and the span; 0 within."""
        return max((self.first - day).days, (day - self.last).days, 0)


def find_dates(text: str, *, today: date, oldest: date) -> tuple[list[Span], str]:
    """The dates a text names, and the text without them.

    Args:
        text: of a turn; other languages' month names are not known.
        today: when it was said.
        oldest: a date without a year stands for that of every year from here to ``today``.
    """
    found: list[Span] = []
    rest = text
    for pattern, read in _PATTERNS:

        def take(match: re.Match[str], read: _Reader = read) -> str:
            try:
                spans = read(match, today, oldest)
            except (ValueError, OverflowError):  # 31 February, the year 9999
                return match[0]
            found.extend(spans)
            return " "

        rest = pattern.sub(take, rest)
    if not found:
        return [], text
    return found, " ".join(rest.split()).replace(" ?", "?")


_Reader = Callable[[re.Match[str], date, date], list[Span]]


def _month(name: str) -> int:
    return (_MONTHS | _SHORT)[name.lower().rstrip(".")]


def _known(year: int) -> int:
    """A year that has days before and after it.

    Raises:
        ValueError: it is at an end of the calendar.
    """
    if not 1 < year < 9999:
        raise ValueError(f"the year {year}")
    return year


def _day(year: int, month: int, day: int) -> Span:
    when = date(_known(year), month, day)
    return Span(when, when)


def _whole_month(year: int, month: int) -> Span:
    return Span(date(_known(year), month, 1), date(year, month, calendar.monthrange(year, month)[1]))


def _each_year(today: date, oldest: date, make: Callable[[int], Span]) -> list[Span]:
    spans = []
    for year in range(oldest.year, today.year + 1):
        try:
            spans.append(make(year))
        except ValueError:  # 29 February
            continue
    return spans


def _last(match: re.Match[str], today: date, oldest: date) -> list[Span]:
    """``last week``, ``last month``, ``last year``, ``last Monday``."""
    unit = match[1].lower()
    if unit in _WEEKDAYS:
        back = (today.weekday() - _WEEKDAYS[unit] - 1) % 7 + 1
        day = today - timedelta(days=back)
        return [Span(day, day)]
    if unit == "weekend":
        saturday = today - timedelta(days=(today.weekday() - 5 - 1) % 7 + 1)
        return [Span(saturday, saturday + timedelta(days=1))]
    if unit == "week":
        monday = today - timedelta(days=today.weekday() + 7)
        return [Span(monday, monday + timedelta(days=6))]
    if unit == "month":
        before = today.replace(day=1) - timedelta(days=1)
        return [_whole_month(before.year, before.month)]
    return [Span(date(today.year - 1, 1, 1), date(today.year - 1, 12, 31))]


def _ago(match: re.Match[str], today: date, oldest: date) -> list[Span]:
    """``three weeks ago``: as exact as its unit."""
    n = _NUMBERS.get(match[1].lower()) or int(match[1])
    days = _DAYS_OF[match[2].lower()]
    middle, slack = today - timedelta(days=n * days), timedelta(days=days // 2)
    return [Span(middle - slack, middle + slack)]


def _pattern(expression: str) -> re.Pattern[str]:
    return re.compile(expression, re.IGNORECASE)


# The most exact first: what one has read is gone for the next.
_PATTERNS: tuple[tuple[re.Pattern[str], _Reader], ...] = (
    (
        _pattern(_LEAD + r"\b(\d{4})-(\d{2})-(\d{2})\b"),
        lambda m, today, oldest: [_day(int(m[1]), int(m[2]), int(m[3]))],
    ),
    (
        _pattern(_LEAD + rf"\b{_DAY}(?:\s+of)?\s+({_MONTH})\b\.?,?\s+(\d{{4}})\b"),
        lambda m, today, oldest: [_day(int(m[3]), _month(m[2]), int(m[1]))],
    ),
    (
        _pattern(_LEAD + rf"\b({_MONTH})\b\.?\s+{_DAY},?\s+(\d{{4}})\b"),
        lambda m, today, oldest: [_day(int(m[3]), _month(m[1]), int(m[2]))],
    ),
    (
        _pattern(_LEAD + rf"\b({_MONTH})\b\.?,?\s+(\d{{4}})\b"),
        lambda m, today, oldest: [_whole_month(int(m[2]), _month(m[1]))],
    ),
    (
        _pattern(_LEAD + rf"\b{_DAY}(?:\s+of)?\s+({_MONTH})\b"),
        lambda m, today, oldest: _each_year(today, oldest, lambda year: _day(year, _month(m[2]), int(m[1]))),
    ),
    (
        _pattern(_LEAD + rf"\b({_MONTH})\b\.?\s+{_DAY}\b"),
        lambda m, today, oldest: _each_year(today, oldest, lambda year: _day(year, _month(m[1]), int(m[2]))),
    ),
    (
        _pattern(_CALENDAR_NEEDS + rf"({'|'.join(_MONTHS)})\b"),
        lambda m, today, oldest: _each_year(today, oldest, lambda year: _whole_month(year, _month(m[1]))),
    ),
    (
        _pattern(r"\b(?:in|of|during|since|around|by|until|till|before|after|year)\s+((?:19|20)\d\d)\b"),
        lambda m, today, oldest: [Span(date(int(m[1]), 1, 1), date(int(m[1]), 12, 31))],
    ),
    (
        _pattern(r"\byesterday\b"),
        lambda m, today, oldest: [Span(today - timedelta(days=1), today - timedelta(days=1))],
    ),
    (_pattern(rf"\blast\s+(week(?:end)?|month|year|{'|'.join(_WEEKDAYS)})\b"), _last),
    (_pattern(rf"\b(\d{{1,3}}|{'|'.join(_NUMBERS)})\s+(day|week|month|year)s?\s+ago\b"), _ago),
)
