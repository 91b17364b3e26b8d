"""How fast one topic finds its patterns among a thousand and among a million.

The samples keep their character at every size. They follow {domain}.{entity}.{version}.{tenant}: a
vocabulary of 5 domains, 8 entities and 2 versions, and twenty patterns for each tenant. More
patterns mean more tenants, so the share of wildcards and the matches a look-up finds stay the same.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.routing import RouteTree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LARGE = 1_000_000  # patterns
SMALL = 1_000  # patterns
LOOKUPS = 100_000  # topics, each looked up once, so that none finds its patterns in a cache
ROUNDS = 20  # the look-ups are timed in this many parts, the two sizes in turn; medians
MISSES = 0.2  # share of topics drawn from the words alone, most of which match nothing
SEED = 7
PROBE_TIMEOUT_S = 120  # the probe takes a quarter of this on two cores

PATTERNS_PER_TENANT = 20
DOMAINS = tuple(f"domain{number}" for number in range(5))
ENTITIES = tuple(f"entity{number}" for number in range(8))
VERSIONS = ("v1", "v2")

# Twenty kinds, each a twentieth of the patterns: fourteen exact, six (30 %) with wildcards.
# D, E, V and T stand for a word of each pool.
KINDS = (
    *["D.E.V.T"] * 11,
    *["D.E.V.T.detail"] * 3,
    "D.*.V.T",
    "D.E.*.T",
    "*.E.V.T",
    "D.#.T",
    "D.E.#.T",
    "D.E.V.T.#",
)


def sample_patterns(count: int, seed: int = SEED) -> Iterator[str]:
    """Draw distinct patterns, 30 % of them with wildcards, that share prefixes.

    >>> list(sample_patterns(3, seed=1)) == list(sample_patterns(3, seed=1))
    True
    """
    draw = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        pattern = _spell(KINDS[len(seen) % len(KINDS)], count, draw)
        if pattern not in seen:
            seen.add(pattern)
            yield pattern


def sample_topics(patterns: list[str], count: int, seed: int = SEED) -> list[str]:
    """Draw topics to look up: most match a random one of the patterns, some are random words."""
    draw = random.Random(seed)
    topics = []
    for _ in range(count):
        kind = "D.E.V.T"
        if draw.random() >= MISSES:
            kind = draw.choice(patterns).replace("*", "E").replace("#", "E.V")
        topics.append(_spell(kind, len(patterns), draw))
    return topics


def measure() -> dict[str, float]:
    """Time random look-ups at both sizes and count memory, in a fresh process of its own.

    `bytes_per_pattern` is the growth of that process's resident memory while it reads a million
    patterns from a pipe into the tree, their text and values included.
    """
    package_root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.bench.route"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": package_root},
    ) as child:
        assert child.stdin is not None
        child.stdin.writelines(f"{pattern}\n" for pattern in sample_patterns(LARGE))
        answer, _ = child.communicate(timeout=PROBE_TIMEOUT_S)
    result: dict[str, float] = json.loads(answer)
    return result


def probe(lines: Iterable[str]) -> dict[str, float]:
    """Do the measuring of `measure` on the patterns given, one a line."""
    gc.disable()  # passes over the growing heap would be timed, and free nothing
    before = _resident_bytes()
    started = time.perf_counter()
    large = _tree(line.rstrip("\n") for line in lines)
    build_s = time.perf_counter() - started
    grown = _resident_bytes() - before

    small = _tree(sample_patterns(SMALL))
    topics = sample_topics(list(large.patterns()), LOOKUPS)
    topics_1k = sample_topics(list(small.patterns()), LOOKUPS)
    gc.enable()
    times, times_1k = [], []
    matches = matches_1k = 0
    size = LOOKUPS // ROUNDS
    for start in range(0, LOOKUPS, size):
        spent, found = _look_up(large, topics[start : start + size])
        times.append(spent)
        matches += found
        spent, found = _look_up(small, topics_1k[start : start + size])
        times_1k.append(spent)
        matches_1k += found
    per_s = size / statistics.median(times)
    per_s_1k = size / statistics.median(times_1k)
    return {
        "per_s": round(per_s),
        "per_s_1k": round(per_s_1k),
        "slowdown": round(per_s_1k / per_s, 2),
        "bytes_per_pattern": round(grown / len(large)),
        "matches_per_lookup": round(matches / LOOKUPS, 2),
        "matches_per_lookup_1k": round(matches_1k / LOOKUPS, 2),
        "adds_per_s": round(len(large) / build_s),
    }


def _spell(kind: str, count: int, draw: random.Random) -> str:
    tenants = max(4, count // PATTERNS_PER_TENANT)
    pools = {"D": DOMAINS, "E": ENTITIES, "V": VERSIONS}
    words = kind.split(".")
    for place, word in enumerate(words):
        if word == "T":
            words[place] = f"tenant{int(draw.random() * tenants)}"
        elif word in pools:
            pool = pools[word]
            words[place] = pool[int(draw.random() * len(pool))]
    return ".".join(words)


def _tree(patterns: Iterable[str]) -> RouteTree[int]:
    tree = RouteTree[int]()
    for number, pattern in enumerate(patterns):
        tree.add(pattern, number)
    return tree


def _look_up(tree: RouteTree[int], topics: list[str]) -> tuple[float, int]:
    """Seconds of processor time, which other processes on the machine do not stretch."""
    match = tree.match
    found = 0
    started = time.process_time()
    for topic in topics:
        found += len(match(topic))
    return time.process_time() - started, found


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(probe(sys.stdin)))
