"""What memstream tells about its work: plain data, standard library only."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

FinishReason = Literal["stop", "length", "timeout", "cancelled", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Why a memory was found: scores, and its rank (from 1) in each list; None where a list does not hold it.

    ``boosts`` names what else spoke for it: ``date`` where it was said on, or tells of, a day that was asked for,
    ``speaker`` where the question is about who said it. ``rerank`` is the score of a reranker that has read it.
    """

    score: float
    dense: float | None = None
    lexical: float | None = None
    dense_rank: int | None = None
    lexical_rank: int | None = None
    terms: tuple[str, ...] = ()
    boosts: tuple[str, ...] = ()
    rerank: float | None = None
    pinned: bool = False

    @property
    def order(self) -> tuple[float, float]:
        """Sorts what was found, the least first: by the reranker's score, then by the memory's own."""
        return (-math.inf if self.rerank is None else self.rerank, self.score)


@dataclass(frozen=True, slots=True, kw_only=True)
class Citation:
    """Where a passage of a document is from.

    Attributes:
        document: id of the document, such as ``document:3``.
        name: of the document, such as ``handbook.md``, or ``faq.jsonl#a1`` for a record of a file.
        path: of the file when it was added, absolute; None for a text that was handed in.
        title: of the document; ``""`` where it has none.
        heading: the headings it stands under, such as ``Returns > Refunds``.
        first: its first character in the text of the document, and
        last: the one after its last, so that ``text[first:last]`` is the passage. The text is that of the file, byte
            order mark and ends of lines included; of a record, its own.
        first_line: the line of the file it begins on, counted from 1, and
        last_line: the one it ends on.
    """

    document: str
    name: str
    path: str | None
    title: str
    heading: str
    first: int
    last: int
    first_line: int
    last_line: int

    def __str__(self) -> str:
        return f"{self.name}, {self.heading}" if self.heading else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """One memory that was found.

    Attributes:
        id: what ``forget`` takes, such as ``turn:17``, ``fact:3`` or ``passage:5``.
        role: who said it: ``user``, ``assistant``, ``fact`` or ``document``.
        text: the raw text, never a summary; where it is too long for the notes, whole sentences of it.
        time: when it was said, or the document was added or changed (timezone aware, UTC).
        conversation: name of the conversation it was said in; None for facts and documents.
        why: scores and ranks.
        citation: of a passage, where it is from.
    """

    id: str
    role: str
    text: str
    time: datetime
    conversation: str | None
    why: Why
    citation: Citation | None = None

    @property
    def note(self) -> str:
        """The text as the model is shown it: that of a document after its source."""
        return self.text if self.citation is None else f"From {self.citation}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """One exchange that left the window.

    Attributes:
        turns: ids of its turns, such as ``turn:17``.
        n_tokens: how many tokens it freed.
        text: its beginning, for people.
        whole: False where only the older part of an exchange too long for the window left.
    """

    turns: tuple[str, ...]
    n_tokens: int
    text: str
    whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One exchange in the window: ids of its turns, its tokens there, and the beginning of what the user said."""

    turns: tuple[str, ...]
    n_tokens: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """What a conversation's cache holds: tokens of each segment, and how many it has room for.

    Attributes:
        sink_tokens: pinned.
        memory_tokens: of recalled text.
        memory_room: the most of it.
        window_tokens: of the latest turns.
        window_room: the most of them.
        exchanges: those in the window, oldest first; the first may have lost its older part.
    """

    sink_tokens: int
    memory_tokens: int
    memory_room: int
    window_tokens: int
    window_room: int
    exchanges: tuple[Held, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """An exchange that was taken in: its length in tokens, and what it evicted."""

    n_tokens: int
    evicted: tuple[Evicted, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryCounts:
    """What became of the exchanges that left a window, since the memory was opened.

    Attributes:
        chosen: summaries of the chosen summariser, a model or a callable.
        extractive: sentences of the turns themselves, by default or because the chosen summariser gave nothing usable.
        copies: no summary, as the windows hold every word already.
        rejected: texts of a model that were not used, because they named what the turns do not.
        failed: how often the chosen summariser raised an error.
    """

    chosen: int = 0
    extractive: int = 0
    copies: int = 0
    rejected: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model made, and what came of it.

    Attributes:
        name: of the tool; ``""`` where the model's call could not be read.
        arguments: as the model gave them.
        result: what it returned, as text or JSON; None for an error, and for a call that is still to be made.
        error: what went wrong; None where nothing did.
        latency_ms: how long it took.
    """

    name: str
    arguments: dict[str, Any]
    result: str | None = None
    error: str | None = None
    latency_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one turn.

    Attributes:
        prompt_tokens: computed before the reply, and for the results of tools.
        context_tokens: all that the reply's first token saw.
        reply_tokens: of the reply, and of calls of tools.
        memory_tokens: of recalled text.
        window_tokens: what the window holds afterwards.
        drafted_tokens: guessed at, where decoding is speculative.
        accepted_tokens: those of them that the model chose too.
    """

    prompt_tokens: int = 0
    context_tokens: int = 0
    reply_tokens: int = 0
    memory_tokens: int = 0
    window_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Milliseconds per stage of one turn; ``wait_ms`` is for the row, ``first_token_ms`` counts from the call, and
    ``tools_ms`` is what the model's calls took."""

    wait_ms: float = 0.0
    store_ms: float = 0.0
    recall_ms: float = 0.0
    memory_ms: float = 0.0
    prefill_ms: float = 0.0
    first_token_ms: float = 0.0
    decode_ms: float = 0.0
    tools_ms: float = 0.0
    total_ms: float = 0.0


class Clock:
    """Milliseconds per stage of a turn."""

    def __init__(self) -> None:
        self._begun = self._last = time.perf_counter()
        self._stages: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Ends a stage; one that comes again takes longer."""
        now = time.perf_counter()
        self._stages[stage] = self._stages.get(stage, 0.0) + (now - self._last) * 1000
        self._last = now

    def first(self) -> None:
        """Notes the first piece of text; later calls change nothing."""
        self._stages.setdefault("first_token_ms", (time.perf_counter() - self._begun) * 1000)

    def timings(self) -> Timings:
        """All stages so far."""
        return Timings(**self._stages, total_ms=(time.perf_counter() - self._begun) * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to one turn, and the report of how it came about; ``str(reply)`` is its text.

    ``tool_calls`` are the calls the model made, in order. Where ``finish_reason`` is ``tool_calls``, the last of them
    have neither result nor error: whoever asked makes them, and says the results next.
    ``summaries`` counts those made in the background so far, for all conversations.
    """

    text: str
    finish_reason: FinishReason
    recalled: tuple[Recalled, ...] = ()
    evicted: tuple[Evicted, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    cache_bytes: int = 0
    summaries: SummaryCounts = field(default_factory=SummaryCounts)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReceipt:
    """What one ``forget`` removed, and the proof that it is gone.

    Attributes:
        id: the memory that was forgotten.
        removed: number of rows removed, by table.
        snapshots: number of snapshots deleted.
        caches: number of open caches rebuilt without it.
        echoes: ids of other turns that quote it; they stay until they are forgotten too.
        verified: True when searching again for the text did not find it.
    """

    id: str
    removed: dict[str, int]
    snapshots: int
    caches: int
    echoes: tuple[str, ...]
    verified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedDocuments:
    """What one ``add_documents`` did.

    Attributes:
        added: ids of new documents.
        changed: ids of those whose text is another now.
        removed: ids of those that are no longer there.
        n_unchanged: documents that were as they are.
        n_passages_kept: passages of changed documents that are as they were, vectors and all.
        n_passages_new: passages that are new.
    """

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    n_unchanged: int = 0
    n_passages_kept: int = 0
    n_passages_new: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentInfo:
    """A document in a list; see ``Citation`` for what tells where it is from."""

    id: str
    name: str
    path: str | None
    title: str
    n_passages: int
    added: datetime
    updated: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireReceipt:
    """What was older than it may be and is gone.

    Attributes:
        before: everything said or told before is meant.
        removed: number of rows removed, by table; of a dry run, the turns and facts that are old.
        snapshots: number of snapshots deleted.
        kept: old turns that were left because their exchange is being said.
        verified: True when looking again found none but those, and the files were wiped; False for a dry run.
    """

    before: datetime
    removed: dict[str, int]
    snapshots: int = 0
    kept: int = 0
    verified: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What the rows of an agent, its conversations and its memory are like, and what was done since it was made.

    Attributes:
        rows: caches for one conversation each.
        rows_allowed: how many of them are used; fewer than ``rows`` while memory is short.
        open: conversations that sessions are open on.
        resident: those of them that have a row.
        running: those whose turn runs.
        waiting: turns that wait, for a row or for an earlier turn of their conversation.
        process_bytes: memory that the process takes.
        cache_bytes: memory of the rows.
        swap_bytes: memory of conversations without a row.
        swap_file_bytes: files of conversations without a row, of all processes on the store.
        steps: forwards that decoded one token in each of some rows, or in one row drafted ones too.
        tokens: decoded by them.
        prefill_tokens: computed otherwise.
        evictions: exchanges, or parts of them, that left a window.
        swap_outs: rows copied out for somebody else.
        swap_out_ms: milliseconds that took, all together.
        swap_ins: rows filled with what was copied, from memory or a file.
        swap_in_ms: milliseconds that took, all together.
        rebuilds: rows filled by computing stored turns again.
        pressure_events: how often memory ran out, or nearly did.
    """

    rows: int
    rows_allowed: int
    open: int
    resident: int
    running: int
    waiting: int
    process_bytes: int
    cache_bytes: int
    swap_bytes: int
    swap_file_bytes: int
    steps: int
    tokens: int
    prefill_tokens: int
    evictions: int
    swap_outs: int
    swap_out_ms: float
    swap_ins: int
    swap_in_ms: float
    rebuilds: int
    pressure_events: int


def as_json(report: Any) -> Any:
    """Turns a report (nested dataclasses, tuples, times) into what ``json.dumps`` takes."""
    if dataclasses.is_dataclass(report) and not isinstance(report, type):
        return {f.name: as_json(getattr(report, f.name)) for f in dataclasses.fields(report)}
    if isinstance(report, datetime):
        return report.isoformat()
    if isinstance(report, (list, tuple)):
        return [as_json(item) for item in report]
    if isinstance(report, dict):
        return {key: as_json(value) for key, value in report.items()}
    return report


# Everything a terminal could take as an order: control characters but tab and newline, C1, bidirectional overrides.
_ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """The text with what a terminal would obey replaced by U+FFFD, so that no stored word can move the cursor."""
    return _ORDERS.sub("\ufffd", text)
