"""Secrets and tokens change one by one, with an overlap and without a restart; workers outlive their tokens."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

import penstock
from penstock.model.errors import BrokerUnreachable, InvalidSettings, NotAuthenticated
from penstock.model.settings import Auth
from penstock.server.auth import Authenticator
from penstock.testing.broker_process import BrokerProcess

OLD, NEW = "old-secret-of-more-than-32-bytes-....", "new-secret-of-more-than-32-bytes-...."
DEADLINE_S = 30.0


def token(secret: str, ttl_s: float = 600.0) -> str:
    return Authenticator(Auth(jwt_secret=secret)).issue("acme", "worker", ["operator"], ttl_s)


def put(path: Path, text: str) -> None:
    """Replace a file the way a careful writer does."""
    beside = path.with_suffix(".next")
    beside.write_text(text)
    os.replace(beside, path)


class Site:
    """A broker whose keys lie in files."""

    def __init__(self, folder: Path) -> None:
        self.secrets, self.admins = folder / "secrets", folder / "admins"
        put(self.secrets, f"# rotated in spring\n{OLD}\n")
        put(self.admins, "first-admin-token\n")
        self.process = BrokerProcess(folder / "data")

    def start(self) -> None:
        self.process.start(
            auth__jwt_secret_file=str(self.secrets), auth__admin_token_file=str(self.admins),
            server__session_s=60,
        )  # fmt: skip

    async def takes(self, shown: str) -> bool:
        try:
            async with penstock.connect(self.process.url(), client__token=shown) as bus:
                await bus.publish("orders.created.v1.acme", b"x")
        except NotAuthenticated:
            return False
        return True

    async def until(self, shown: str, *, taken: bool) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self.takes(shown) != taken:
                await asyncio.sleep(0.1)

    def status(self, shown: str) -> int:
        url = f"http://127.0.0.1:{self.process.ports['http']}/api/admin/topics"
        return httpx.get(url, headers={"X-Admin-Token": shown}, trust_env=False).status_code


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    made = Site(tmp_path)
    await asyncio.to_thread(made.start)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.process.stop)


async def test_a_secret_rotates_with_an_overlap_and_without_a_restart(site: Site) -> None:
    """C8: both are valid for a while, then the old one is not; a client that is connected stays."""
    old, new = token(OLD), token(NEW)
    assert await site.takes(old)
    assert not await site.takes(new)
    async with penstock.connect(site.process.url(), client__token=old) as connected:
        put(site.secrets, f"{NEW}\n{OLD}\n")
        await site.until(new, taken=True)
        assert await site.takes(old)
        put(site.secrets, f"{NEW}\n")
        await site.until(old, taken=False)
        assert await site.takes(new)
        await connected.publish("orders.created.v1.acme", b"x")


async def test_admin_tokens_rotate_too_and_a_bad_file_changes_nothing(site: Site) -> None:
    """C8: over HTTP as over the wire; an empty file or a short secret is refused whole."""
    assert site.status("first-admin-token") == 200
    assert site.status("second-admin-token") == 401
    put(site.admins, "second-admin-token\nfirst-admin-token\n")
    end = time.monotonic() + DEADLINE_S
    while site.status("second-admin-token") != 200:
        assert time.monotonic() < end
        await asyncio.sleep(0.1)
    assert site.status("first-admin-token") == 200
    put(site.secrets, "too short\n")
    put(site.admins, "# nobody\n")
    await asyncio.sleep(3)  # longer than two looks at the files
    assert site.status("second-admin-token") == 200
    assert await site.takes(token(OLD))


@pytest.mark.parametrize("source", ["file", "function", "coroutine"])
async def test_a_worker_outlives_its_first_token(
    site: Site, tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C8: at its next connection it shows the newest token; until there is one it says why and tries on."""
    caplog.set_level(logging.ERROR, "penstock.client")
    kept = tmp_path / "token"
    put(kept, token(OLD, ttl_s=2) + "\n")

    async def read() -> str:
        return kept.read_text().strip()

    ways: dict[str, Callable[[], penstock.Bus]] = {
        "file": lambda: penstock.connect(site.process.url(), client__token_file=str(kept), client__deadline_s=5),
        "function": lambda: penstock.connect(site.process.url(), token=lambda: kept.read_text().strip(), client__deadline_s=5),
        "coroutine": lambda: penstock.connect(site.process.url(), token=read, client__deadline_s=5),
    }  # fmt: skip
    async with ways[source]() as worker:
        await worker.publish("orders.created.v1.acme", b"1")
        await asyncio.sleep(3.1)  # an expiry is a whole second, rounded up
        await asyncio.to_thread(site.process.kill)
        await asyncio.to_thread(site.start)
        with pytest.raises(BrokerUnreachable, match="the token has expired"):
            await worker.publish("orders.created.v1.acme", b"2")
        said = [each for each in caplog.records if "token has expired" in each.getMessage()]
        assert len(said) == 1, "said once, however often it is tried"
        put(kept, token(OLD))
        await worker.publish("orders.created.v1.acme", b"3")
        assert (await worker.topics.info("orders.created.v1.acme")).partitions[0].end_offset == 2


async def test_a_token_that_cannot_be_had_is_told_at_once(site: Site, tmp_path: Path) -> None:
    """C8: on the first connection; and what is contradictory or useless is refused."""
    missing = str(tmp_path / "nowhere")
    with pytest.raises(InvalidSettings, match=r"client\.token_file"):
        async with penstock.connect(site.process.url(), client__token_file=missing):
            pass
    with pytest.raises(InvalidSettings, match="not both"):
        penstock.connect(site.process.url(), client__token_file=missing, client__token="x")
    with pytest.raises(InvalidSettings, match="only a broker"):
        penstock.connect("mem:", token="x")


async def test_a_worker_whose_token_stays_the_same_ends_with_the_reason(site: Site) -> None:
    """C8: nothing would change by trying on, so the application hears it."""
    async with penstock.connect(site.process.url(), client__token=token(OLD, ttl_s=2)) as worker:
        await worker.publish("orders.created.v1.acme", b"1")
        await asyncio.sleep(3.1)  # an expiry is a whole second, rounded up
        await asyncio.to_thread(site.process.kill)
        await asyncio.to_thread(site.start)
        with pytest.raises(NotAuthenticated, match="expired"):
            await worker.publish("orders.created.v1.acme", b"2")
