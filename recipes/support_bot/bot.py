"""A help desk: answers from a knowledge base with citations, knows its customers, and hands over when it should."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memstream import Agent
from memstream.cli.bots import run_bot

HERE = Path(__file__).parent
UNKNOWN = "I don't know that; it is not in what I may tell you. Could you say it in other words?"
HANDED = "I am handing this over to a colleague, who will answer you here."
RULES = {  # reason for a colleague -> what a customer says then
    "asked for a human": r"\b(human|person|agent|colleague|somebody real|representative|manager)\b",
    "sensitive": r"\b(lawyer|attorney|sue|court|police|injur\w+|hurt|discriminat\w+|harass\w*|my data)\b",
}
UNHAPPY = re.compile(
    r"\b(did ?n[o']t help|not helpful|that('s| is) (wrong|not)|useless|still (not|does ?n[o']t))\b", re.I
)
REFUND = re.compile(r"\b(refund|pay|compensat\w+|give)\b.*?(\d+(?:[.,]\d+)?) ?(euros?|€|eur)\b", re.I)
CITED = 1.5  # what a customer told is the answer only where it fits so many times better than the knowledge base
QUESTION = re.compile(r"\?|^(what|when|where|who|why|how|which|do|does|can|could|is|are|may|will)\b", re.I)


@dataclass(frozen=True)
class Packet:
    """What a colleague gets."""

    customer: str | None
    conversation: str | None
    reason: str
    time: str
    summary: list[str]  # what the customer said, the beginning of each turn
    last_turns: list[dict[str, str]]
    facts: list[str]
    sources: list[str]


class Desk:
    """The policy around an agent; ``answer`` is the life of a customer's turn.

    Args:
        agent: talks, remembers, and has the knowledge base.
        failures: tries that did not help, in a row, before a colleague takes over.
        refund_limit: euros that may be promised.
        inbox: folder for packets.
    """

    def __init__(self, agent: Any, *, failures: int, refund_limit: float, inbox: Path) -> None:
        self.agent, self._failures, self._refund_limit, self._inbox = agent, failures, refund_limit, inbox

    def answer(self, chat: Any, text: str, generation: Any = None) -> Iterator[str]:
        """What the customer reads; nothing once a colleague has taken over."""
        said = [turn.text for turn in chat.turns() if turn.role == "assistant"]
        if any(reply.endswith(HANDED) for reply in said):
            chat.add(text, "")
            return
        found = [note for note in chat.recall(text) if note.citation is not None or states(note)]
        reason = self._reason(text, said, found)
        if reason is not None:
            chat.add(text, HANDED)
            self._hand_over(chat, reason, found)
            yield HANDED
        elif found and QUESTION.search(text):
            yield self._from_notes(chat, text, generation, found)
        elif QUESTION.search(text):
            chat.add(text, UNKNOWN)
            yield UNKNOWN
        else:
            yield from chat.stream(text, generation=generation)

    def _reason(self, text: str, said: list[str], found: list[Any]) -> str | None:
        """Why a colleague should take over; None where the bot may go on."""
        for reason, rule in RULES.items():
            if re.search(rule, text, re.I):
                return reason
        refund = REFUND.search(text)
        if refund is not None and float(refund[2].replace(",", ".")) > self._refund_limit:
            return "action not allowed"
        failed = next((i for i, reply in enumerate(reversed(said)) if reply != UNKNOWN), len(said))
        now = UNHAPPY.search(text) is not None or (QUESTION.search(text) is not None and not found)
        if now and failed + 1 >= self._failures:
            return "nothing found" if not found else "did not help"
        return None

    def _from_notes(self, chat: Any, text: str, generation: Any, found: list[Any]) -> str:
        """The model's answer where every name and number of it stands in the best note, else the note itself; what the
        customer told is only ever quoted."""
        best = max(found, key=lambda note: note.why.score * (CITED if note.citation is not None else 1))
        if best.citation is None:
            told = f'You told us: "{best.text}"'
        else:
            said = chat.chat(text, generation=generation).text.strip()
            chat.take_back(chat.turns(last=2)[0])
            said = said if stands_in(said, best.text) else best.text
            told = f"{said} [1]\n[1] {best.citation}, lines {best.citation.first_line} to {best.citation.last_line}"
        chat.add(text, told)
        return told

    def _hand_over(self, chat: Any, reason: str, found: list[Any]) -> None:
        turns = chat.turns()
        packet = Packet(
            customer=chat.scope.user,
            conversation=chat.scope.conversation,
            reason=reason,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            summary=[turn.text[:120] for turn in turns if turn.role == "user"],
            last_turns=[{"role": turn.role, "text": turn.text} for turn in turns[-8:]],
            facts=[memory.text for memory in self.agent.memory.memories(chat.scope) if memory.role == "fact"],
            sources=[str(note.citation) for note in found if note.citation is not None],
        )
        self._inbox.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W+", "-", f"{packet.time} {packet.customer} {packet.conversation}")
        (self._inbox / f"{name}.json").write_text(json.dumps(asdict(packet), indent=1, ensure_ascii=False))


def states(note: Any) -> bool:
    """Whether a note is something that the customer told."""
    return note.role == "user" and QUESTION.search(note.text) is None


def stands_in(said: str, source: str) -> bool:
    """Whether every number (with the word after it) and name of a reply is its source's, and most of its words are."""
    source = " ".join(source.lower().split())
    particular = re.findall(r"\d[\w.,]*(?: [^\W\d]\w*)?|(?<!^)(?<![.!?] )\b[A-Z]\w+", " ".join(said.split()))
    words = [word for word in re.findall(r"\w+", said.lower()) if len(word) > 3]
    told = sum(re.search(rf"\b{word}\b", source) is not None for word in words)
    return all(one.lower().strip(".,") in source for one in particular) and told >= 0.7 * max(1, len(words))


