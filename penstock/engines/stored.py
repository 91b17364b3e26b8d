"""Stored bytes: what each tenant keeps, as a function of what lies in the folder and nothing else.

A quota must not change because a broker was restarted, so what is counted while it runs is what
recovery finds: the batches of unsealed journal files, and the ranges of segments (row T11).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.log.measure import event_bytes

if TYPE_CHECKING:
    from penstock.core.admission import Admission
    from penstock.log.segment import SegmentInfo
    from penstock.model.batch import EventBatch


class StoredBytes:
    """Keeps the storage gauges of admission.

    >>> from penstock.core.admission import Admission
    >>> from penstock.core.quota import AdmissionLimits
    >>> admission = Admission(AdmissionLimits())
    >>> stored = StoredBytes(admission, {0: {"acme": 500}, 4096: {"acme": 100}}, [])
    >>> stored.rewritten([], [], sealed_to=4096)
    >>> admission.use()["acme"]
    (100, 0)
    """

    def __init__(
        self,
        admission: Admission,
        unsealed: dict[int, dict[str, int]],
        segments: Iterable[SegmentInfo],
    ) -> None:
        self._admission = admission
        self._unsealed = unsealed
        for tenants in unsealed.values():
            for tenant, size in tenants.items():
                admission.stored(tenant, size)
        self._count(segments, 1)

    def committed(self, batch: EventBatch, base: int) -> None:
        """A batch is in the journal file that begins at `base`."""
        size = event_bytes(batch)
        tenants = self._unsealed.get(base)
        if tenants is None:
            tenants = self._unsealed[base] = {}
        tenants[batch.tenant] = tenants.get(batch.tenant, 0) + size
        self._admission.stored(batch.tenant, size)

    def rewritten(
        self, added: Iterable[SegmentInfo], removed: Iterable[SegmentInfo], sealed_to: int | None
    ) -> None:
        """Segments came and went; with `sealed_to`, the journal before it is in those that came."""
        for base in [base for base in self._unsealed if base < (sealed_to or 0)]:
            for tenant, size in self._unsealed.pop(base).items():
                self._admission.stored(tenant, -size)
        self._count(removed, -1)
        self._count(added, 1)

    def _count(self, segments: Iterable[SegmentInfo], sign: int) -> None:
        """Where tenants share a range each is charged for all of it: quotas err on the safe side."""
        for info in segments:
            for each in info.ranges:
                for tenant in each.tenants:
                    self._admission.stored(tenant, sign * each.event_bytes)
