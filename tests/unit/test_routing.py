"""The route tree (T2): equal to brute force, ordered, compressed, bounded in work and memory."""

from __future__ import annotations

import doctest
import itertools
import tracemalloc
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.bench import route as route_bench
from penstock.bench.route import sample_patterns, sample_topics
from penstock.core import routing
from penstock.core.routing import SPARE_REMOVALS, RouteTree
from penstock.model.errors import InvalidPattern
from penstock.model.topic import MAX_HASHES, is_wildcard, matches, precedence

if TYPE_CHECKING:
    import random

few_words = st.sampled_from(["a", "b", "c", "_a"])
topics = st.lists(few_words, min_size=1, max_size=7).map(".".join)
patterns = (
    st.lists(few_words | st.sampled_from("*#"), min_size=1, max_size=7)
    .map(".".join)
    .filter(lambda text: "#.#" not in text and text.count("#") <= MAX_HASHES)
)
values = st.integers(0, 3)


def brute_force(pairs: dict[tuple[str, int], None], topic: str) -> list[int]:
    """Values of matching patterns, best pattern first, then in the order of adding, each once."""
    selected = [pair for pair in pairs if matches(pair[0], topic)]
    selected.sort(key=lambda pair: precedence(pair[0]))
    return list(dict.fromkeys(value for _, value in selected))


def tree_of(*texts: str) -> RouteTree[str]:
    tree = RouteTree[str]()
    for text in texts:
        assert tree.add(text, text)
    return tree


def nodes(tree: RouteTree[str]) -> list[routing._Node[str]]:
    found = [tree._root]
    for node in found:
        found += node.below()
    return found


