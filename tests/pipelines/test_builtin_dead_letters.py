"""Dead-letter triage: one cause, one group, however its numbers differ (S5, T8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.model.errors import InvalidSettings
from penstock.pipelines.testkit import run_on_rows

FAILURES = [
    "ValueError: order 17 of 2026-03-01T10:00:00Z has no price",
    "ValueError: order 93211 of 2026-03-02 11:30 has no price",
    "ValueError: order 5 of 2026-03-02T11:30:00.5+01:00 has no price",
    "KeyError: session 6f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0",
    "KeyError: session 00000000-4b5a-6978-8796-a5b4c3d2e1f0",
    "the card was reported stolen",
]


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A folder with a dead letter for each failure, in one group."""
    root = tmp_path / "bus"
    async with penstock.connect(root) as bus:
        await bus.publish_many("orders.created.v1.acme", list(range(len(FAILURES))))
        await bus.publish("orders.created.v1.globex", 0)
        async with bus.subscribe("orders.#", group="billing") as orders:
            for _ in range(len(FAILURES) + 1):
                event = await anext(orders)
                await event.reject(FAILURES[event.value()])
        await bus.flush()
    return root


def test_letters_are_grouped_by_what_they_have_in_common(spark: Any, folder: Path) -> None:
    """S5: numbers, times and ids do not make a cause of their own; the largest group is first."""
    rows = run_on_rows("dead-letters", spark, params={"samples": 2}, url=str(folder))
    groups = [(row["topic"].rpartition(".")[2], row["error"], row["letters"]) for row in rows]
    assert groups == [
        ("acme", "ValueError: order <n> of <time> has no price", 3),
        ("acme", "KeyError: session <uuid>", 2),
        ("acme", "the card was reported stolen", 1),
        ("globex", "ValueError: order <n> of <time> has no price", 1),
    ]
    first = rows[0]
    assert (first["consumer"], len(first["samples"]), first["tenants"]) == ("billing", 2, 1)
    assert first["first_seen"] <= first["last_seen"] == first["samples"][0]["at"]
    assert {sample["reason"] for sample in first["samples"]} <= set(FAILURES)


def test_a_selection_can_be_named_and_may_be_empty(spark: Any, folder: Path) -> None:
    rows = run_on_rows("dead-letters", spark, params={"tenant": "globex"}, url=str(folder))
    assert [row["letters"] for row in rows] == [1]
    assert run_on_rows("dead-letters", spark, params={"consumer": "none"}, url=str(folder)) == []
    with pytest.raises(InvalidSettings, match="samples"):
        run_on_rows("dead-letters", spark, params={"samples": -1}, url=str(folder))
