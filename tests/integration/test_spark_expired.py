"""What a Spark task reads when retention was there first, from files and through a broker (S1)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.model.errors import OffsetExpired
from penstock.pipelines.plan import Split
from penstock.pipelines.rows import Reading
from penstock.pipelines.stores import close_stores
from penstock.testing.broker_process import BrokerProcess

SMALL = {"journal__file_bytes": 1 << 20, "sealing__process": False, "sealing__grace_s": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A topic that lost its first events."""
    path = tmp_path_factory.mktemp("expired") / "data"
    dice = random.Random(1)
    with penstock.connect_sync(path, retention__max_bytes=1 << 20, **SMALL) as bus:
        for _ in range(5):
            bus.publish_many("a", [dice.randbytes(1_000) for _ in range(1_000)])
        bus._thread.wait(bus._target.engine.maintenance.settle())
    return path


@pytest.fixture(params=["folder", "broker"])
def url(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(folder)
    else:
        with BrokerProcess(folder) as running:
            yield running.url()
            close_stores()
    close_stores()


def offsets(url: str, split: Split, *, skip: bool) -> list[int]:
    reading = Reading(url, None, ("offset",), (), None, skip)
    found = reading.stored(split, ["offset"])
    return [offset for rows in found for offset in rows.column(0).to_pylist()]


def test_expired_offsets_fail_or_are_skipped(url: str, folder: Path) -> None:
    with penstock.connect_sync(url if "://" in url else f"{url}?mode=ro") as bus:
        first = bus.topics.info("a").partitions[0].first_offset
    assert first > 20
    half = Split("a", 0, first - 10, first + 5)
    with pytest.raises(OffsetExpired, match="is gone: retention kept"):
        offsets(url, half, skip=False)
    assert offsets(url, half, skip=True) == list(range(first, first + 5))
    assert offsets(url, Split("a", 0, 5, 9), skip=True) == []


def test_what_went_between_planning_and_reading_is_told_in_a_line_that_the_driver_finds(
    url: str, folder: Path, capfd
) -> None:
    with penstock.connect_sync(url if "://" in url else f"{url}?mode=ro") as bus:
        first = bus.topics.info("a").partitions[0].first_offset
    reading = Reading(url, None, ("offset",), (), None, skip_expired=True)
    half = Split("a", 0, first - 10, first + 5)
    for began, told in ((first, 0), (first - 4, 4), (0, 10)):
        capfd.readouterr()
        rows = list(reading.rows([half], None, {("a", 0): began}))
        assert sum(each.num_rows for each in rows) == 5
        wanted = (
            f"penstock warning: retention took {told} events before they were read: "
            f"a/0/{first - told}..{first} is skipped, as onExpired=skip asks for\n"
        )
        assert capfd.readouterr().err == (wanted if told else ""), "the planner told of the rest"
