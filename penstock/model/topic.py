"""Names of streams and how to select them: the grammar of topics and patterns.

A topic is words joined by dots, `orders.created.v1.acme`. A pattern is a topic in which `*` stands
for exactly one word and `#` for zero or more. docs/reference/topics.md holds the same rules in
prose, and the tests execute its tables.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from penstock.model.errors import InvalidPattern, InvalidTopic

MAX_TOPIC_BYTES = 255  # fits one length byte on a wire, one file name, one AMQP routing key
MAX_WORD_BYTES = 64  # room for a UUID or a SHA-256 in hex, and four such words fit a topic
MAX_WORDS = 16  # deeper trees are data in the name; also bounds the work of a look-up
MAX_HASHES = 3  # each `#` can swallow any stretch; three cover "somewhere between" twice
KNOWN_NAMES = 16_384  # checked names remembered: about 4 MB at worst, more than a busy bus rotates
SHOWN_CHARACTERS = 80  # of a wrong name in its error, so that a hostile one cannot flood a log

ONE_WORD = "*"
ANY_WORDS = "#"

TENANT_NAME = rf"^[A-Za-z0-9_-]{{1,{MAX_WORD_BYTES}}}\Z"
"""What a tenant can be called: one word of a topic."""
TENANT_RULE = f"it is one topic word of 1 to {MAX_WORD_BYTES} letters, digits, '_' and '-'"

_INBOX = re.compile(r"_inbox\.[0-9a-f]{32}")
_FOREIGN_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")
_VERSION = re.compile(r"v[0-9]+")

# Ranks of what can stand at one position of a pattern, most specific first. The end of a pattern
# stands before `#` because `a` is narrower than `a.#`, and after words because `a.#.b` is narrower
# than `a.#`.
_LITERAL, _ONE, _END, _ANY = range(4)
_RANKS = {ONE_WORD: _ONE, ANY_WORDS: _ANY}


class _Fault(NamedTuple):
    rule: str
    position: int
    problem: str
    remedy: str


def check_topic(topic: str, *, system: bool = False) -> str:
    """Let a topic pass, or raise InvalidTopic naming the rule, the position and the remedy.

    System topics (first word starts with `_`) pass only with `system=True`, which is for the bus
    itself. Cheap when repeated.

    >>> check_topic("orders.created.v1.acme")
    'orders.created.v1.acme'
    >>> check_topic("orders..v1")
    Traceback (most recent call last):
    ...
    penstock.model.errors.InvalidTopic: topic 'orders..v1' breaks rule word-empty at character 7: \
a word is empty; nothing was stored. Write 1 to 64 characters between two dots. [invalid.topic]
    """
    try:
        return _known_topic(topic) if system else _known_user_topic(topic)
    except TypeError:  # unhashable, so it never reached the check
        raise _topic_error(topic, _not_text(topic)) from None


def check_pattern(pattern: str) -> str:
    """Let a pattern pass, or raise InvalidPattern naming the rule, the position and the remedy.

    >>> check_pattern("orders.*.v1.#")
    'orders.*.v1.#'
    >>> check_pattern("orders.cre*")
    Traceback (most recent call last):
    ...
    penstock.model.errors.InvalidPattern: pattern 'orders.cre*' breaks rule wildcard at character \
