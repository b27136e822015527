"""Texts as the page shows them: replies as Markdown, sizes, times, why something was recalled."""

from __future__ import annotations

import functools
from datetime import datetime

from markdown_it import MarkdownIt

from memstream.report import Recalled, Reply, Why

# What was said is data: HTML in it is shown, not obeyed; nothing is loaded for it; markdown-it refuses script links.
_MARKDOWN = (
    MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"]).disable("image")
)
_BOOSTS = {"date": "the day asked for", "speaker": "whose words were asked for"}
_ROLES = {
    "user": "You said",
    "assistant": "It said",
    "call": "It called",
    "tool": "A tool answered",
    "fact": "Pinned fact",
    "document": "Document",
}


@functools.lru_cache(maxsize=1024)
def as_html(text: str) -> str:
    """Markdown as HTML without any tag or address that was not written as Markdown."""
    html: str = _MARKDOWN.render(text)
    return html


def size(n_bytes: float) -> str:
    """Bytes for people, such as ``92.2 MB``."""
    for unit in ("bytes", "KB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} GB"


def when(moment: datetime) -> str:
    """A time, such as ``1 Dec 2026, 14:05``, on the server's clock."""
    local = moment.astimezone()
    return f"{local.day} {local:%b %Y, %H:%M}"


def source(memory: Recalled, here: str | None) -> str:
    """Who said a memory and when; and where, unless that is the conversation ``here``."""
    if memory.citation is not None:
        return str(memory.citation)
    parts = [_ROLES.get(memory.role, memory.role), when(memory.time)]
    if memory.conversation not in (None, here):
        parts.append(f"in {memory.conversation}")
    return " · ".join(parts)


def account(reply: Reply) -> str:
    """What a turn did, in few words."""
    n, gone, n_tokens = len(reply.recalled), len(reply.evicted), reply.usage.reply_tokens
    parts = [f"{n} recalled" if n else "nothing recalled"]
    if gone:
        parts.append(f"{gone} exchange{'s' if gone > 1 else ''} left the window")
    seconds = reply.timings.decode_ms / 1000
    if n_tokens and seconds > 0:
        parts.append(f"{n_tokens} token{'s' if n_tokens > 1 else ''}, {n_tokens / seconds:.0f} a second")
    return " · ".join(parts)


def reasons(why: Why) -> list[str]:
    """Why a memory was found, one reason each."""
    found = []
    if why.pinned:
        found.append("pinned")
    if why.lexical_rank is not None or why.terms:
        found.append(f"words: {', '.join(why.terms)}{_place(why.lexical_rank)}" if why.terms else "words")
    if why.dense is not None or why.dense_rank is not None:
        score = "" if why.dense is None else f" {why.dense:.2f}"
        found.append(f"meaning{score}{_place(why.dense_rank)}")
    found += [_BOOSTS.get(boost, boost) for boost in why.boosts]
    if why.rerank is not None:
        found.append(f"reranker {why.rerank:.2f}")
    return found


def _place(rank: int | None) -> str:
    return "" if rank is None else f" (no. {rank})"