class TreeAgainstBruteForce(RuleBasedStateMachine):
    """Adds, removes and look-ups in any order agree with `matches` over a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RouteTree[int]()
        self.pairs: dict[tuple[str, int], None] = {}

    @rule(pattern=patterns, value=values)
    def add(self, pattern: str, value: int) -> None:
        assert self.tree.add(pattern, value) is ((pattern, value) not in self.pairs)
        self.pairs.setdefault((pattern, value))

    @rule(pattern=patterns, value=values)
    def remove(self, pattern: str, value: int) -> None:
        assert self.tree.remove(pattern, value) is ((pattern, value) in self.pairs)
        self.pairs.pop((pattern, value), None)

    @rule(choice=st.randoms(use_true_random=False))
    def remove_present(self, choice: random.Random) -> None:
        if self.pairs:
            pair = choice.choice(list(self.pairs))
            assert self.tree.remove(*pair)
            del self.pairs[pair]

    @rule(topic=topics)
    def look_up(self, topic: str) -> None:
        assert self.tree.match(topic) == brute_force(self.pairs, topic)

    @invariant()
    def counts_and_patterns_agree(self) -> None:
        assert len(self.tree) == len(self.pairs)
        assert Counter(self.tree.patterns()) == Counter({pattern for pattern, _ in self.pairs})

    @invariant()
    def chains_are_compressed(self) -> None:
        for node in nodes(self.tree)[1:]:  # type: ignore[arg-type]
            assert node.pattern or node.children or node.one or node.any
        for node in nodes(self.tree)[1:]:  # type: ignore[arg-type]
            for child in (node.children or {}).values():
                single = child.pattern is None and child.one is None and child.any is None
                assert not (single and len(child.children or {}) == 1)


TestTreeAgainstBruteForce = TreeAgainstBruteForce.TestCase
TestTreeAgainstBruteForce.settings = settings(max_examples=60, stateful_step_count=40)


@settings(max_examples=300)
@given(st.lists(st.tuples(patterns, values), max_size=40), st.lists(topics, min_size=1))
def test_match_equals_brute_force(pairs: list[tuple[str, int]], looked_up: list[str]) -> None:
    """T2: exact, `*`, `#` and the precedence rules, over random patterns and topics."""
    tree = RouteTree[int]()
    for pattern, value in pairs:
        tree.add(pattern, value)
    kept = dict.fromkeys(pairs)
    for topic in looked_up:
        assert tree.match(topic) == brute_force(kept, topic)


def test_bench_sample_equals_brute_force() -> None:
    sample = list(sample_patterns(400))
    tree = tree_of(*sample)
    hits = 0
    for topic in sample_topics(sample, 300):
        expected = sorted((text for text in sample if matches(text, topic)), key=precedence)
        assert tree.match(topic) == expected
        hits += bool(expected)
    assert hits > 200


def test_order_is_precedence_and_a_value_takes_its_best_place() -> None:
    tree = RouteTree[str]()
    for pattern, value in [("#", "x"), ("a.*", "y"), ("a.b", "z"), ("a.b", "w"), ("a.#.b", "z")]:
        tree.add(pattern, value)
    assert tree.match("a.b") == ["z", "w", "y", "x"]
    tree.remove("a.b", "z")
    assert tree.match("a.b") == ["w", "y", "z", "x"]


def test_leading_wildcards_do_not_reach_system_topics() -> None:
    tree = tree_of("#", "*.events", "_audit.#", "#.events")
    assert tree.match("_audit.events") == ["_audit.#"]
    assert tree.match("audit.events") == ["*.events", "#.events", "#"]


def test_a_chain_is_one_node_and_splits_and_joins_again() -> None:
    tree = tree_of("a.b.c.d")
    assert len(nodes(tree)) == 2
    tree.add("a.b.x", "other")
    assert len(nodes(tree)) == 4
    assert tree.match("a.b.c.d") == ["a.b.c.d"]
    tree.remove("a.b.x", "other")
    assert len(nodes(tree)) == 2
    assert tree.match("a.b.c.d") == ["a.b.c.d"]
    assert tree.match("a.b") == tree.match("a.b.c") == tree.match("a.b.c.d.e") == []


@pytest.mark.parametrize("count", [1, 2, 3, 5_000])
def test_many_values_of_one_pattern_keep_their_order(count: int) -> None:
    tree = RouteTree[int]()
    assert all(tree.add("a.*", value) for value in range(count))
    assert not tree.add("a.*", count - 1)
    assert tree.match("a.b") == list(range(count))
    for value in range(0, count, 2):
        assert tree.remove("a.*", value)
    assert tree.match("a.b") == list(range(1, count, 2))
    for value in range(1, count, 2):
        assert tree.remove("a.*", value)
    assert len(tree) == 0
    assert len(nodes(tree)) == 1  # type: ignore[arg-type]


def test_bad_patterns_are_refused_and_leave_the_tree_alone() -> None:
    tree = tree_of("a.b")
    for pattern in ("", "a..b", "a.#.#", "a.b*", "a b"):
        with pytest.raises(InvalidPattern):
            tree.add(pattern, "x")
        assert not tree.remove(pattern, "x")
    assert list(tree.patterns()) == ["a.b"]


class CountedDict(dict[str, object]):
    """A children table that counts how often it is asked."""

    asked = 0

    def get(self, key: str, default: object = None) -> object:
        CountedDict.asked += 1
        return super().get(key, default)


def test_work_behind_hashes_is_bounded() -> None:
    """Patterns made to align in many ways cost at most nodes times words, not their product."""
    words = ["a", "*"]
    tree = RouteTree[str]()
    for parts in itertools.product(words, repeat=6):
        first, second = ".".join(parts[:3]), ".".join(parts[3:])
        text = f"#.{first}.#.{second}.#.b"
        tree.add(text, text)
    topic = ".".join("a" * 16)
    total = len(nodes(tree))
    for node in nodes(tree):
        if node.children is not None:
            node.children = CountedDict(node.children)  # type: ignore[assignment]
    CountedDict.asked = 0
    assert tree.match(topic) == []
    assert 0 < CountedDict.asked <= total * 17
    tree.add("#.a.#.a.#.a", "hit")
    assert tree.match(topic) == ["hit"]


def test_words_of_removed_patterns_are_forgotten() -> None:
    tree = tree_of("kept.#")
    for number in range(SPARE_REMOVALS * 5):
        tree.add(f"gone{number}.x", "gone")
        tree.remove(f"gone{number}.x", "gone")
    assert len(tree._words) <= 2 * (SPARE_REMOVALS + 4)
    assert tree.match("kept.x") == ["kept.#"]


def test_memory_stays_below_a_kilobyte_a_pattern() -> None:
    """T2 at 20 k patterns, pattern text included; `penstock bench run route` does 1 M."""
    count = 20_000
    tracemalloc.start()
    try:
        tree = RouteTree[int]()
        before = tracemalloc.get_traced_memory()[0]
        for number, pattern in enumerate(sample_patterns(count)):
            tree.add(pattern, number)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(tree) == count
    assert 100 * count < used < 1024 * count


def test_the_bench_sample_is_what_the_requirement_says() -> None:
    """30 % wildcards, shared prefixes, distinct, repeatable, alike in matches at each size."""
    found = {}
    for count in (1_000, 20_000):
        sample = list(sample_patterns(count))
        assert len(set(sample)) == count
        assert sample == list(sample_patterns(count))
        assert sum(map(is_wildcard, sample)) == pytest.approx(0.3 * count)
        prefixes = {text.rsplit(".", 1)[0] for text in sample}
        assert len(prefixes) < count / 2
        tree = tree_of(*sample)
        looked_up = sample_topics(sample, 5_000)
        found[count] = sum(len(tree.match(topic)) for topic in looked_up) / len(looked_up)
    assert found[20_000] == pytest.approx(found[1_000], rel=0.1)


def test_the_probe_reports_what_the_harness_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_bench, "LOOKUPS", 400)
    result = route_bench.probe(f"{text}\n" for text in sample_patterns(3_000))
    assert {"per_s", "per_s_1k", "slowdown", "bytes_per_pattern"} <= result.keys()
    assert result["per_s"] > 0
    assert result["matches_per_lookup"] > 0.5


def test_examples_in_docstrings_run() -> None:
    for module in (routing, route_bench):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0
