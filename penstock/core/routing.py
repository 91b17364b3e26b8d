"""Which of many patterns match a topic: an adaptive radix tree over topic words.

Words, not characters, are the steps. A chain of words without a fork is one node (path
compression); a leaf has no table of children, and a fork has a dict that grows with them (adaptive
size); words are shared between all paths. So a look-up touches few objects however many patterns
there are. docs/reference/routing.md has the picture, the order of matches and the costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.model.topic import ANY_WORDS, ONE_WORD, check_pattern, is_system, precedence

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

T = TypeVar("T")

SPARE_REMOVALS = 1024  # patterns removed before the shared words are forgotten, at the least


class _Node(Generic[T]):
    """A fork or an end of the tree. `path` holds the literal words between its own and its forks.

    The node's own word is its key in the parent, so that a node without a chain shares the empty
    tuple with all others. Nodes of `*` and `#` never have a path. A single value is kept in the
    node itself, because each object more is a cache miss more; several are the keys of a dict.
    """

    __slots__ = ("any", "children", "one", "path", "pattern", "value", "values")
    value: T  # set where there is a pattern and no `values`

    def __init__(self, path: tuple[str, ...] = ()) -> None:
        self.path = path
        self.pattern: str | None = None  # of the values that end here, if any do
        self.values: dict[T, None] | None = None
        self.children: dict[str, _Node[T]] | None = None
        self.one: _Node[T] | None = None
        self.any: _Node[T] | None = None

    def get(self, word: str) -> _Node[T] | None:
        if word == ONE_WORD:
            return self.one
        if word == ANY_WORDS:
            return self.any
        return None if self.children is None else self.children.get(word)

    def put(self, word: str, node: _Node[T]) -> None:
        if word == ONE_WORD:
            self.one = node
        elif word == ANY_WORDS:
            self.any = node
        elif self.children is None:
            self.children = {word: node}
        else:
            self.children[word] = node

    def drop(self, word: str) -> None:
        if word == ONE_WORD:
            self.one = None
        elif word == ANY_WORDS:
            self.any = None
        elif self.children is not None:
            del self.children[word]
            if not self.children:
                self.children = None

    def add_value(self, pattern: str, value: T) -> bool:
        if self.pattern is None:
            self.pattern, self.value = pattern, value
        elif value in self.all_values():
            return False
        elif self.values is None:
            self.values = {self.value: None, value: None}
            del self.value
        else:
            self.values[value] = None
        return True

    def remove_value(self, value: T) -> bool:
        if value not in self.all_values():
            return False
        if self.values is None:
            self.pattern = None
            del self.value
            return True
        del self.values[value]
        if len(self.values) == 1:
            (self.value,) = self.values
            self.values = None
        return True

    def all_values(self) -> Collection[T]:
        if self.values is not None:
            return self.values
        return () if self.pattern is None else (self.value,)

    def below(self) -> list[_Node[T]]:
        wild = [node for node in (self.one, self.any) if node is not None]
        return wild if self.children is None else [*self.children.values(), *wild]


class RouteTree(Generic[T]):
    """Find the values registered under every pattern that matches a topic.

    Values must be hashable. Topics are taken as checked (`penstock.model.topic.check_topic`).

    >>> tree = RouteTree[str]()
    >>> tree.add("orders.#", "archive")
    True
    >>> tree.add("orders.*.v1", "billing")
    True
    >>> tree.match("orders.created.v1")
    ['billing', 'archive']
    """

    def __init__(self) -> None:
        self._root: _Node[T] = _Node(())
        self._words: dict[str, str] = {}  # one str object per word, shared by all paths
        self._removals = 0
        self._pairs = 0

    def __len__(self) -> int:
        """Count the (pattern, value) pairs."""
        return self._pairs

    def add(self, pattern: str, value: T) -> bool:
        """Register a value under a pattern; False if the pair was there already.

        >>> tree = RouteTree[int]()
        >>> tree.add("a.*", 1), tree.add("a.*", 1), len(tree)
        (True, False, 1)
        """
        words = self._shared(check_pattern(pattern))
        node, at = self._root, 0
        while at < len(words):
            node, at = _grow(node, words, at)
        added = node.add_value(pattern, value)
        self._pairs += added
        return added

    def remove(self, pattern: str, value: T) -> bool:
        """Take a pair out; False if it was not there.

        >>> tree = RouteTree[int]()
        >>> _ = tree.add("a.*", 1)
        >>> tree.remove("a.*", 1), tree.remove("a.*", 1), tree.match("a.b")
        (True, False, [])
        """
        trail = self._trail(pattern)
        if not trail or not trail[-1][1].remove_value(value):
            return False
        self._pairs -= 1
        if trail[-1][1].pattern is None:
            _prune(trail)
            self._forget_words()
        return True

    def match(self, topic: str) -> list[T]:
        """List the values whose patterns match, each once, the most specific pattern first.

        Order is that of `penstock.model.topic.precedence`; values of one pattern come in the order
        they were added; a value under several matching patterns takes the place of its first.

        >>> tree = RouteTree[str]()
        >>> for pattern in ["#", "a.*", "a.b"]: _ = tree.add(pattern, pattern)
        >>> tree.match("a.b"), tree.match("_a.b")
        (['a.b', 'a.*', '#'], [])
        """
        words = tuple(topic.split("."))
        end = len(words)
        open_to_wildcards = not is_system(topic)
        found: list[T] = []
        later: list[tuple[_Node[T], int]] = []  # the position of a `#` node is stored inverted
        node, at = self._root, 0
        while True:
            while at < end:
                if at or open_to_wildcards:
                    if node.any is not None:
                        later.append((node.any, ~at))
                    if node.one is not None:
                        later.append((node.one, at + 1))
                children = node.children
                if children is None or (child := children.get(words[at])) is None:
                    break
                node = child
                at += 1
                if node.path:
                    stop = at + len(node.path)
                    if words[at:stop] != node.path:
                        break
                    at = stop
            else:
                found += node.all_values()
                if node.any is not None:
                    found += node.any.all_values()
            while later:
                node, at = later.pop()
                if at >= 0:
                    break
                found += _match_any(node, words, ~at)
            else:
                return found if len(found) < 2 else list(dict.fromkeys(found))

    def patterns(self) -> Iterator[str]:
        """Go through the distinct patterns, in no promised order, while the tree stays unchanged.

        >>> tree = RouteTree[int]()
        >>> _ = tree.add("a.*", 1), tree.add("a.*", 2)
        >>> list(tree.patterns())
        ['a.*']
        """
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            if node.pattern is not None:
                yield node.pattern
            waiting += node.below()

    def _shared(self, pattern: str) -> tuple[str, ...]:
        known = self._words
        return tuple([known.setdefault(word, word) for word in pattern.split(".")])

    def _forget_words(self) -> None:
        # Sharing only saves memory, so the table may be dropped at any time; dropping it once per
        # as many removals as there are pairs keeps words of patterns long gone from piling up.
        self._removals += 1
        if self._removals > self._pairs + SPARE_REMOVALS:
            self._words.clear()
            self._removals = 0

    def _trail(self, pattern: str) -> list[tuple[str, _Node[T]]]:
        """The nodes, each after its own word, down to the end of this pattern; empty if none."""
        words = tuple(pattern.split("."))
        trail = [("", self._root)]
        at = 0
        while at < len(words):
            node = trail[-1][1].get(words[at])
            if node is None or words[at + 1 : at + 1 + len(node.path)] != node.path:
                return []
            trail.append((words[at], node))
            at += 1 + len(node.path)
        return trail


def _grow(parent: _Node[T], words: tuple[str, ...], at: int) -> tuple[_Node[T], int]:
    """One step of adding: find, make or split the node that takes the words from `at`."""
    word = words[at]
    at += 1
    node = parent.get(word)
    if node is None:
        node = _Node(() if _is_wild(word) else _chain(words, at))
        parent.put(word, node)
        return node, at + len(node.path)
    path = node.path
    if not path:
        return node, at
    shared = 0
    for own, given in zip(path, words[at:], strict=False):
        if own != given:
            break
        shared += 1
    if shared < len(path):
        upper: _Node[T] = _Node(path[:shared])
        upper.put(path[shared], node)
        node.path = path[shared + 1 :]
        parent.put(word, upper)
        node = upper
    return node, at + shared


def _is_wild(word: str) -> bool:
    return word in (ONE_WORD, ANY_WORDS)


def _chain(words: tuple[str, ...], at: int) -> tuple[str, ...]:
    """The literal words from `at` up to the next wildcard."""
    stop = at
    while stop < len(words) and not _is_wild(words[stop]):
        stop += 1
    return words[at:stop]


def _prune(trail: list[tuple[str, _Node[T]]]) -> None:
    """Restore compression upwards: drop empty nodes, join a node with its only child."""
    while len(trail) > 1:
        word, node = trail.pop()
        parent = trail[-1][1]
        if not (node.pattern is None and node.one is None and node.any is None):
            return
        if node.children is None:
            parent.drop(word)
        elif len(node.children) == 1 and not _is_wild(word):
            ((next_word, child),) = node.children.items()
            child.path = (*node.path, next_word, *child.path)
            parent.put(word, child)
            return
        else:
            return


def _match_any(start: _Node[T], words: tuple[str, ...], start_at: int) -> Collection[T]:
    """Values of the patterns below a `#` node that match the words from `start_at`, in order."""
    if start.one is None and (
        start.children is None or start.children.keys().isdisjoint(words[start_at:])
    ):
        return start.all_values()
    matched = _search(start, words, start_at)
    if len(matched) > 1:
        matched.sort(key=lambda node: precedence(node.pattern or ""))
    return [value for node in matched for value in node.all_values()]


def _search(start: _Node[T], words: tuple[str, ...], start_at: int) -> list[_Node[T]]:
    """The nodes from a `#` node down whose patterns end with the topic, each once.

    Behind a `#` many alignments lead to the same node, so each pair of node and position is
    followed once: the work is bounded by the nodes below and the words, whatever the patterns.
    """
    end = len(words)
    matched: dict[_Node[T], None] = {}
    seen: set[tuple[_Node[T], int]] = set()
    waiting = [(start, start_at, end)]  # a node, reached at any position from one to another
    while waiting:
        node, first, last = waiting.pop()
        if last == end and node.pattern is not None:
            matched[node] = None
        if node.any is not None:
            waiting.append((node.any, first, end))
        for at in range(first, min(last + 1, end)):
            if (node, at) in seen:
                continue
            seen.add((node, at))
            if node.one is not None:
                waiting.append((node.one, at + 1, at + 1))
            if node.children is not None and (child := node.children.get(words[at])) is not None:
                stop = at + 1 + len(child.path)
                if words[at + 1 : stop] == child.path:
                    waiting.append((child, stop, stop))
    return list(matched)


Words = dict[str, Any]
"""What may follow a word: the next words, and under the empty one the topic that ends there."""


class TopicTree:
    """Find the topics that a pattern selects: the other way round than `RouteTree`.

    A look-up visits the topics that share the pattern's first words, and of those the ones that its
    wildcards open. Patterns are taken as checked.

    >>> tree = TopicTree()
    >>> for topic in ("orders.new", "orders.new.eu", "_dlq.acme"): tree.add(topic)
    >>> tree.select("orders.#"), tree.select("*.new"), tree.select("#.acme")
    (['orders.new', 'orders.new.eu'], ['orders.new'], [])
    """

    def __init__(self) -> None:
        self._root: Words = {}

    def add(self, topic: str) -> None:
        """A topic is there; nothing changes when it was."""
        node = self._root
        for word in topic.split("."):
            node = node.setdefault(word, {})
        node[""] = topic

    def remove(self, topic: str) -> None:
        """A topic is gone; nothing changes when it was not there."""
        trail = [("", self._root)]
        for word in topic.split("."):
            following = trail[-1][1].get(word)
            if following is None:
                return
            trail.append((word, following))
        trail[-1][1].pop("", None)
        while len(trail) > 1 and not trail[-1][1]:
            word, _ = trail.pop()
            del trail[-1][1][word]

    def select(self, pattern: str) -> list[str]:
        """The topics that a pattern selects, in no order to rely on but the same each time."""
        words = pattern.split(".")
        found: dict[str, None] = {}
        seen: set[tuple[int, int]] = set()  # two `#` lead to the same place in several ways
        waiting = [(self._root, 0)]
        while waiting:
            node, at = waiting.pop()
            if (id(node), at) in seen:
                continue
            seen.add((id(node), at))
            if at == len(words):
                if "" in node:
                    found[node[""]] = None
            elif words[at] not in (ONE_WORD, ANY_WORDS):
                if words[at] in node:
                    waiting.append((node[words[at]], at + 1))
            else:
                many = words[at] == ANY_WORDS
                below = [child for word, child in node.items() if self._open(node, word)]
                waiting += [(child, at + (not many)) for child in reversed(below)]
                if many:
                    waiting.append((node, at + 1))
        return list(found)

    def _open(self, node: Words, word: str) -> bool:
        """Whether a wildcard stands for this word: for no end, and for no topic of the bus itself."""
        return bool(word) and not (node is self._root and is_system(word))
