"""Assignment: which member of a consumer group reads which partition, and how that changes.

`assign` is the plan. `Rebalance` carries it out without two members ever holding one partition: a
partition that moves is first taken back from its holder, and given on only when the holder has
confirmed or its time has run out. Each change of members starts a new generation. A holder shows
the generation when it commits, and one that has lost the partition since is fenced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar, get_args

import msgspec

from penstock.model.errors import Deferred, Fenced, InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

Strategy: TypeAlias = Literal["range", "modulo", "sticky"]

MAX_MEMBERS = 4_096
"""Members of one group; each change of members looks at all of them."""

LEASE_S = 30.0
"""How long a silent member keeps its partitions: longer than a usual pause of a Python process."""

P = TypeVar("P", bound="Hashable")


def assign(
    partitions: Sequence[P],
    members: Sequence[str],
    strategy: Strategy = "sticky",
    previous: Mapping[str, Sequence[P]] | None = None,
) -> dict[str, list[P]]:
    """Give every partition to exactly one member, with shares that differ by at most one.

    `range` gives neighbours to one member, `modulo` deals them out in turn, and `sticky` leaves as
    many as it can where `previous` has them. The order of `members` does not matter.

    >>> assign([0, 1, 2, 3, 4], ["a", "b"], "range")
    {'a': [0, 1, 2], 'b': [3, 4]}
    >>> assign([0, 1, 2, 3, 4], ["a", "b"], "modulo")
    {'a': [0, 2, 4], 'b': [1, 3]}
    >>> assign([0, 1, 2, 3], ["a", "b"], "sticky", {"a": [1, 2, 3]})
    {'a': [1, 2], 'b': [0, 3]}
    """
    names = sorted(members)
    if len(set(names)) != len(names) or len(set(partitions)) != len(partitions):
        raise InvalidSettings(
            "a member or a partition is listed twice; nothing was assigned; list each once",
            members=list(members),
            partitions=list(partitions),
        )
    if strategy not in get_args(Strategy):
        raise InvalidSettings(
            f"no assignment strategy {strategy!r}; nothing was assigned; "
            f"use one of {', '.join(get_args(Strategy))}",
            strategy=strategy,
        )
    if not names:
        return {}
    if strategy == "modulo":
        return {name: list(partitions[at :: len(names)]) for at, name in enumerate(names)}
    if strategy == "range":
        return _by_range(partitions, names)
    return _sticky(partitions, names, previous or {})


def _by_range(partitions: Sequence[P], names: list[str]) -> dict[str, list[P]]:
    share, extra = divmod(len(partitions), len(names))
    plan: dict[str, list[P]] = {}
    start = 0
    for at, name in enumerate(names):
        end = start + share + (at < extra)
        plan[name] = list(partitions[start:end])
        start = end
    return plan


def _sticky(
    partitions: Sequence[P], names: list[str], previous: Mapping[str, Sequence[P]]
) -> dict[str, list[P]]:
    rank = {partition: at for at, partition in enumerate(partitions)}
    held: dict[str, list[P]] = {}
    free = dict.fromkeys(partitions)
    for name in names:
        kept = [partition for partition in previous.get(name, ()) if partition in free]
        held[name] = sorted(dict.fromkeys(kept), key=rank.__getitem__)
        for partition in held[name]:
            del free[partition]
    share, extra = divmod(len(partitions), len(names))
    # The larger shares go to those who hold the most: every other choice moves more.
    fullest = set(sorted(names, key=lambda name: -len(held[name]))[:extra])
    quota = {name: share + (name in fullest) for name in names}
    for name in names:
        free.update(dict.fromkeys(held[name][quota[name] :]))
        del held[name][quota[name] :]
    loose = iter(sorted(free, key=rank.__getitem__))
    for name in names:
        held[name].extend(next(loose) for _ in range(quota[name] - len(held[name])))
        held[name].sort(key=rank.__getitem__)
    return held


class Changes(msgspec.Struct, Generic[P], frozen=True):
    """What the members must be told after an input: give these back, take these over."""

    generation: int
    revoke: dict[str, list[P]]
    grant: dict[str, list[P]]
    expelled: list[str]
    """Members that are out because their lease ran out; they must join again."""


class _Holding(msgspec.Struct):
    """Who holds a partition, since which generation, and until when it may take to let go."""

    holder: str | None = None
    since: int = 0
    revoke_by_s: float | None = None


class Rebalance(Generic[P]):
    """The group's coordinator: members come, go and fall silent; partitions move safely.

    >>> group: Rebalance[int] = Rebalance([0, 1])
    >>> group.join("a", now_s=0.0).grant
    {'a': [0, 1]}
    >>> changes = group.join("b", now_s=1.0)
    >>> changes.revoke, changes.grant
    ({'a': [1]}, {})
    >>> group.revoked("a", [1], now_s=1.1).grant
    {'b': [1]}
    """

    def __init__(
        self,
        partitions: Sequence[P],
        strategy: Strategy = "sticky",
        lease_s: float = LEASE_S,
        generation: int = 0,
    ) -> None:
        """Start without members; after a restart pass the last generation, which never goes back."""
        assign(partitions, [], strategy)
        self.generation = generation
        self.strategy: Strategy = strategy
        self.lease_s = lease_s
        self._lease_until_s: dict[str, float] = {}
        self._holdings: dict[P, _Holding] = {partition: _Holding() for partition in partitions}
        self._target: dict[P, str] = {}

    @property
    def members(self) -> list[str]:
        """The members at present, ordered by name."""
        return sorted(self._lease_until_s)

    def held(self) -> dict[str, list[P]]:
        """What each member holds now, those it was asked to give back included."""
        result: dict[str, list[P]] = {name: [] for name in self.members}
        for partition, holding in self._holdings.items():
            if holding.holder is not None:
                result[holding.holder].append(partition)
        return result

    def join(self, member: str, now_s: float) -> Changes[P]:
        """A member arrives. One that joins under a name in use replaces it and fences it off."""
        if member not in self._lease_until_s and len(self._lease_until_s) >= MAX_MEMBERS:
            raise Deferred(
                f"the group has {MAX_MEMBERS} members; {member!r} was not added; "
                "join when another has left",
                limit="max_members",
                retry_after_s=self.lease_s,
            )
        self._release(member)
        self._lease_until_s[member] = now_s + self.lease_s
        return self._replan(now_s)

    def leave(self, member: str, now_s: float) -> Changes[P]:
        """A member says goodbye and has stopped reading; its partitions are free at once."""
        self._known(member)
        return self._drop([member], now_s, expelled=[])

    def expired(self, member: str, now_s: float) -> Changes[P]:
        """A member is known to be gone, so its partitions need no confirmation."""
        self._known(member)
        return self._drop([member], now_s, expelled=[member])

    def heartbeat(self, member: str, now_s: float) -> int:
        """A member is alive: renew its lease and tell it the generation."""
        self._known(member)
        self._lease_until_s[member] = max(self._lease_until_s[member], now_s + self.lease_s)
        return self.generation

    def revoked(self, member: str, partitions: Iterable[P], now_s: float) -> Changes[P]:
        """A member confirms that it stopped reading these and committed what it had done."""
        self._known(member)
        for partition in partitions:
            holding = self._holdings.get(partition)
            if holding and holding.holder == member and holding.revoke_by_s is not None:
                holding.holder = holding.revoke_by_s = None
        return self._changes({}, [])

    def repartition(self, partitions: Sequence[P], now_s: float) -> Changes[P]:
        """The topic grew, or the group reads other topics now."""
        assign(partitions, [], self.strategy)
        kept = set(partitions)
        revoke: dict[str, list[P]] = {}
        for partition, holding in self._holdings.items():
            if partition not in kept and holding.holder is not None:
                revoke.setdefault(holding.holder, []).append(partition)
        self._holdings = {
            partition: self._holdings.get(partition) or _Holding() for partition in partitions
        }
        changes = self._replan(now_s)
        for member, more in changes.revoke.items():
            revoke.setdefault(member, []).extend(more)
        return msgspec.structs.replace(changes, revoke=revoke)

    def tick(self, now_s: float) -> Changes[P]:
        """Let time pass: silent members are out, and partitions not given back in time are taken."""
        for holding in self._holdings.values():
            if holding.revoke_by_s is not None and holding.revoke_by_s <= now_s:
                holding.holder = holding.revoke_by_s = None
        silent = [name for name, until_s in self._lease_until_s.items() if until_s <= now_s]
        if silent:
            return self._drop(silent, now_s, expelled=sorted(silent))
        return self._changes({}, [])

    def next_due_s(self) -> float | None:
        """When `tick` has something to do at the latest, or None."""
        times = [holding.revoke_by_s for holding in self._holdings.values()]
        times.extend(self._lease_until_s.values())
        return min((time for time in times if time is not None), default=None)

    def check(self, member: str, partition: P, generation: int) -> None:
        """Raise Fenced unless `member` holds the partition under this generation: ask at a commit.

        A holder may go on committing with the generation it was granted the partition in, or a
        later one, until it has given the partition back; so nothing it did is delivered again.
        """
        holding = self._holdings.get(partition)
        if holding and holding.holder == member and holding.since <= generation <= self.generation:
            return
        raise Fenced(
            f"{member!r} no longer holds partition {partition!r} under generation {generation}; "
            "nothing was committed; stop reading it and wait for the next assignment",
            member=member,
            partition=partition,
            generation=generation,
            current_generation=self.generation,
        )

    def _known(self, member: str) -> None:
        if member not in self._lease_until_s:
            raise Fenced(
                f"{member!r} is no member of the group any more; nothing was changed; join again",
                member=member,
                current_generation=self.generation,
            )

    def _release(self, member: str) -> None:
        for holding in self._holdings.values():
            if holding.holder == member:
                holding.holder = holding.revoke_by_s = None

    def _drop(self, gone: list[str], now_s: float, expelled: list[str]) -> Changes[P]:
        for member in gone:
            self._release(member)
            del self._lease_until_s[member]
        return msgspec.structs.replace(self._replan(now_s), expelled=expelled)

    def _replan(self, now_s: float) -> Changes[P]:
        """Start a generation: make a new plan, and ask for the partitions that the wrong member holds."""
        self.generation += 1
        plan = assign(list(self._holdings), self.members, self.strategy, self.held())
        self._target = {partition: name for name, mine in plan.items() for partition in mine}
        revoke: dict[str, list[P]] = {}
        for partition, holding in self._holdings.items():
            holder = holding.holder
            if holder is None or holder == self._target.get(partition):
                continue
            if holding.revoke_by_s is None:
                holding.revoke_by_s = now_s + self.lease_s
                revoke.setdefault(holder, []).append(partition)
        return self._changes(revoke, [])

    def _changes(self, revoke: dict[str, list[P]], expelled: list[str]) -> Changes[P]:
        """Grant each partition that no member holds to the member it is planned for."""
        grant: dict[str, list[P]] = {}
        for partition, holding in self._holdings.items():
            target = self._target.get(partition)
            if holding.holder is None and target is not None:
                holding.holder, holding.since = target, self.generation
                grant.setdefault(target, []).append(partition)
        return Changes(self.generation, revoke, grant, expelled)