def open_bot(settings: dict[str, Any], *, knowledge: str, inbox: str, failures: int, refund_limit: float) -> Any:
    """The agent with its knowledge base, and the policy around it."""
    agent = Agent.from_mapping(settings)
    agent.add_documents(HERE / knowledge, sync=True)
    agent.memory.flush()
    return agent, Desk(agent, failures=failures, refund_limit=refund_limit, inbox=Path(inbox)).answer


MONDAY = (
    ("anna", "Hello, my name is Anna and I bought a blue kayak.", ""),
    ("anna", "How long does delivery take for a kayak?", "within 10 working days"),
    ("anna", "How long can I return something?", "[1] returns.md"),
    ("anna", "What is the capital of Mongolia?", UNKNOWN),
    ("bela", "My e-mail is bela@example.org, what does shipping cost?", "4.90 euros"),
    ("bela", "What is the tallest volcano on Mars?", UNKNOWN),
    ("bela", "Which opera did Verdi write first?", HANDED),
    ("bela", "Hello?", None),
    ("carl", "I want to talk to a human.", HANDED),
    ("dora", "I will call my lawyer.", HANDED),
    ("emil", "Give me a refund of 400 euros.", HANDED),
)
THURSDAY = (
    ("anna", "Which kayak did I buy?", "blue kayak"),
    ("carl", "Which opera did I like?", UNKNOWN),
)


def check_packets() -> None:
    """What colleagues got on both days, and that it holds no personal data."""
    packets = [json.loads(path.read_text()) for path in sorted(Path("inbox").iterdir())]
    reasons = sorted((packet["customer"], packet["reason"]) for packet in packets)
    assert reasons == [
        ("bela", "nothing found"),
        ("carl", "asked for a human"),
        ("dora", "sensitive"),
        ("emil", "action not allowed"),
    ], reasons
    assert "bela@example.org" not in json.dumps(packets)


if __name__ == "__main__":
    sys.exit(run_bot(HERE / "config.toml", (MONDAY, THURSDAY), check=check_packets))