10: '*' shares a word with other characters; nothing was stored. Let '*' and '#' be whole words, \
as in 'orders.*.v1'. [invalid.pattern]
    """
    try:
        return _known_pattern(pattern)
    except TypeError:
        raise _pattern_error(pattern, _not_text(pattern)) from None


def is_system(topic: str) -> bool:
    """Say whether only the bus itself may publish to this topic.

    >>> is_system("_audit.events"), is_system("orders._internal")
    (True, False)
    """
    return topic.startswith("_")


def is_inbox(topic: str) -> bool:
    """Say whether a topic is where a requester waits for its replies.

    >>> is_inbox("_inbox." + 32 * "0"), is_inbox("_inbox.mine"), is_inbox("_dlq.acme")
    (True, False, False)
    """
    return _INBOX.fullmatch(topic) is not None


def is_wildcard(pattern: str) -> bool:
    """Say whether a pattern can match more than the one topic it spells.

    >>> is_wildcard("orders.*"), is_wildcard("orders.created")
    (True, False)
    """
    return ONE_WORD in pattern or ANY_WORDS in pattern


def matches(pattern: str, topic: str) -> bool:
    """Say whether a checked pattern selects a checked topic: the meaning of patterns, in full.

    For one pattern against one topic. Many patterns at once are `penstock.core.routing`'s work.

    >>> matches("orders.#", "orders"), matches("orders.#.v1", "orders.a.b.v1")
    (True, True)
    >>> matches("#", "_audit.events"), matches("_audit.#", "_audit.events")
    (False, True)
    """
    selectors, words = pattern.split("."), topic.split(".")
    if is_system(topic) and selectors[0] in _RANKS:
        return False
    end = len(words)
    reached = {0}  # how many words the selectors so far can have consumed
    for selector in selectors:
        if selector == ANY_WORDS:
            reached = set(range(min(reached), end + 1))
        else:
            reached = {at + 1 for at in reached if at < end and selector in (words[at], ONE_WORD)}
        if not reached:
            return False
    return end in reached


def precedence(pattern: str) -> tuple[tuple[int, ...], str]:
    """Sort key that puts the more specific of two patterns first.

    Word by word from the left: a literal, then `*`, then the end of the pattern, then `#`. Patterns
    of the same shape go by their text.

    >>> sorted(["a.#", "#", "a.*", "a.b", "a.#.b", "a"], key=precedence)
    ['a.b', 'a.*', 'a', 'a.#.b', 'a.#', '#']
    """
    return (*[_RANKS.get(word, _LITERAL) for word in pattern.split(".")], _END), pattern


@lru_cache(maxsize=KNOWN_NAMES)
def tenant_of(topic: str) -> str | None:
    """Read the tenant from a topic that follows {domain}.{entity}.{version}.{tenant}, else None.

    >>> tenant_of("orders.created.v1.acme")
    'acme'
    >>> tenant_of("orders.created.acme"), tenant_of("orders.created.beta.acme")
    (None, None)
    """
    words = topic.split(".")
    return words[3] if len(words) == 4 and _VERSION.fullmatch(words[2]) else None


@lru_cache(maxsize=KNOWN_NAMES)
def _known_topic(topic: str) -> str:
    fault = _first_fault(topic, wildcards=False)
    if fault is not None:
        raise _topic_error(topic, fault)
    return topic


@lru_cache(maxsize=KNOWN_NAMES)
def _known_user_topic(topic: str) -> str:
    if is_system(_known_topic(topic)):
        raise _topic_error(topic, _SYSTEM)
    return topic


@lru_cache(maxsize=KNOWN_NAMES)
def _known_pattern(pattern: str) -> str:
    fault = _first_fault(pattern, wildcards=True)
    if fault is not None:
        raise _pattern_error(pattern, fault)
    return pattern


def _first_fault(name: object, *, wildcards: bool) -> _Fault | None:
    if not isinstance(name, str):
        return _not_text(name)
    if not name:
        return _EMPTY
    if len(name) > MAX_TOPIC_BYTES:
        return _too_long(len(name))
    position = 0
    before, hashes = "", 0
    for number, word in enumerate(name.split(".")):
        if number == MAX_WORDS:
            return _too_deep(position)
        if wildcards and word in _RANKS:
            hashes += word == ANY_WORDS
            fault = _hash_fault(before, word, hashes, position)
        else:
            fault = _word_fault(word, position, wildcards=wildcards)
        if fault is not None:
            return fault
        before = word
        position += len(word) + 1
    return None


def _word_fault(word: str, position: int, *, wildcards: bool) -> _Fault | None:
    if not word:
        return _Fault(
            "word-empty",
            position,
            "a word is empty",
            f"Write 1 to {MAX_WORD_BYTES} characters between two dots.",
        )
    foreign = _FOREIGN_CHARACTER.search(word)
    if foreign is not None:
        return _character_fault(foreign[0], position + foreign.start(), wildcards=wildcards)
    if len(word) > MAX_WORD_BYTES:
        return _Fault(
            "word-length",
            position + MAX_WORD_BYTES,
            f"a word has {len(word)} characters",
            f"Keep words to {MAX_WORD_BYTES} characters and put the rest into the key or a header.",
        )
    return None


def _character_fault(character: str, position: int, *, wildcards: bool) -> _Fault:
    if character not in _RANKS:
        problem = f"{character!r} is no topic character"
        return _Fault("character", position, problem, "Use A-Z, a-z, 0-9, '_' and '-' in words.")
    if wildcards:
        problem = f"{character!r} shares a word with other characters"
        remedy = "Let '*' and '#' be whole words, as in 'orders.*.v1'."
    else:
        problem = f"{character!r} is a wildcard"
        remedy = "Name one topic in full; wildcards belong to subscriptions and routes."
    return _Fault("wildcard", position, problem, remedy)


def _hash_fault(before: str, word: str, hashes: int, position: int) -> _Fault | None:
    if word == before == ANY_WORDS:
        remedy = "Write one '#'; it already stands for any number of words."
        return _Fault("hash-adjacent", position, "two '#' stand side by side", remedy)
    if hashes > MAX_HASHES:
        remedy = f"Use at most {MAX_HASHES}, or several narrower patterns."
        return _Fault("hash-count", position, f"'#' stands here for the {hashes}th time", remedy)
    return None


def _too_long(length: int) -> _Fault:
    remedy = f"Keep the whole name to {MAX_TOPIC_BYTES} bytes."
    return _Fault("length", MAX_TOPIC_BYTES, f"it has {length} characters", remedy)


def _too_deep(position: int) -> _Fault:
    remedy = f"Keep to {MAX_WORDS} words and put the rest into the key or a header."
    return _Fault("depth", position, f"word {MAX_WORDS + 1} begins", remedy)


def _not_text(name: object) -> _Fault:
    return _Fault("type", 0, f"it is a {type(name).__name__}", "Pass a str.")


_EMPTY = _Fault("empty", 0, "it is empty", "Write at least one word, as in 'orders'.")
_SYSTEM = _Fault(
    "system",
    0,
    "a first word that starts with '_' is kept for the bus itself",
    "Start the topic with a letter, a digit or '-'.",
)


def _topic_error(topic: object, fault: _Fault) -> InvalidTopic:
    shown = _shown(topic)
    text = _explain("topic", shown, fault)
    return InvalidTopic(text, topic=shown, rule=fault.rule, position=fault.position)


def _pattern_error(pattern: object, fault: _Fault) -> InvalidPattern:
    shown = _shown(pattern)
    text = _explain("pattern", shown, fault)
    return InvalidPattern(text, pattern=shown, rule=fault.rule, position=fault.position)


def _shown(name: object) -> str:
    if not isinstance(name, str):
        return f"<{type(name).__name__}>"
    return name if len(name) <= SHOWN_CHARACTERS else name[:SHOWN_CHARACTERS] + "…"


def _explain(kind: str, shown: str, fault: _Fault) -> str:
    return (
        f"{kind} {shown!r} breaks rule {fault.rule} at character {fault.position}: "
        f"{fault.problem}; nothing was stored. {fault.remedy}"
    )


def pattern_regex(pattern: str) -> str:
    r"""A topic pattern as a regular expression over topics with a dot put before them.

    >>> import re
    >>> [bool(re.search(pattern_regex("a.#.c"), topic)) for topic in (".a.c", ".a.b.b.c", ".a.b")]
    [True, True, False]
    """
    parts = {ONE_WORD: r"\.[^.]+", ANY_WORDS: r"(\.[^.]+)*"}
    return "^" + "".join(parts.get(word, rf"\.{word}") for word in pattern.split(".")) + "$"
