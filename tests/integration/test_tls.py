"""Clients of a real broker inside TLS, through the engine that applications use (rows T1, Q1)."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.engines.broker.tcp import client_tls
from penstock.model.errors import BrokerUnreachable, InvalidSettings
from penstock.server.transports.tcp import MAX_UNWELCOMED
from penstock.testing.authority import Authority
from penstock.testing.broker_process import BrokerProcess

DEADLINE_S = 20.0
PART_BYTES = 3 << 20


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "authority")


def secured(folder: Path, authority: Authority, **flags: Any) -> BrokerProcess:
    certificate, key = authority.issue("broker")
    return BrokerProcess(folder / "data").start(
        server__tls_certificate=certificate, server__tls_key=key, **flags
    )


def url_of(broker: BrokerProcess) -> str:
    return broker.url().replace("penstock://", "penstocks://")


async def there_and_back(url: str, **flags: Any) -> None:
    """Publish, receive and ack something that takes more than one record of TLS."""
    async with (
        penstock.connect(url, **flags) as bus,
        bus.subscribe("orders", group="g", start="earliest") as events,
    ):
        payload = bytes(PART_BYTES)
        await bus.publish("orders", payload)
        event = await events.get(timeout_s=DEADLINE_S)
        assert event is not None
        assert event.payload == payload
        await event.ack()
        await bus.flush()
        assert (await bus.groups.info("g")).lag == 0


async def refused(url: str, match: str, **flags: Any) -> None:
    """A client that is not let in says why, when its deadline has passed and not much later."""
    began = time.monotonic()
    with pytest.raises(BrokerUnreachable, match=match):
        async with asyncio.timeout(DEADLINE_S):
            await penstock.connect(url, client__deadline_s=1.0, **flags).open()
    assert time.monotonic() - began < DEADLINE_S / 2


async def test_events_over_tls(tmp_path: Path, authority: Authority) -> None:
    """Q1, T1: `penstocks://` with the authority's file; without it the broker is not believed."""
    with secured(tmp_path, authority) as broker:
        await there_and_back(url_of(broker), client__tls_ca=authority.ca_file)
        await refused(url_of(broker), r"certificate verify failed.* client\.tls_ca")
        await refused(broker.url(), "penstocks://", client__tls_ca=authority.ca_file)


async def test_certificates_of_the_test_kit_pass_strict_checks(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q1: Python 3.13 checks certificates strictly by default; so does this client, whatever its version."""
    relaxed = ssl.create_default_context

    def strict(*args: Any, **options: Any) -> ssl.SSLContext:
        context = relaxed(*args, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    with secured(tmp_path, authority) as broker:
        await there_and_back(url_of(broker), client__tls_ca=authority.ca_file)


async def test_tls_where_the_broker_has_none(tmp_path: Path) -> None:
    """Q1: the advice is about the URL, not about a broker that would have to be started."""
    with BrokerProcess(tmp_path / "data") as broker:
        await refused(url_of(broker), "begins with penstock://")


async def test_a_broker_that_asks_for_certificates(tmp_path: Path, authority: Authority) -> None:
    """Q1, T1: a client with one of the right authority works; the others are told what they lack."""
    certificate, key = authority.issue("client")
    stranger, its_key = Authority(tmp_path, "somebody").issue("stranger")
    trusting = {"client__tls_ca": authority.ca_file}
    with secured(tmp_path, authority, server__tls_client_ca=authority.ca_file) as broker:
        url = url_of(broker)
        shown = {"client__tls_certificate": certificate, "client__tls_key": key}
        await there_and_back(url, **trusting, **shown)
        await refused(url, "client.tls_certificate", **trusting)
        shown = {"client__tls_certificate": stranger, "client__tls_key": its_key}
        await refused(url, "client.tls_certificate", **trusting, **shown)


async def test_certificates_that_expired(tmp_path: Path, authority: Authority) -> None:
    """Q1: either side says so, and the broker's log who was turned away; a restart takes a new file."""
    trusting = {"client__tls_ca": authority.ca_file}
    certificate, key = authority.issue("late", valid_s=-60.0)
    shown = {"client__tls_certificate": certificate, "client__tls_key": key}
    certificate, key = authority.issue("renewed")
    files = {"server__tls_certificate": certificate, "server__tls_key": key}
    with (tmp_path / "log").open("wb") as log:
        broker = BrokerProcess(tmp_path / "data", log=log)
        with broker.start(**files, server__tls_client_ca=authority.ca_file):
            await refused(url_of(broker), "client.tls_certificate", **trusting, **shown)
        authority.issue("renewed", valid_s=10.0)  # a busy machine starts a broker within that
        with broker.start(**files):
            await asyncio.sleep(10.0)
            await refused(url_of(broker), "has expired.*Give the broker a certificate", **trusting)
            authority.issue("renewed")
            await refused(url_of(broker), "has expired", **trusting)
            assert broker.stop() == 0
            broker.start(**files)
            await there_and_back(url_of(broker), **trusting)
    said = (tmp_path / "log").read_text()
    assert "client refused  peer=127.0.0.1:" in said
    assert "certificate has expired" in said


@pytest.mark.parametrize("wrong", ["other", "missing", "locked", "key"])
def test_files_that_cannot_be_used(tmp_path: Path, wrong: str) -> None:
    """Q1: found when the address is dialled, and named with their settings."""
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.issue("client")
    files = {
        "other": (certificate, authority.issue("another")[1]),
        "missing": (str(tmp_path / "nowhere.pem"), key),
        "locked": authority.issue("locked", password=b"a password"),
        "key": ("", key),
    }
    with pytest.raises(InvalidSettings, match=r"client\.tls_certificate"):
        client_tls(authority.ca_file, *files[wrong])


async def test_who_does_not_shake_hands_counts_as_a_connection(
    tmp_path: Path, authority: Authority
) -> None:
    """T1: silent strangers cannot take the descriptors that journal and clients need."""
    with secured(tmp_path, authority, server__max_connections=1) as broker:
        descriptors = Path(f"/proc/{broker.pid}/fd")
        before = len(list(descriptors.iterdir()))
        with ExitStack() as silent:
            for _ in range(2 * MAX_UNWELCOMED):
                there = ("127.0.0.1", broker.ports["tcp"])
                silent.enter_context(socket.create_connection(there))
            await asyncio.sleep(0.5)
            assert len(list(descriptors.iterdir())) <= before + MAX_UNWELCOMED + 1
        await there_and_back(url_of(broker), client__tls_ca=authority.ca_file)
