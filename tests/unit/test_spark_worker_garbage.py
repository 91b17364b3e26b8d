"""A Spark worker freezes its modules once, so collections do not scan them after every task (row S1)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("pyspark")

FREEZING = """
import gc
from penstock.pipelines.session import freeze_modules
freeze_modules()
first = gc.get_freeze_count()
more = [[] for _ in range(1_000)]
freeze_modules()
print(first > 1_000, gc.get_freeze_count() <= first)
"""


def test_what_is_alive_is_frozen_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREEZING], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True"]


def test_a_task_freezes_modules_when_it_has_read_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.pipelines import source

    frozen: list[bool] = []

    class Three:
        def rows(self, parts: Any, late_before_us: Any, began: Any) -> Iterator[int]:
            return iter((1, 2, 3))

    monkeypatch.setattr(source, "freeze_modules", lambda: frozen.append(True))
    reader = source._Reader.__new__(source._Reader)
    monkeypatch.setattr(reader, "reading", Three(), raising=False)
    pieces = reader.read(source.Task([], None, {}))
    assert [next(pieces) for _ in range(3)] == [1, 2, 3]
    assert not frozen
    assert list(pieces) == []
    assert frozen == [True]
