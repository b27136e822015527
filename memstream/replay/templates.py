"""Finds the templates behind log lines as they stream by: Drain's tree of fixed depth, bounded in every direction.

Source: He et al., "Drain: An Online Log Parsing Approach with Fixed Depth Tree", ICWS 2017. Deviations: bounds on
templates, tree nodes and words of a line; the template not seen for longest leaves when there are too many.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memstream.replay.normalise import MASK, mask

MAX_WORDS = 128  # words of a line that are compared; the rest of a longer one is ignored
_PREFIX_WORDS = 2  # levels of the tree below the word count
_MAX_CHILDREN = 100  # words told apart at one node (further ones share a child), and templates compared at a leaf
_SIMILAR = 0.5  # least share of equal words
_DROPPED_PER_KEPT = 10  # counts of dropped templates kept for each template that may be kept


@dataclass(slots=True, eq=False, weakref_slot=True)
class Template:
    """What a kind of line has in common.

    Attributes:
        id: from 1, never reused.
        words: its words, with ``<*>`` where lines differ.
        path: the way to it through the tree.
        n_lines: how many lines were of it, those before it was dropped and came back included.
        meaning: how much its first line reads like a failure; None until that was worked out.
        text: the words, for people.
    """

    id: int
    words: list[str]
    path: tuple[int | str, ...]
    n_lines: int = 1
    meaning: float | None = None
    text: str = field(init=False)

    def __post_init__(self) -> None:
        self.text = " ".join(self.words)

    def widen(self, words: list[str]) -> bool:
        """Masks the words in which another line differs; returns whether there were any."""
        if self.words == words:
            return False
        joined = [a if a == b else MASK for a, b in zip(self.words, words, strict=True)]
        changed = joined != self.words
        if changed:
            self.words, self.text = joined, " ".join(joined)
        return changed


@dataclass(slots=True)
class _Node:
    children: dict[int | str, _Node] = field(default_factory=dict)
    templates: list[Template] = field(default_factory=list)  # the one not seen for longest first


class Seen(NamedTuple):
    """What a message was taken for: its template, whether that is new or has lost a word, and its count before."""

    template: Template
    new: bool
    changed: bool
    n_before: int


class TemplateMiner:
    """Assigns every message to a template, making a new one where none is alike.

    A template dropped for space leaves a hash of its first line's masked words and its count, so that it does not
    seem new when it comes back; of those, ten times as many as templates are kept.

    Args:
        max_templates: most templates kept; tree nodes are bounded by 3 times as many.
        recall: asked how many lines of a template were seen before this run, with its text.
    """

    def __init__(self, max_templates: int, recall: Callable[[str], int] = lambda text: 0) -> None:
        self._max_templates = max_templates
        self._recall = recall
        self._dropped: OrderedDict[str, int] = OrderedDict()  # counts by hash
        self._root = _Node()
        self._by_use: OrderedDict[int, Template] = OrderedDict()  # least recently seen first
        self._n_made = 0

    def __len__(self) -> int:
        return len(self._by_use)

    def add(self, message: str) -> Seen:
        """Finds or makes the template of a message, and counts it."""
        words = mask(message).split()[:MAX_WORDS]
        node, path = self._root, self._path(words)
        for step in path:
            found = node.children.get(step)
            if found is None:
                break
            node = found
        else:
            template = _most_similar(node.templates, words)
            if template is not None:
                changed = template.widen(words)
                self._by_use.move_to_end(template.id)
                node.templates.remove(template)
                node.templates.append(template)
                template.n_lines += 1
                return Seen(template, False, changed, template.n_lines - 1)
        template = self._make(words, path)
        return Seen(template, template.n_lines == 1, False, template.n_lines - 1)

    def _path(self, words: list[str]) -> tuple[int | str, ...]:
        """The way through the tree: the number of words, then the first words, those with a mask as one."""
        node: _Node | None = self._root.children.get(len(words))
        path: list[int | str] = [len(words)]
        for word in words[:_PREFIX_WORDS]:
            step = MASK if MASK in word else word
            if node is not None and step not in node.children and len(node.children) >= _MAX_CHILDREN:
                step = MASK
            path.append(step)
            node = node.children.get(step) if node is not None else None
        return tuple(path)

    def _make(self, words: list[str], path: tuple[int | str, ...]) -> Template:
        if len(self._by_use) >= self._max_templates:
            self._drop(next(iter(self._by_use.values())))
        node = self._root
        for step in path:
            node = node.children.setdefault(step, _Node())
        if len(node.templates) >= _MAX_CHILDREN:
            self._drop(node.templates[0])
        self._n_made += 1
        text = " ".join(words)
        n_before = self._dropped.pop(_hash(text), 0) or self._recall(text)
        template = Template(self._n_made, words, path, n_before + 1)
        node.templates.append(template)
        self._by_use[template.id] = template
        return template

    def _drop(self, template: Template) -> None:
        """Forgets a template but for its count, and the nodes that led to it alone."""
        del self._by_use[template.id]
        self._dropped[_hash(template.text)] = template.n_lines
        if len(self._dropped) > _DROPPED_PER_KEPT * self._max_templates:
            self._dropped.popitem(last=False)
        nodes = [self._root]
        for step in template.path:
            nodes.append(nodes[-1].children[step])
        nodes[-1].templates.remove(template)
        for parent, step, node in reversed(list(zip(nodes, template.path, nodes[1:], strict=False))):
            if node.children or node.templates:
                break
            del parent.children[step]

    def most_frequent(self, n: int) -> list[Template]:
        """The templates with the most lines, most first."""
        return heapq.nlargest(n, self._by_use.values(), key=lambda template: (template.n_lines, -template.id))

    def state(self) -> dict[str, Any]:
        """Everything that is known, as plain data, for ``restore``."""
        return {
            "n_made": self._n_made,
            "templates": [[t.id, t.words, list(t.path), t.n_lines, t.meaning] for t in self._by_use.values()],
            "dropped": list(self._dropped.items()),
        }

    def restore(self, state: dict[str, Any]) -> dict[int, Template]:
        """Goes on from what ``state`` returned; the miner must be new. Returns the templates by id."""
        for template_id, words, path, n_lines, meaning in state["templates"]:
            template = Template(template_id, words, tuple(path), n_lines, meaning)
            node = self._root
            for step in template.path:
                node = node.children.setdefault(step, _Node())
            node.templates.append(template)
            self._by_use[template.id] = template
        self._n_made = state["n_made"]
        self._dropped.update(state["dropped"])
        return dict(self._by_use)

    @property
    def n_nodes(self) -> int:
        """Nodes of the tree, the root left out."""
        n, waiting = 0, [self._root]
        while waiting:
            children = waiting.pop().children.values()
            n += len(children)
            waiting.extend(children)
        return n


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _most_similar(templates: list[Template], words: list[str]) -> Template | None:
    """The template that shares most words with a line of as many words, if it shares enough."""
    best, best_equal = None, _SIMILAR * len(words)
    for template in templates:
        equal = sum(map(str.__eq__, template.words, words))
        if equal >= best_equal and (best is None or equal > best_equal):
            best, best_equal = template, equal
    return best
