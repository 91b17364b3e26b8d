"""Sizes and durations as people write them: "64 MiB", "30d".

The unit of a setting is the end of its name, so `file_bytes` understands "256MiB" and `lease_s`
understands "5m", and both are printed back that way.
"""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any

BYTES = {
    **{"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50},
}
SPANS_MS = {
    "us": Decimal("0.001"),
    "ms": Decimal(1),
    "s": Decimal(1_000),
    "m": Decimal(60_000),
    "min": Decimal(60_000),
    "h": Decimal(3_600_000),
    "d": Decimal(86_400_000),
    "w": Decimal(604_800_000),
}
_MICROSECOND = timedelta(microseconds=1)
SHOWN_SPANS = ("ms", "s", "min", "h", "d")

# 18 digits hold every size and time there is and keep the arithmetic small.
_PART = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*")


def unit_of(name: str) -> str:
    """The unit a field name ends in: "bytes", "s", "ms", or "" for a plain number.

    >>> unit_of("file_bytes"), unit_of("lease_s"), unit_of("bytes_per_s"), unit_of("events_per_s")
    ('bytes', 's', 'bytes', '')
    """
    if name.endswith("_per_s"):
        return "bytes" if name.startswith("bytes") else ""
    last = name.rpartition("_")[2]
    return last if last in ("bytes", "s", "ms") else ""


def parse(text: str | timedelta, unit: str) -> int | float:
    """The number of `unit` that a text or a timedelta means; a text without a unit is in `unit` already.

    >>> parse("64MiB", "bytes"), parse("1.5 GB", "bytes"), parse("1h30m", "s"), parse("1.5s", "ms")
    (67108864, 1500000000, 5400, 1500)
    >>> parse(timedelta(milliseconds=1500), "s"), parse(timedelta(seconds=2), "ms")
    (1.5, 2000)
    """
    if isinstance(text, timedelta):
        if unit not in SPANS_MS:
            raise ValueError("is a duration")
        value = Decimal(text // _MICROSECOND) * SPANS_MS["us"] / SPANS_MS[unit]
        return int(value) if value == int(value) else float(value)
    written = text.strip()
    parts = [(Decimal(number), suffix) for number, suffix in _PART.findall(written)]
    if not parts or _PART.sub("", written):
        raise ValueError("is not a number with a unit")
    if len(parts) > 1 and (unit == "bytes" or not all(suffix for _, suffix in parts)):
        raise ValueError("is not a number with a unit")
    value = sum((number * _factor(suffix, unit) for number, suffix in parts), Decimal(0))
    return int(value) if value == int(value) else float(value)


def _factor(suffix: str, unit: str) -> Decimal:
    if unit == "bytes":
        factors = {name.lower(): Decimal(factor) for name, factor in BYTES.items()}
        found, known = factors.get(suffix.lower()), "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
    else:
        base = SPANS_MS[unit]
        found = SPANS_MS[suffix] / base if suffix in SPANS_MS else None
        found, known = (Decimal(1) if not suffix else found), ", ".join(SPANS_MS)
    if found is None:
        raise ValueError(f"has an unknown unit {suffix!r}; known: {known}")
    return found


def show(value: Any, unit: str) -> str:
    """A value the way a person would write it.

    >>> show(67108864, "bytes"), show(2592000, "s"), show(1500, "ms"), show(None, "s"), show(5, "")
    ('64 MiB', '30 d', '1500 ms', 'none', '5')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(show(item, unit) for item in value)
    if unit == "" or isinstance(value, str) or value == 0:
        return f"{value:.15g}" if isinstance(value, float) else str(value)
    if unit == "bytes":
        steps = {name: Decimal(factor) for name, factor in BYTES.items() if name.endswith("iB")}
        steps["B"] = Decimal(1)
    else:
        steps = {name: SPANS_MS[name] / SPANS_MS[unit] for name in SHOWN_SPANS}
    exact = Decimal(str(value))
    fitting = {name: step for name, step in steps.items() if exact % step == 0}
    if not fitting:
        return f"{value:g} {unit}"
    name = max(fitting, key=lambda name: fitting[name])
    return f"{int(exact / fitting[name])} {name}"
