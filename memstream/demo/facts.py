"""Facts a person tells in one sentence, each with the question that asks for it and the answer no one could guess."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from memstream.errors import ConfigError


class Fact(NamedTuple):
    """One thing a person says about themselves.

    Attributes:
        kind: one of ``KINDS``.
        statement: the sentence that tells it.
        question: asks for it, without containing the answer.
        answer: a short text that a right reply contains, compared case-folded.
    """

    kind: str
    statement: str
    question: str
    answer: str


# Kind -> pairs of (statement, question). No subject appears twice, also not across kinds: a question has one answer.
_TOPICS: dict[str, tuple[tuple[str, str], ...]] = {
    "number": (
        ("My order number is {}.", "What is my order number?"),
        ("My customer number is {}.", "What is my customer number?"),
        ("My invoice number is {}.", "What is my invoice number?"),
        ("My locker number is {}.", "What is my locker number?"),
        ("My hotel room number is {}.", "What is my hotel room number?"),
        ("My phone extension at work is {}.", "What is my phone extension at work?"),
        ("My number in the marathon is {}.", "What is my number in the marathon?"),
        ("My insurance policy number is {}.", "What is my insurance policy number?"),
        ("My lottery ticket has the number {}.", "Which number does my lottery ticket have?"),
        ("My parcel has the tracking number {}.", "Which tracking number does my parcel have?"),
        ("My post office box is number {}.", "What is the number of my post office box?"),
        ("My electricity meter shows {}.", "What does my electricity meter show?"),
    ),
    "name": (
        ("My dentist is called Dr. {}.", "What is my dentist called?"),
        ("My boss is called Mrs. {}.", "What is my boss called?"),
        ("My landlord is called Mr. {}.", "What is my landlord called?"),
        ("My lawyer is called Ms. {}.", "What is my lawyer called?"),
        ("My piano teacher is called Mr. {}.", "What is my piano teacher called?"),
        ("My hairdresser is called Mrs. {}.", "What is my hairdresser called?"),
        ("My swimming coach is called Mr. {}.", "What is my swimming coach called?"),
        ("My eye doctor is called Dr. {}.", "What is my eye doctor called?"),
        ("My old mathematics professor is called {}.", "What is my old mathematics professor called?"),
        ("My accountant is called Ms. {}.", "What is my accountant called?"),
        ("My driving instructor is called Mr. {}.", "What is my driving instructor called?"),
        ("My babysitter is called Miss {}.", "What is my babysitter called?"),
    ),
    "place": (
        ("I was born in {}.", "In which city was I born?"),
        ("I spent my last holiday in {}.", "Where did I spend my last holiday?"),
        ("I studied at the university of {}.", "In which city did I study at the university?"),
        ("My pen friend lives in {}.", "In which city does my pen friend live?"),
        ("My twin moved to {}.", "Which city did my twin move to?"),
        ("My honeymoon was in {}.", "Where was my honeymoon?"),
        ("My company has its head office in {}.", "In which city does my company have its head office?"),
        ("I met my wife in {}.", "In which city did I meet my wife?"),
        ("My next conference takes place in {}.", "In which city does my next conference take place?"),
        ("I once missed a train in {}.", "In which city did I once miss a train?"),
        ("I bought my wedding ring in {}.", "In which city did I buy my wedding ring?"),
        ("My grandparents are buried in {}.", "In which city are my grandparents buried?"),
    ),
    "date": (
        ("My birthday is on {}.", "When is my birthday?"),
        ("My wedding anniversary is on {}.", "When is my wedding anniversary?"),
        ("My exam takes place on {}.", "When does my exam take place?"),
        ("My passport expires on {}.", "When does my passport expire?"),
        ("My rent contract ends on {}.", "When does my rent contract end?"),
        ("My knee operation is on {}.", "When is my knee operation?"),
        ("My school reunion is on {}.", "When is my school reunion?"),
        ("My driving test is on {}.", "When is my driving test?"),
        ("My new kitchen will be delivered on {}.", "When will my new kitchen be delivered?"),
        ("My choir sings its concert on {}.", "When does my choir sing its concert?"),
        ("My tax papers are due on {}.", "When are my tax papers due?"),
        ("My flight home leaves on {}.", "When does my flight home leave?"),
    ),
    "like": (
        ("The bird I like best is the {}.", "Which bird do I like best?"),
        ("The flower I like best is the {}.", "Which flower do I like best?"),
        ("The instrument I play is the {}.", "Which instrument do I play?"),
        ("The composer I like best is {}.", "Which composer do I like best?"),
        ("The painter I like best is {}.", "Which painter do I like best?"),
        ("The writer I like best is {}.", "Which writer do I like best?"),
        ("The sport I enjoy most is {}.", "Which sport do I enjoy most?"),
        ("The board game I like best is {}.", "Which board game do I like best?"),
        ("The gemstone I like best is the {}.", "Which gemstone do I like best?"),
        ("The foreign language I enjoy most is {}.", "Which foreign language do I enjoy most?"),
        ("The wild animal I like best is the {}.", "Which wild animal do I like best?"),
        ("The craft I do in the evenings is {}.", "Which craft do I do in the evenings?"),
    ),
    "colour": (
        ("My front door is {}.", "What colour is my front door?"),
        ("My car is {}.", "What colour is my car?"),
        ("My winter coat is {}.", "What colour is my winter coat?"),
        ("My sofa is {}.", "What colour is my sofa?"),
        ("My umbrella is {}.", "What colour is my umbrella?"),
        ("My suitcase is {}.", "What colour is my suitcase?"),
        ("My rain boots are {}.", "What colour are my rain boots?"),
        ("My bedroom curtains are {}.", "What colour are my bedroom curtains?"),
        ("My sailing boat is {}.", "What colour is my sailing boat?"),
        ("My toothbrush is {}.", "What colour is my toothbrush?"),
        ("My ski helmet is {}.", "What colour is my ski helmet?"),
        ("My letter box is {}.", "What colour is my letter box?"),
    ),
    "food": (
        ("On Fridays we always eat {}.", "What do we always eat on Fridays?"),
        ("My grandmother was famous for her {}.", "Which dish was my grandmother famous for?"),
        ("For the party I am going to cook {}.", "What am I going to cook for the party?"),
        ("In the canteen I always order {}.", "What do I always order in the canteen?"),
        ("The dish I cannot stand is {}.", "Which dish can I not stand?"),
        ("My daughter wants {} for her school lunch.", "What does my daughter want for her school lunch?"),
        ("On New Year's Eve we serve {}.", "What do we serve on New Year's Eve?"),
        ("On our first date we ate {}.", "What did we eat on our first date?"),
        ("After a long hike I want nothing but {}.", "Which food do I want after a long hike?"),
        ("When I was ill I lived on {}.", "What did I live on when I was ill?"),
        ("My colleagues gave me a cookbook about {}.", "What is the cookbook about that my colleagues gave me?"),
        ("My freezer is full of {}.", "What is my freezer full of?"),
    ),
    "code": (
        ("The booking code of my train trip is {}.", "What is the booking code of my train trip?"),
        ("The licence plate of my van is {}.", "What is the licence plate of my van?"),
        ("The model of my printer is {}.", "What is the model of my printer?"),
        ("The code of my evening course is {}.", "What is the code of my evening course?"),
        ("The paint code of my fence is {}.", "What is the paint code of my fence?"),
        ("The shelf mark of my library book is {}.", "What is the shelf mark of my library book?"),
        ("The seat of my opera ticket is {}.", "What is the seat of my opera ticket?"),
        ("The voucher code from my bookshop is {}.", "What is the voucher code from my bookshop?"),
        ("The call sign of my radio is {}.", "What is the call sign of my radio?"),
        ("The part code of my broken dishwasher is {}.", "What is the part code of my broken dishwasher?"),
        ("The parking space of my scooter is {}.", "What is the parking space of my scooter?"),
        ("The type of my hearing aid is {}.", "What is the type of my hearing aid?"),
    ),
    "job": (
        ("My sister works as a {}.", "What is my sister's job?"),
        ("My brother works as a {}.", "What is my brother's job?"),
        ("My father worked as a {}.", "What was my father's job?"),
        ("My mother worked as a {}.", "What was my mother's job?"),
        ("My uncle works as a {}.", "What is my uncle's job?"),
        ("My aunt works as a {}.", "What is my aunt's job?"),
        ("My cousin works as a {}.", "What is my cousin's job?"),
        ("My neighbour works as a {}.", "What is my neighbour's job?"),
        ("My best friend works as a {}.", "What is my best friend's job?"),
        ("My nephew wants to become a {}.", "What does my nephew want to become?"),
        ("My niece wants to become a {}.", "What does my niece want to become?"),
        ("My flatmate works as a {}.", "What is my flatmate's job?"),
    ),
    "pet": (
        ("My dog is called {}.", "What is my dog called?"),
        ("My cat is called {}.", "What is my cat called?"),
        ("My parrot is called {}.", "What is my parrot called?"),
        ("My pony is called {}.", "What is my pony called?"),
        ("My tortoise is called {}.", "What is my tortoise called?"),
        ("My rabbit is called {}.", "What is my rabbit called?"),
        ("My hamster is called {}.", "What is my hamster called?"),
        ("My goldfish is called {}.", "What is my goldfish called?"),
        ("My canary is called {}.", "What is my canary called?"),
        ("My goat is called {}.", "What is my goat called?"),
        ("My donkey is called {}.", "What is my donkey called?"),
        ("My ferret is called {}.", "What is my ferret called?"),
    ),
}

KINDS = tuple(_TOPICS)
MOST_FACTS = sum(len(topics) for topics in _TOPICS.values())


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Values of a kind, any of which fits any of its subjects.
_VALUES: dict[str, tuple[str, ...]] = {
    "name": _words(
        "Varga Okonkwo Lindqvist Moreau Petrova Castellano Nakamura Haddad Brennan Kowalski "
        "Oduya Ferreira Johansson Whitlock Bergmann Delgado"
    ),
    "place": _words(
        "Lisbon Krakow Nairobi Havana Tallinn Geneva Marseille Naples Seville Bergen "
        "Calgary Montevideo Adelaide Osaka Bologna Glasgow"
    ),
    "colour": _words(
        "turquoise crimson lavender maroon magenta indigo scarlet ochre mustard ivory "
        "burgundy lilac khaki apricot charcoal emerald"
    ),
    "food": _words(
        "lasagne goulash paella risotto gazpacho moussaka ratatouille falafel tortellini polenta "
        "sauerkraut couscous gnocchi borscht dumplings pancakes"
    ),
    "job": _words(
        "locksmith beekeeper glassblower carpenter veterinarian florist blacksmith bookbinder "
        "translator midwife sculptor welder goldsmith surveyor cartographer puppeteer"
    ),
    "pet": _words(
        "Ziggy Bandit Waffles Snowball Gizmo Merlin Domino Marbles Zorro Rufus Pancho Moxie Bramble Tinker Caruso Pogo"
    ),
}
# The subjects of "like", in order, each with values of its own.
_LIKES: tuple[tuple[str, ...], ...] = tuple(
    _words(line)
    for line in (
        "kingfisher goldfinch pelican",
        "foxglove snapdragon hyacinth",
        "bassoon accordion harpsichord",
        "Sibelius Vivaldi Debussy",
        "Vermeer Kandinsky Botticelli",
        "Chekhov Steinbeck Cervantes",
        "fencing archery curling",
        "backgammon Scrabble Cluedo",
        "opal garnet amethyst",
        "Hungarian Swahili Icelandic",
        "badger hedgehog walrus",
        "embroidery pottery origami",
    )
)
_MONTHS = _words("January February March April May June July August September October November December")


def facts(n: int, seed: int) -> list[Fact]:
    """Composes n facts, the kinds in turn, with no two that answer the same question or share an answer.

    Args:
        n: how many, at most ``MOST_FACTS``.
        seed: the same seed gives the same facts.

    Raises:
        ConfigError: n is out of range.
    """
    if not 0 <= n <= MOST_FACTS:
        raise ConfigError(f"cannot compose {n} facts; allowed is from 0 to {MOST_FACTS}")
    chooser = random.Random(seed)
    by_kind = [_of_kind(kind, chooser) for kind in KINDS]
    mixed = [fact for level in zip(*by_kind, strict=True) for fact in chooser.sample(level, len(level))]
    return mixed[:n]


def _of_kind(kind: str, chooser: random.Random) -> list[Fact]:
    """Every subject of a kind with a value, in random order."""
    topics = _TOPICS[kind]
    if kind == "like":
        values = [chooser.choice(choices) for choices in _LIKES]
    elif kind in _VALUES:
        values = chooser.sample(_VALUES[kind], len(topics))
    else:
        values = list(itertools.islice(_unlike(_DRAWN[kind], chooser), len(topics)))
    made = [Fact(kind, say.format(value), ask, value) for (say, ask), value in zip(topics, values, strict=True)]
    return chooser.sample(made, len(made))


def _unlike(draw: Callable[[random.Random], str], chooser: random.Random) -> Iterator[str]:
    """Drawn values of which no two end alike; takes no more than the 18 days that ``_date`` has."""
    endings: set[str] = set()
    while True:
        value = draw(chooser)
        if value[-3:] not in endings:
            endings.add(value[-3:])
            yield value


def _number(chooser: random.Random) -> str:
    return str(chooser.randint(10_000, 99_999))


def _code(chooser: random.Random) -> str:
    """Two letters and three digits; no letter that looks like a digit or forms a word."""
    return "".join(chooser.sample("BDFGHJKLNPRTVWXZ", 2)) + str(chooser.randint(200, 999))


def _date(chooser: random.Random) -> str:
    """A month and a day of two digits, so that no date is the beginning of another."""
    return f"{chooser.choice(_MONTHS)} {chooser.randint(11, 28)}"


_DRAWN: dict[str, Callable[[random.Random], str]] = {"number": _number, "code": _code, "date": _date}
