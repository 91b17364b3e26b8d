"""New admission limits while the broker runs; the limits a broker has when nobody set any."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any

import pytest

from penstock.core.admission import ADMITTED, Admission
from penstock.model.settings import Admission as AdmissionSettings
from penstock.model.settings import Auth, Settings
from penstock.model.settings_loader import load
from penstock.server import reload
from penstock.server.reload import Reloader, broker_settings, changes, limits_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

DEADLINE_S = 10.0


def test_a_broker_has_limits_where_none_are_set() -> None:
    """T11: the defaults of a broker, and each of them can be set."""
    filled = broker_settings(Settings()).admission
    assert filled.max_inflight_per_consumer == 1024
    assert filled.max_per_topic_queue == 256
    assert filled.max_queued_direct == 4096
    assert filled.max_global_ingress == 8192
    assert filled.tenants == {}
    own = AdmissionSettings(max_inflight_per_consumer=1, max_global_ingress=100_000)
    kept = broker_settings(Settings(admission=own)).admission
    assert (kept.max_inflight_per_consumer, kept.max_global_ingress) == (1, 100_000)
    assert kept.max_queued_direct == 4096
    assert broker_settings(broker_settings(Settings())) == broker_settings(Settings())
    assert Settings().admission.max_global_ingress is None, "the embedded bus keeps none"


class Bench:
    """A reloader on a file, and the admission it changes."""

    def __init__(self, path: Path, log: pytest.LogCaptureFixture) -> None:
        self.path = path
        self.log = log
        self.write("")
        settings = broker_settings(load(str(path)))
        self.admission = Admission(limits_of(settings))
        self.reloader = Reloader(self.admission, settings, lambda: load(str(path)), path)

    def write(self, text: str) -> None:
        """Replace the file, as a careful editor does."""
        beside = self.path.with_suffix(".new")
        beside.write_text(text)
        os.replace(beside, self.path)

    def records(self, event: str) -> list[Any]:
        return [each for each in self.log.records if each.message == event]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.fixture
def bench(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Bench:
    caplog.set_level(logging.INFO, "penstock.server.reload")
    return Bench(tmp_path / "penstock.toml", caplog)


@pytest.fixture
async def watched(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(reload, "LOOK_S", 0.03)
    task = asyncio.create_task(bench.reloader.watch())
    yield bench
    assert not task.done(), "it watches for ever"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_new_limits_are_in_force_at_once(bench: Bench) -> None:
    """T11: live-reloadable, with overrides for each tenant."""
    assert bench.admission.admit("acme", "t", 5, 1, 0.0) is ADMITTED
    bench.write("[admission]\nmax_global_ingress = 6\n[admission.tenants.acme]\nmax_ingress = 5\n")
    assert await bench.reloader.reload("test")
    assert bench.admission.admit("acme", "t", 1, 1, 0.0).limit == "max_ingress", "5 stay counted"
    assert bench.admission.admit("other", "t", 7, 1, 0.0).limit == "max_global_ingress"
    (record,) = bench.records("limits changed")
    assert record.changes == {
        "admission.max_global_ingress": (8192, 6),
        "admission.tenants.acme.max_ingress": (None, 5),
    }
    bench.write("")
    assert await bench.reloader.reload("test")
    assert bench.admission.limits.max_global_ingress == 8192, "what is gone is the default again"
    assert bench.admission.admit("acme", "t", 1, 1, 0.0) is ADMITTED


async def test_a_burst_can_be_set_and_changed(bench: Bench) -> None:
    """T11: how much of a rate may be used at once is a limit like the others."""
    rate = "[admission.tenants.acme]\nevents_per_s = 10\n"
    bench.write(rate)
    assert await bench.reloader.reload("test")
    assert bench.admission.admit("acme", "t", 30, 1, 0.0).kind == "dropped"
    bench.write(rate + "burst_s = 3\n")
    assert await bench.reloader.reload("test")
    assert bench.admission.limits.tenants["acme"].burst_s == 3
    assert bench.admission.admit("acme", "t", 30, 1, 10.0) is ADMITTED
    for wrong in ("0", "-1", "86401", '"none"'):
        bench.write(rate + f"burst_s = {wrong}\n")
        assert not await bench.reloader.reload("test"), wrong
    assert bench.admission.limits.tenants["acme"].burst_s == 3


@pytest.mark.parametrize(
    "text",
    [
        "[admission]\nmax_global_ingress = 0\n",
        "[admission]\nmax_global_ingres = 10\n",
        "[admission\n",
        "[durability]\nfsync = 'sometimes'\n[admission]\nmax_global_ingress = 10\n",
        "\x00",
    ],
)
async def test_a_bad_file_changes_nothing(bench: Bench, text: str) -> None:
    """T11: the whole file is refused, the old limits stay, and one line says why."""
    before = bench.admission.limits
    bench.write(text)
    assert not await bench.reloader.reload("test")
    assert bench.admission.limits is before
    (record,) = bench.records("reload refused")
    assert record.levelno == logging.ERROR
    assert record.file == str(bench.path)
    assert record.kept == "the limits in force"
    assert "penstock.toml" in record.problem


async def test_a_file_that_went_away_changes_nothing(bench: Bench) -> None:
    before = bench.admission.limits
    bench.path.unlink()
    assert not await bench.reloader.reload("SIGHUP")
    assert bench.admission.limits is before


async def test_a_defect_while_loading_does_not_end_the_watch(bench: Bench) -> None:
    def broken() -> Settings:
        raise RuntimeError("a defect")

    bench.reloader._load = broken
    assert not await bench.reloader.reload("test")
    (record,) = bench.records("reload failed")
    assert record.exc_info is not None


async def test_a_change_of_the_file_is_noticed(watched: Bench) -> None:
    watched.write("[admission]\nmax_global_ingress = 77\n")
    await watched.until(lambda: watched.admission.limits.max_global_ingress == 77)
    watched.write("[admission]\nmax_global_ingress = no\n")
    await watched.until(lambda: bool(watched.records("reload refused")))
    await asyncio.sleep(0.2)
    assert len(watched.records("reload refused")) == 1, "a bad file is tried once"
    assert watched.admission.limits.max_global_ingress == 77
    watched.write("[admission]\nmax_global_ingress = 78\n")
    await watched.until(lambda: watched.admission.limits.max_global_ingress == 78)
    watched.path.unlink()
    await watched.until(lambda: bool(watched.records("settings file gone")))
    assert watched.admission.limits.max_global_ingress == 78
    watched.write("[admission]\nmax_global_ingress = 79\n")
    await watched.until(lambda: watched.admission.limits.max_global_ingress == 79)


async def test_a_file_that_is_still_being_written_is_left_alone(
    watched: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    stamps = iter(range(1, 1_000))
    resting = [False]
    monkeypatch.setattr(watched.reloader, "_load", lambda: reads.append(1) or Settings())
    monkeypatch.setattr(
        watched.reloader, "_stamp", lambda: (0 if resting[0] else next(stamps), 0, 0)
    )
    await asyncio.sleep(0.2)
    assert next(stamps) > 3, "it did look"
    assert not reads
    resting[0] = True
    await watched.until(lambda: bool(reads))


async def test_sighup_reads_again_even_without_a_change(watched: Bench) -> None:
    watched.reloader.request()
    await watched.until(lambda: bool(watched.records("limits unchanged")))


async def test_what_needs_a_restart_is_named(bench: Bench) -> None:
    bench.write("[delivery]\nlease_s = 5\n[auth]\nadmin_token = 'geheim'\n")
    assert await bench.reloader.reload("test")
    (record,) = bench.records("settings wait for a restart")
    assert record.settings == ["auth.admin_token", "delivery.lease_s"]
    assert await bench.reloader.reload("again")
    assert len(bench.records("settings wait for a restart")) == 2, "it stays true until then"


def test_secrets_do_not_show_in_changes() -> None:
    found = changes(Settings(), Settings(auth=Auth(admin_token="geheim", jwt_secret="auch")))
    assert "geheim" not in str(found)
    assert set(found) == {"auth.admin_token", "auth.jwt_secret"}
