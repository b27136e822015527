"""Personal data taken out of texts: check digits, forms, and everything else left as it is."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstream.errors import ConfigError, MissingExtraError
from memstream.privacy import KINDS, presidio_redactor, redact

CARDS = [
    "4111111111111111",
    "5555555555554444",
    "378282246310005",
    "6011111111111117",
    "4222222222222",
    "30569309025904",
]
IBANS = [
    "DE89370400440532013000",
    "GB29NWBK60161331926819",
    "FR1420041010050500013M02606",
    "NO9386011117947",
    "CH9300762011623852957",
    "MT84MALT011000012345MTLCAST001S",
]
PHONES = [
    # German
    "+49 170 1234567",
    "+49 (0)170 123 45 67",
    "+49-30-123456",
    "0049 170 1234567",
    "0170/1234567",
    "0170 1234567",
    "0170 123 45 67",
    "01701234567",
    "030 123456",
    "(030) 123456-0",
    "030/123 45-67",
    "04101 12345",
    "+49301234567",
    # English
    "+44 20 7946 0958",
    "020 7946 0958",
    "(020) 7946 0958",
    "07700 900123",
    "+1 555 123 4567",
    "+1 (555) 123-4567",
    "(555) 123-4567",
    "555-123-4567",
    "555.123.4567",
    "555 123 4567",
    "1-800-555-0199",
]
EMAILS = ["anna@example.org", "anna.b+shop@mail.example.co.uk", "o'neil_1@x-y.de", "grüße@münchen.de", "A@B.CD"]
OTHERS = [
    "My order number is 48213.",
    "Order 48213 of 2024-05-12, then 48214 and 48215.",
    "12.05.2024 10:30 to 01.02.2025 09.30 - 10.30 Uhr",
    "05/12/2024, 2024-05-12T10:30:00.123Z, 2024-2025",
    "1,234,567.89 EUR; 10 000 000; 0.99; -1.5e10",
    "2005-06-03-15.42.53.276129, 2024-05-12-10.30.15.123456",
    "192.168.178.1 and 10.0.0.255:8080, v1.2.3, #1234567",
    "01067 Dresden, Hauptstr. 12b; room EG04; item 0815-4711",
    "4111 1111 1111 1112",  # the check digit is wrong
    "DE89 3704",  # an IBAN has 22 characters
    "a@b, @handle, user@localhost",
    "tracking 1Z999AA10123456784",
    "",
]


@pytest.mark.parametrize("text", OTHERS)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert redact(text) == text


@given(st.text(st.characters(exclude_categories=["Nd", "Cs"], exclude_characters="@")))
@settings(max_examples=300, deadline=None)
def test_a_text_without_digits_and_at_signs_stays_byte_for_byte(text: str) -> None:
    assert redact(text).encode() == text.encode()


@given(st.integers(0, 9_999_999), st.sampled_from(["order {}", "{}", "#{}.", "No. {}, please", "({})", "A-{}"]))
@settings(max_examples=300, deadline=None)
def test_numbers_of_up_to_seven_digits_are_no_personal_data(number: int, frame: str) -> None:
    assert redact(frame.format(number)) == frame.format(number)


def check_digit(digits: str) -> str:
    """The digit that makes the Luhn sum a multiple of ten, by trying all ten."""
    for last in "0123456789":
        total = 0
        for i, digit in enumerate((digits + last)[::-1]):
            doubled = int(digit) * 2 if i % 2 else int(digit)
            total += doubled - 9 if doubled > 9 else doubled
        if total % 10 == 0:
            return last
    raise AssertionError


@st.composite
def cards(draw: Any) -> str:
    digits = draw(st.from_regex(r"[1-9][0-9]{11,17}", fullmatch=True))
    digits += check_digit(digits)
    seed = random.Random(draw(st.integers(0, 2**32)))
    gap = draw(st.sampled_from(["", " ", "-", ".", " - ", "\u00a0", "–", "  "]))
    share = draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    return "".join(digit + (gap if seed.random() < share else "") for digit in digits[:-1]) + digits[-1]


@given(cards(), st.sampled_from(["{}", "my card is {}, thanks", "card:{}.", "({})", "48213, {}", "{}\n48213"]))
@settings(max_examples=500, deadline=None)
def test_cards_are_caught_in_any_groups(card: str, frame: str) -> None:
    assert redact(frame.format(card)) == frame.format("[card]")


@given(cards(), st.integers(1, 99_999))
@settings(max_examples=300, deadline=None)
def test_of_a_card_beside_another_number_nothing_is_left(card: str, number: int) -> None:
    digits = "".join(filter(str.isdigit, card))
    for text in (f"{number} {card}", f"{card} {number}"):
        left = "".join(filter(str.isdigit, redact(text, ["card"])))
        assert len(left) <= len(str(number)), (digits, left)


@pytest.mark.parametrize("card", CARDS)
def test_known_cards_are_caught_and_other_check_digits_are_not(card: str) -> None:
    assert redact(f"Pay with {card} now") == "Pay with [card] now"
    for last in "0123456789":
        changed = card[:-1] + last
        assert (redact(changed, ["card"]) == "[card]") == (last == card[-1])


@given(
    st.sampled_from(IBANS),
    st.sampled_from([1, 2, 3, 4, 5, 40]),
    st.sampled_from([" ", "\u00a0", "-", "  "]),
    st.sampled_from([str, str.lower]),
    st.sampled_from(["{}", "IBAN: {}, danke", "IBAN:{}.", "Konto {} bitte schnell", "48213 {} 48214"]),
)
@settings(max_examples=300, deadline=None)
def test_ibans_are_caught_with_and_without_blanks(iban: str, size: int, gap: str, case: Any, frame: str) -> None:
    parts = [iban[:4], *(iban[i : i + size] for i in range(4, len(iban), size))]
    assert redact(frame.format(case(gap.join(parts)))) == frame.format("[iban]")


@pytest.mark.parametrize("iban", IBANS)
def test_an_iban_with_another_check_digit_is_none(iban: str) -> None:
    for digit in "0123456789":
        changed = iban[:2] + digit + iban[3:]
        assert (redact(changed, ["iban"]) == "[iban]") == (changed == iban)


@pytest.mark.parametrize("frame", ["{}", "Call {}, please.", "Tel. {} (work)", "tel:{}", "{} or 48213"])
@pytest.mark.parametrize("phone", PHONES)
def test_phone_numbers_are_caught(phone: str, frame: str) -> None:
    assert redact(frame.format(phone)) == frame.format("[phone]")


@pytest.mark.parametrize("frame", ["{}", "Write to {}.", "<{}>", "mail:{},", "{}; order 48213"])
@pytest.mark.parametrize("email", EMAILS)
def test_mail_addresses_are_caught(email: str, frame: str) -> None:
    assert redact(frame.format(email)) == frame.format("[email]")


def test_only_the_kinds_that_are_asked_for() -> None:
    text = "anna@example.org 0170/1234567, 4111111111111111, DE89370400440532013000"
    expected = {
        "email": "[email] 0170/1234567, 4111111111111111, DE89370400440532013000",
        "phone": "anna@example.org [phone], 4111111111111111, DE89370400440532013000",
        "card": "anna@example.org 0170/1234567, [card], DE89370400440532013000",
        "iban": "anna@example.org 0170/1234567, 4111111111111111, [iban]",
    }
    assert {kind: redact(text, [kind]) for kind in KINDS} == expected
    assert redact(text) == "[email] [phone], [card], [iban]"
    assert redact(text, ()) == text
    with pytest.raises(ConfigError, match="'passport'; known: email, phone, card, iban"):
        redact(text, ["passport"])


@given(st.text("0123456789 -+()/.@aDE", max_size=60))
@settings(max_examples=500, deadline=None)
def test_what_was_redacted_needs_no_second_time(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


@pytest.mark.parametrize("text", ["a" * 200_000, "1" * 200_000, "1 " * 50_000, "DE89 " * 40_000, "0170 " * 40_000])
def test_long_texts_take_no_more_than_their_length(text: str) -> None:
    redact(text)


def test_presidio_is_asked_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    with pytest.raises(MissingExtraError, match="presidio"):
        presidio_redactor()

    asked: list[dict[str, Any]] = []

    class Engine:
        def analyze(self, **question: Any) -> list[SimpleNamespace]:
            asked.append(question)
            return [
                SimpleNamespace(start=24, end=30, score=0.9, entity_type="LOCATION"),
                SimpleNamespace(start=11, end=15, score=0.5, entity_type="PERSON"),
                SimpleNamespace(start=11, end=20, score=0.8, entity_type="PERSON"),
            ]

    monkeypatch.setitem(sys.modules, "presidio_analyzer", SimpleNamespace(AnalyzerEngine=Engine))
    assert presidio_redactor(language="de")("My name is Anna Berg of Bergen.") == "My name is [person] of [location]."
    assert asked == [{"text": "My name is Anna Berg of Bergen.", "language": "de", "score_threshold": 0.4}]
