"""Slopes tell what grows too fast (issue 21, part 4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.bench import slopes
from penstock.bench.slopes import SLOPES, Slope


async def squared(place: Path, count: int) -> float:
    return float(count * count)


@pytest.mark.parametrize(
    ("flat", "costs", "holds"),
    [
        (False, [1.0, 2.0, 4.5], True),
        (False, [1.0, 4.0, 16.0], False),
        (True, [10.0, 10.0, 12.0], True),
        (True, [10.0, 20.0, 40.0], False),
    ],
)
def test_what_may_grow_how_far(flat: bool, costs: list[float], holds: bool) -> None:
    assert Slope(squared, "s", 1, flat=flat).holds(costs) == holds


async def test_a_quadratic_cost_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SLOPES, "squared", Slope(squared, "s", 10))
    found = await slopes.slopes(tmp_path, ["squared"])
    assert found["slopes"]["squared"]["costs"] == [100.0, 400.0, 1_600.0]
    assert not found["holds"]


@pytest.mark.parametrize("name", ["joining", "sharing"])
async def test_cases_measure_something(name: str, tmp_path: Path) -> None:
    assert await SLOPES[name].measure(tmp_path, 20) > 0
