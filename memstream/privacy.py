"""Taking personal data out of texts before they are stored, embedded, logged or shown to a model.

Rules and check digits, no model: what has a form of its own is found, names and addresses are not. Those take a
recogniser such as Presidio, see ``presidio_redactor``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import accumulate
from typing import Any

from memstream.errors import ConfigError, MissingExtraError

Redactor = Callable[[str], str]
Span = tuple[int, int]

KINDS = ("email", "phone", "card", "iban")

_BLANK = " \t\u00a0\u2009\u202f"
_DASH = "\\-\u2010-\u2015"
_EMAIL = re.compile(r"(?<![\w.+%'-])[\w.+%'-]+@(?:[\w-]+\.)+[\w-]{2,}")

# Between two digits of a card: nothing, or blanks and dashes, or dots; a date and a time are not to look like one.
_CARD_GAP = rf"(?:[{_BLANK}]?[{_DASH}][{_BLANK}]?|[{_BLANK}]{{1,2}})?"
_DIGITS = (re.compile(rf"\d(?:{_CARD_GAP}\d)*+"), re.compile(r"\d(?:\.?\d)*+"))
_CARD_DIGITS = range(13, 20)

# Characters of an IBAN by country, as its registry (ISO 13616) has them.
_IBAN_CHARS = """
    15 NO  16 BE  18 DK FI FK FO GL NL SD  19 MK SI  20 AT BA EE KZ LT LU MN XK  21 CH HR LI LV
    22 BG BH CR DE GB GE IE ME RS VA  23 AE GI IL IQ OM SO TL  24 AD CZ ES MD PK RO SA SE SK TN VG
    25 LY PT ST  26 IS TR  27 BI DJ FR GR IT MC MR SM  28 AL AZ BY CY DO GT HN HU LB NI PL SV
    29 BR EG PS QA UA  30 JO KW MU YE  31 MT SC  32 LC  33 RU
"""
_IBAN_GAP = rf"[\s\u00a0\u202f{_DASH}]{{0,2}}"


def _iban_pattern() -> re.Pattern[str]:
    """Matches nothing, and has the text of a possible IBAN as its first group, so that those that overlap are found."""
    parts: list[str] = []
    for length, *countries in (part.split() for part in re.split(r"\s+(?=\d)", _IBAN_CHARS.strip())):
        head = rf"(?:{'|'.join(countries)})(?:{_IBAN_GAP}[0-9]){{2}}"
        parts.append(rf"{head}(?:{_IBAN_GAP}[A-Z0-9]){{{int(length) - 4}}}")
    return re.compile(rf"(?<![A-Z0-9])(?=({'|'.join(parts)})(?![A-Z0-9]))", re.IGNORECASE | re.ASCII)


_IBAN = _iban_pattern()

_PHONE_GAP = rf"[{_BLANK}{_DASH}./()]{{0,3}}"
_PHONE = re.compile(
    rf"(?<![\w+])\+[1-9](?:{_PHONE_GAP}\d){{7,14}}(?!\d)"  # +49 (0)170 / 123 45 67
    rf"|(?<![\w+.,])00[1-9](?:{_PHONE_GAP}\d){{8,13}}(?!\d)"  # 0049 ...
    rf"|(?<![\w+.,/{_DASH}])\(?0[1-9]\d{{1,4}}\)?[{_BLANK}{_DASH}./](?:{_PHONE_GAP}\d){{5,9}}(?!\d)"  # (030) 123456-0
    r"|(?<![\w+.,/-])0[1-9]\d{8,10}(?!\d)"  # 01701234567
    r"|(?<![\w+.,-])(?:1[ .-])?(?:\([2-9]\d\d\) ?|[2-9]\d\d[ .-])\d{3}[ .-]\d{4}(?!\d)"  # 1-800-555-0199
)


def redact(text: str, kinds: Collection[str] = KINDS) -> str:
    """Puts ``[email]``, ``[phone]``, ``[card]`` or ``[iban]`` in the place of each that is found.

    What is around them stays as it is. A card is 13 to 19 digits with the right check digit (Luhn), in any groups; an
    IBAN has its country's length and the right check digits (mod 97), with blanks or without; a phone number is in an
    international, German, British or North American form.

    Args:
        text: any.
        kinds: which of them.

    Raises:
        ConfigError: an unknown kind.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ConfigError(f"redact(kinds=...) names {unknown[0]!r}; known: {', '.join(KINDS)}")
    if "email" in kinds:
        text = _EMAIL.sub("[email]", text)
    if "iban" in kinds:
        text = _replaced(text, [(span, "iban") for span in _ibans(text)])
    if "card" in kinds:
        text = _replaced(text, [(span, "card") for span in _cards(text)])
    return _PHONE.sub("[phone]", text) if "phone" in kinds else text


def _replaced(text: str, found: Iterable[tuple[Span, str]]) -> str:
    """The text with ``[label]`` in the place of each span; spans that overlap become one, labelled as the first."""
    joined: list[tuple[int, int, str]] = []
    for (first, last), label in sorted(found, key=lambda one: one[0]):
        if joined and first < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]), joined[-1][2])
        else:
            joined.append((first, last, label))
    out, done = "", 0
    for first, last, label in joined:
        out += f"{text[done:first]}[{label}]"
        done = last
    return out + text[done:]


def _ibans(text: str) -> Iterator[Span]:
    for match in _IBAN.finditer(text):
        chars = re.sub(r"[^A-Z0-9]", "", match[1].upper())
        if int("".join(str(int(char, 36)) for char in chars[4:] + chars[:4])) % 97 == 1:
            yield match.span(1)


def _cards(text: str) -> Iterator[Span]:
    """Cards in runs of digits, from one group's beginning to another's end: other numbers may stand beside them."""
    for run in (run for pattern in _DIGITS for run in pattern.finditer(text)):
        groups = [(run.start() + group.start(), group[0]) for group in re.finditer(r"\d+", run[0])]
        for i, (first, _) in enumerate(groups):
            lengths = accumulate(len(group) for _, group in groups[i : i + _CARD_DIGITS.stop])
            for j, length in enumerate(lengths, i):
                if length >= _CARD_DIGITS.stop:
                    break
                digits = "".join(group for _, group in groups[i : j + 1])
                if length in _CARD_DIGITS and int(digits[0]) and _is_luhn(digits):
                    yield first, groups[j][0] + len(groups[j][1])


def _is_luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of the others."""
    values = [int(digit) for digit in reversed(digits)]
    return (sum(values[::2]) + sum(sum(divmod(2 * value, 10)) for value in values[1::2])) % 10 == 0


def presidio_redactor(analyzer: Any = None, *, language: str = "en", least_score: float = 0.4) -> Redactor:
    """A redactor that asks Presidio, which finds names and places too; its entities stand as ``[person]`` and the like.

    Args:
        analyzer: a ``presidio_analyzer.AnalyzerEngine`` of your own, such as one for another language; None: its
            default, which needs a spaCy model.
        language: of the texts.
        least_score: from 0 to 1; Presidio also reports guesses, and any number is one.

    Raises:
        MissingExtraError: Presidio is not installed.
    """
    if analyzer is None:
        try:
            from presidio_analyzer import AnalyzerEngine
        except ImportError as error:
            raise MissingExtraError(
                "presidio_redactor needs presidio-analyzer: pip install 'memstream[presidio]', and a spaCy model"
            ) from error
        analyzer = AnalyzerEngine()

    def redacted(text: str) -> str:
        found = analyzer.analyze(text=text, language=language, score_threshold=least_score)
        return _replaced(text, [((one.start, one.end), one.entity_type.lower()) for one in found])

    return redacted
