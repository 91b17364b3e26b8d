"""Windows: what the consumers of one tenant may hold together, and each of them alone (row T11).

A window is looked at when leases are made. A group that finds none open is told when something of
the tenant was settled, in whichever group that was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.core.lease import Member
from penstock.core.quota import AdmissionLimits

if TYPE_CHECKING:
    from penstock.core.delivery import QueueGroup

MAX_HELD_EVENTS = 1_000_000
"""Of one consumer that no limit holds back: its leases must still fit the memory."""


class Window:
    """How many events the consumers of one tenant hold together, and how many they may."""

    __slots__ = ("_hungry", "_wake", "held", "limit", "members")

    def __init__(self, limit: int, wake: Callable[[QueueGroup], None]) -> None:
        self.limit = limit
        self.held = self.members = 0
        self._hungry: dict[QueueGroup, None] = {}
        self._wake = wake

    def room(self, group: QueueGroup) -> int:
        """How many more may be given out; a group that finds none is woken when there is some."""
        free = self.limit - self.held
        if free > 0:
            return free
        self._hungry[group] = None
        return 0

    def returned(self, count: int) -> None:
        """Events are held no more."""
        self.held -= count
        if self._hungry and self.held < self.limit:
            hungry, self._hungry = self._hungry, {}
            for group in hungry:  # who waits longest comes first
                self._wake(group)


class Windows:
    """Gives every consumer its credit, by the limits in force.

    >>> from penstock.core.quota import TenantLimits
    >>> limits = AdmissionLimits(tenants={"acme": TenantLimits(max_inflight=5)})
    >>> windows, worker, guest = Windows(limits, print), Member("w", 0), Member("g", 0)
    >>> windows.joined(worker, "acme", 2000); windows.joined(guest, "globex", 2000)
    >>> worker.max_inflight, worker.window.limit, guest.max_inflight, guest.window
    (2000, 5, 1024, None)
    """

    def __init__(self, limits: AdmissionLimits, wake: Callable[[QueueGroup], None]) -> None:
        self.limits = limits
        self.by_tenant: dict[str, Window] = {}
        """Of tenants that have consumers and a `max_inflight`."""
        self._wake = wake
        self._wishes: dict[Member, tuple[str, int]] = {}

    def joined(self, member: Member, tenant: str, wish: int) -> None:
        """A consumer of a tenant would hold up to `wish` events."""
        self._wishes[member] = tenant, wish
        own = self.limits.tenants.get(tenant, self.limits.default).max_inflight
        general = self.limits.max_inflight_per_consumer
        most = MAX_HELD_EVENTS if own is not None or general is None else general
        member.max_inflight = min(wish, most)
        if own is None:
            return
        window = self.by_tenant.get(tenant)
        if window is None:
            window = self.by_tenant[tenant] = Window(own, self._wake)
        window.members += 1
        window.held += member.inflight
        member.window = window

    def left(self, member: Member) -> None:
        """A consumer is gone, and whatever it held with it."""
        tenant, _ = self._wishes.pop(member, ("", 0))
        window, member.window = member.window, None
        if window is None:
            return
        window.members -= 1
        window.returned(member.inflight)
        if not window.members:
            del self.by_tenant[tenant]

    def reload(self, limits: AdmissionLimits) -> None:
        """Put new limits in force for the consumers that are there; what they hold stays counted."""
        self.limits = limits
        self.by_tenant = {}
        wishes, self._wishes = self._wishes, {}
        for member, (tenant, wish) in wishes.items():
            member.window = None
            self.joined(member, tenant, wish)
