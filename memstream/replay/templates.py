"""Finds the templates behind log lines as they stream by: Drain's tree of fixed depth, bounded in every direction.

Source: He et al., "Drain: An Online Log Parsing Approach with Fixed Depth Tree", ICWS 2017. Deviations: bounds on
templates, tree nodes and words of a line; the template not seen for longest leaves when there are too many.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from memstream.replay.normalise import MASK, mask

MAX_WORDS = 128  # words of a line that are compared; the rest of a longer one is ignored
_PREFIX_WORDS = 2  # levels of the tree below the word count
_MAX_CHILDREN = 100  # words told apart at one node (further ones share a child), and templates compared at a leaf
_SIMILAR = 0.5  # least share of equal words


@dataclass(slots=True, eq=False, weakref_slot=True)
class Template:
    """What a kind of line has in common.

    Attributes:
        id: from 1, never reused.
        words: its words, with ``<*>`` where lines differ.
        path: the way to it through the tree.
        n_lines: how many lines were of it.
    """

    id: int
    words: list[str]
    path: tuple[int | str, ...]
    n_lines: int = 1

    @property
    def text(self) -> str:
        """The template, for people."""
        return " ".join(self.words)


@dataclass(slots=True)
class _Node:
    children: dict[int | str, _Node] = field(default_factory=dict)
    templates: list[Template] = field(default_factory=list)  # the one not seen for longest first


class TemplateMiner:
    """Assigns every message to a template, making a new one where none is alike.

    Args:
        max_templates: most templates kept; tree nodes are bounded by 3 times as many.
    """

    def __init__(self, max_templates: int) -> None:
        self._max_templates = max_templates
        self._root = _Node()
        self._by_use: OrderedDict[int, Template] = OrderedDict()  # least recently seen first
        self._n_made = 0

    def __len__(self) -> int:
        return len(self._by_use)

    def add(self, message: str) -> tuple[Template, bool]:
        """Returns the template of a message, and whether it is new."""
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
                template.words = [a if a == b else MASK for a, b in zip(template.words, words, strict=True)]
                self._by_use.move_to_end(template.id)
                node.templates.remove(template)
                node.templates.append(template)
                template.n_lines += 1
                return template, False
        return self._make(words, path), True

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
        template = Template(self._n_made, words, path)
        node.templates.append(template)
        self._by_use[template.id] = template
        return template

    def _drop(self, template: Template) -> None:
        """Forgets a template, and the nodes that led to it alone."""
        del self._by_use[template.id]
        nodes = [self._root]
        for step in template.path:
            nodes.append(nodes[-1].children[step])
        nodes[-1].templates.remove(template)
        for parent, step, node in reversed(list(zip(nodes, template.path, nodes[1:], strict=False))):
            if node.children or node.templates:
                break
            del parent.children[step]

    @property
    def n_nodes(self) -> int:
        """Nodes of the tree, the root left out."""
        n, waiting = 0, [self._root]
        while waiting:
            children = waiting.pop().children.values()
            n += len(children)
            waiting.extend(children)
        return n


def _most_similar(templates: list[Template], words: list[str]) -> Template | None:
    """The template that shares most words with a line of as many words, if it shares enough."""
    best, best_equal = None, _SIMILAR * len(words)
    for template in templates:
        equal = sum(map(str.__eq__, template.words, words))
        if equal >= best_equal and (best is None or equal > best_equal):
            best, best_equal = template, equal
    return best
