"""Condition: what a running broker says of itself to `penstock doctor`, beside what the engine knows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from penstock.engines.embedded import EmbeddedEngine
from penstock.server.metrics_counters import Counters
from penstock.server.metrics_engine import quotas
from penstock.server.troubles import troubles_of

LATELY_S = 60.0
"""A refusal this long ago counts as going on: clients try again within a minute."""
MAX_ROWS = 100


def condition(
    engine: EmbeddedEngine, counters: Counters, obstacles: Sequence[str]
) -> dict[str, Any]:
    """What keeps clients from publishing, what is wrong, and the limits that refuse now or are used up."""
    since_s = time.monotonic() - LATELY_S
    refusing = [
        {"kind": kind, "limit": limit, "tenant": tenant, "refused": counters.refusals[key]}
        for key, at_s in counters.refused_s.items()
        if at_s >= since_s
        for kind, limit, tenant in (key,)
    ]
    full = [
        {"limit": each.quota, "tenant": each.tenant}
        for each in quotas(engine)
        if each.ratio >= 1 and each.quota == "storage_bytes"
    ]
    return {
        "obstacles": list(obstacles),
        "troubles": troubles_of(engine),
        "refusing": refusing[:MAX_ROWS],
        "used_up": full[:MAX_ROWS],
    }
