"""The plan of one seed: topics, groups, settings and how nasty the world is, all drawn from the seed.

Everything is small, so that rolling, sealing, merging, expiring and recovering happen all the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from penstock.core.retry import Retry
from penstock.model.settings import (
    KIB,
    MIB,
    Dedup,
    Delivery,
    Journal,
    Limits,
    Retention,
    Sealing,
    Settings,
)

OPERATIONS = 10_000  # what one seed does at least, so that rare meetings of faults happen
CRASHES = 20  # deaths of the process or the machine in one seed, at least

KEYS = tuple(f"k{number}".encode() for number in range(6))
COLOURS = ("red", "blue")


@dataclass(frozen=True)
class Group:
    """A consumer group of the workload."""

    name: str
    pattern: str
    mode: str = "queue"
    order: str = "any"
    members: int = 2
    lease_s: float = 1.0
    retry: Retry = field(default_factory=Retry)
    filter: tuple[str, str] | None = None


@dataclass(frozen=True)
class Plan:
    """What one seed is about.

    >>> Plan.draw(7) == Plan.draw(7), Plan.draw(7).settings == Plan.draw(8).settings
    (True, False)
    """

    seed: int
    settings: Settings
    topics: dict[str, int]
    """Partitions by topic."""
    groups: tuple[Group, ...]
    retention_s: float | None
    operations: int = OPERATIONS
    crashes: int = CRASHES

    @classmethod
    def draw(cls, seed: int) -> Plan:
        """The plan of a seed."""
        rng = Random(seed * 7919 + 17)
        retention_s = rng.choice((None, None, None, 30.0))
        topics = {
            "orders.made.v1.acme": 1,
            "orders.paid.v1.bolt": rng.choice((1, 2, 3)),
            "jobs.run.v1.acme": 1,
            "notes.kept.v1.cove": rng.choice((1, 2)),
            "scratch.pad": 1,
        }
        retry = Retry(ladder_ms=(50, 200), max_attempts=rng.choice((2, 3, 5)))
        lease_s = rng.choice((0.5, 1.0, 2.0))
        groups = (
            Group("billing", "orders.#", retry=retry, lease_s=lease_s, members=3),
            Group("ledger", "orders.paid.*.*", order="key", retry=retry, lease_s=lease_s),
            Group("runner", "jobs.#", order="single", retry=retry, lease_s=lease_s),
            Group("worker", "jobs.#", retry=retry, lease_s=lease_s),
            Group("reds", "orders.made.#", filter=("colour", "red"), retry=retry, lease_s=lease_s),
            Group("archive", "notes.#", mode="log"),
            Group("mirror", "orders.#", mode="log", members=1),
        )
        return cls(seed, _settings(rng, retention_s), topics, groups, retention_s)


def _settings(rng: Random, retention_s: float | None) -> Settings:
    return Settings(
        journal=Journal(
            file_bytes=MIB,
            roll_after_s=rng.choice((0.5, 2.0, 20.0)),
            commit_max_bytes=rng.choice((16 * KIB, 256 * KIB)),
            tenant_quantum_bytes=rng.choice((4 * KIB, 16 * KIB)),
            pending_max_bytes=rng.choice((64 * KIB, MIB)),
            side_file_bytes=4 * KIB,
            reserve_bytes=rng.choice((0, 4 * KIB, 64 * KIB)),
        ),
        sealing=Sealing(
            process=False,
            min_segment_bytes=rng.choice((4 * KIB, 64 * KIB, 256 * KIB)),
            target_segment_bytes=rng.choice((256 * KIB, MIB)),
            shared_files_max=rng.choice((2, 5)),
            backlog_max_bytes=8 * MIB,
            grace_s=1.0,
            row_group_events=rng.choice((256, 4_096, 65_536)),
        ),
        retention=Retention(age_s=retention_s),
        delivery=Delivery(),
        limits=Limits(cache_bytes=rng.choice((256 * KIB, MIB, 4 * MIB))),
        dedup=Dedup(window_s=7 * 86_400.0),
    )


def shrunk(plan: Plan, operations: int, crashes: int) -> Plan:
    """The same plan, only shorter: for quick tests."""
    return replace(plan, operations=operations, crashes=crashes)
