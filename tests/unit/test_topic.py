"""Topic and pattern grammar (T2, X7); the tables of docs/reference/topics.md are executed here."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import topic as topic_module
from penstock.model.errors import InvalidPattern, InvalidTopic
from penstock.model.topic import (
    MAX_HASHES,
    MAX_TOPIC_BYTES,
    MAX_WORD_BYTES,
    MAX_WORDS,
    check_pattern,
    check_topic,
    is_system,
    is_wildcard,
    matches,
    precedence,
    tenant_of,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "topics.md"
CODE = re.compile(r"`([^`]*)`")

words = st.text("abAZ09_-", min_size=1, max_size=4)
topics = st.lists(words, min_size=1, max_size=MAX_WORDS).map(".".join)
few_words = st.sampled_from(["a", "b", "_a"])
short_topics = st.lists(few_words, min_size=1, max_size=6).map(".".join)
loose_patterns = st.lists(few_words | st.sampled_from("*#"), min_size=1, max_size=6).map(".".join)


def is_pattern(text: str) -> bool:
    return "#.#" not in text and text.count("#") <= MAX_HASHES


patterns = loose_patterns.filter(is_pattern)


def table(heading: str) -> list[list[str]]:
    """The rows of the table under a heading of the page, without its two header lines."""
    section = re.split(rf"^#+ {re.escape(heading)}$", PAGE.read_text(), flags=re.MULTILINE)[1]
    section = re.split(r"^#", section, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert rows, heading
    return rows


def unquoted(cell: str) -> str:
    return cell.removeprefix("`").removesuffix("`")


@pytest.mark.parametrize(("topic", "rule", "position"), table("Topics refused"))
def test_refused_topics_name_rule_and_position(topic: str, rule: str, position: str) -> None:
    with pytest.raises(InvalidTopic) as caught:
        check_topic(unquoted(topic))
    assert (caught.value.rule, caught.value.position) == (rule, int(position))
    assert "nothing was stored" in caught.value.message


@pytest.mark.parametrize(("pattern", "rule", "position"), table("Patterns refused"))
def test_refused_patterns_name_rule_and_position(pattern: str, rule: str, position: str) -> None:
    with pytest.raises(InvalidPattern) as caught:
        check_pattern(unquoted(pattern))
    assert (caught.value.rule, caught.value.position) == (rule, int(position))


@pytest.mark.parametrize(("pattern", "topic", "selected"), table("What a pattern selects"))
def test_selection_table(pattern: str, topic: str, selected: str) -> None:
    pattern, topic = check_pattern(unquoted(pattern)), check_topic(unquoted(topic), system=True)
    assert matches(pattern, topic) is (selected == "yes")


@pytest.mark.parametrize(("topic", "ordered"), table("Precedence"))
def test_precedence_table(topic: str, ordered: str) -> None:
    """T2: the written precedence rules are what the code sorts by."""
    expected = CODE.findall(ordered)
    assert len(expected) > 1
    assert all(matches(check_pattern(pattern), unquoted(topic)) for pattern in expected)
    assert sorted(set(expected), key=precedence) == expected


@pytest.mark.parametrize(("topic", "tenant"), table("The tenant in a topic"))
def test_tenant_table(topic: str, tenant: str) -> None:
    """X7: the tenant comes from topics of the convention and from no others."""
    assert tenant_of(unquoted(topic)) == (None if tenant == "none" else tenant)


@pytest.mark.parametrize(
    ("name", "rule", "position"),
    [
        ("a." + "x" * (MAX_WORD_BYTES + 1), "word-length", 2 + MAX_WORD_BYTES),
        (".".join(["x" * 50] * 6), "length", MAX_TOPIC_BYTES),
        ("x" * 10_000_000, "length", MAX_TOPIC_BYTES),
        ("a\x00b", "character", 1),
        ("a\n", "character", 1),
        ("a.\ud800", "character", 2),
    ],
)
def test_limits_hold_for_topics_and_patterns(name: str, rule: str, position: int) -> None:
    for check, error in ((check_topic, InvalidTopic), (check_pattern, InvalidPattern)):
        with pytest.raises(error) as caught:
            check(name)
        assert (caught.value.rule, caught.value.position) == (rule, position)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", [None, 7, b"orders", ["orders"], {"orders": 1}, ("orders",)])
def test_what_is_not_text_is_refused_with_the_same_error(name: object) -> None:
    with pytest.raises(InvalidTopic) as caught:
        check_topic(name)  # type: ignore[arg-type]
    assert caught.value.rule == "type"
    with pytest.raises(InvalidPattern) as caught_pattern:
        check_pattern(name)  # type: ignore[arg-type]
    assert caught_pattern.value.rule == "type"


def test_names_at_the_limits_pass() -> None:
    longest = ".".join(["x" * 63] * 3 + ["x" * 63])
    assert len(longest) == MAX_TOPIC_BYTES
    for name in (longest, "x" * MAX_WORD_BYTES, ".".join("a" * MAX_WORDS), "-", "a._b.-"):
        assert check_topic(name) == name
        assert check_pattern(name) == name
    assert check_pattern("#.a.#.b.#") == "#.a.#.b.#"


def test_system_topics_pass_only_for_the_bus_even_once_known() -> None:
    assert check_topic("_audit.known", system=True) == "_audit.known"
    with pytest.raises(InvalidTopic) as caught:
        check_topic("_audit.known")
    assert caught.value.rule == "system"
    assert is_system("_audit.known")
    assert not is_system("audit._known")


def test_a_system_topic_still_keeps_to_the_grammar() -> None:
    with pytest.raises(InvalidTopic) as caught:
        check_topic("_audit..known", system=True)
    assert caught.value.rule == "word-empty"


@given(st.text(".a*#_ é", max_size=12))
def test_topic_grammar_equals_a_regular_expression(text: str) -> None:
    allowed = re.fullmatch(r"[a_]+(\.[a_]+){0,15}", text) is not None
    if allowed:
        assert check_topic(text, system=True) == text
    else:
        with pytest.raises(InvalidTopic) as caught:
            check_topic(text, system=True)
        assert 0 <= caught.value.position <= len(text)


@given(loose_patterns)
def test_pattern_grammar_limits_hashes(text: str) -> None:
    if is_pattern(text):
        assert check_pattern(text) == text
    else:
        with pytest.raises(InvalidPattern):
            check_pattern(text)


@given(topics)
def test_a_topic_is_a_pattern_that_selects_itself_alone(topic: str) -> None:
    assert matches(check_pattern(topic), topic)
    assert not matches(topic, topic + ".x")
    assert not is_wildcard(topic)


def as_regular_expression(pattern: str) -> str:
    """A second opinion on patterns: `#` as any run of words, each word with its dot in front."""
    translated = {"*": r"\.[^.]+", "#": r"(?:\.[^.]+)*"}
    return "".join(translated.get(word, re.escape("." + word)) for word in pattern.split("."))


@given(patterns, short_topics)
def test_selection_equals_a_regular_expression(pattern: str, topic: str) -> None:
    hidden = topic.startswith("_") and pattern[0] in "*#"
    expected = not hidden and re.fullmatch(as_regular_expression(pattern), "." + topic) is not None
    assert matches(pattern, topic) is expected


@given(patterns, patterns)
def test_precedence_tells_any_two_patterns_apart(left: str, right: str) -> None:
    assert (precedence(left) == precedence(right)) is (left == right)


@given(patterns.filter(is_wildcard), short_topics)
def test_the_topic_itself_precedes_every_wildcard_that_selects_it(pattern: str, topic: str) -> None:
    if matches(pattern, topic):
        assert precedence(topic) < precedence(pattern)


def test_examples_in_docstrings_run() -> None:
    result = doctest.testmod(topic_module)
    assert result.attempted > 5
    assert result.failed == 0
