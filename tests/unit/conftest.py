"""What unit tests share: how a process ends, and an Iceberg warehouse."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.pipelines.lakehouse.warehouse import Warehouse


def ended(pid: int, within_s: float = 10.0) -> bool:
    """Whether a process ends in time; one that nobody has waited for yet has ended too."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def gone() -> Callable[..., bool]:
    """Waits for a process to end."""
    return ended


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Warehouse]:
    """An empty warehouse of Iceberg tables in a folder."""
    with Warehouse(tmp_path / "lake") as made:
        yield made
