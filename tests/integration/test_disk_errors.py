"""Whatever the system says when the bus writes is told as what it is, with what to do (C10)."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import DiskFull, DiskRefused, StorageError, WriterFailed
from penstock.core.routes import Route
from tests.conftest import small_settings

TOLD = {
    errno.EROFS: "mount it for writing",
    errno.EIO: "the disk failed",
    errno.EACCES: "owner and permissions",
    errno.EPERM: "owner and permissions",
    errno.EMFILE: "too many files open",
    errno.ENFILE: "too many files open",
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some space",
}
each_error = pytest.mark.parametrize("number", TOLD, ids=errno.errorcode.get)


class System:
    """Calls of the system that fail for paths with a word in them, until told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self._monkeypatch = monkeypatch

    def fail(self, call: str, number: int, word: str = "") -> None:
        """From now on a call fails with this error."""
        self.number = number
        genuine = getattr(os, call)

        def failing(*values: Any, **options: Any) -> Any:
            path = values[0] if isinstance(values[0], str | Path) else ""
            if self.number and word in str(path):
                raise OSError(self.number, os.strerror(self.number), str(path) or None)
            return genuine(*values, **options)

        self._monkeypatch.setattr(os, call, failing)

    def recover(self) -> None:
        self.number = 0


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    made = System(monkeypatch)
    yield made
    made.recover()


def said(error: penstock.PenstockError, number: int) -> None:
    assert error.errno == number
    assert os.strerror(number) in error.message
    assert TOLD[number] in error.message
    full = number in (errno.ENOSPC, errno.EDQUOT)
    assert isinstance(error, DiskFull) == full
    assert ("no room" in error.message or "full" in error.message) == full


async def until_refused(bus: penstock.Bus) -> DiskRefused:
    with pytest.raises(DiskRefused) as caught:
        for _ in range(100):
            await bus.publish("orders", random.Random(1).randbytes(100_000))
    return caught.value


@each_error
@pytest.mark.parametrize("call", ["open", "posix_fallocate"])
async def test_no_new_journal_file(call: str, number: int, system: System, tmp_path: Path) -> None:
    settings = small_settings(sealing__enabled=False)
    async with penstock.connect(tmp_path / "data", settings=settings) as bus:
        await bus.publish("orders", b"first")
        system.fail(call, number, "spare" if call == "open" else "")
        error = await until_refused(bus)
        said(error, number)
        assert error.code == ("rejected.disk-full" if isinstance(error, DiskFull) else "rejected.disk-refused")  # fmt: skip
        assert error.retry_after_s > 0
        stored = len([event async for event in bus.replay("orders")])
        assert stored > 1
        system.recover()
        async with asyncio.timeout(20):
            while True:
                try:
                    receipt = await bus.publish("orders", b"again")
                    break
                except DiskRefused:
                    await asyncio.sleep(0.1)
        assert receipt.offset == stored


@each_error
async def test_no_file_for_a_large_payload(number: int, system: System, bus: penstock.Bus) -> None:
    await bus.publish("orders", b"first")
    system.fail("open", number, "side/")
    with pytest.raises(DiskRefused) as caught:
        await bus.publish("orders", bytes(9 << 20))
    said(caught.value, number)
    assert (await bus.publish("orders", b"second")).offset == 1


@each_error
async def test_no_file_for_the_routes(number: int, system: System, bus: penstock.Bus) -> None:
    system.fail("open", number, "routes")
    with pytest.raises(DiskRefused) as caught:
        await bus.routes.put(Route("orders", "billing"))
    said(caught.value, number)
    assert await bus.routes.list() == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS], ids=errno.errorcode.get)
async def test_a_write_that_fails_ends_the_writer_and_says_why(
    number: int, system: System, tmp_path: Path
) -> None:
    async with penstock.connect(tmp_path / "data") as bus:
        await bus.publish("orders", b"first")
        system.fail("pwritev", number)
        with pytest.raises(WriterFailed) as caught:
            await bus.publish("orders", b"second")
        said(caught.value, number)
        system.recover()
    async with penstock.connect(tmp_path / "data") as bus:
        assert [event.payload async for event in bus.replay("orders")] == [b"first"]


@each_error
@pytest.mark.parametrize("name", ["lock", ".jnl", "key"])
async def test_a_folder_that_cannot_be_opened(
    name: str, number: int, system: System, tmp_path: Path
) -> None:
    async with penstock.connect(tmp_path / "data") as bus:
        await bus.publish("orders", b"first")
    system.fail("open", number, name)
    modes: list[Callable[[], penstock.Bus]] = [lambda: penstock.connect(tmp_path / "data")]
    if name == ".jnl":
        modes.append(lambda: penstock.connect(f"{tmp_path / 'data'}?mode=ro"))
    for connect in modes:
        with pytest.raises(StorageError) as caught:
            async with connect():
                pass
        assert caught.value.errno == number
        assert name in caught.value.path
        assert TOLD[number].lower() in caught.value.message.lower()
    system.recover()
    async with penstock.connect(tmp_path / "data") as bus:
        assert [event.payload async for event in bus.replay("orders")] == [b"first"]
