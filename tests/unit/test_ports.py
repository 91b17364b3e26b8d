"""Where a broker listens: addresses, and `ports.json`."""

from __future__ import annotations

import fcntl
import os
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.model.errors import Corrupted, InvalidSettings
from penstock.model.settings import Server
from penstock.server import ports

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:5557", ("127.0.0.1", 5557)),
        (" localhost:0 ", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
    ],
)
def test_addresses_are_understood(text: str, expected: tuple[str, int]) -> None:
    assert ports.parse_address(text) == expected


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("127.0.0.1", "port"),
        ("127.0.0.1:", "port"),
        ("127.0.0.1:65536", "port"),
        ("127.0.0.1:-1", "port"),
        ("127.0.0.1:٣", "port"),
        ("127.0.0.1:" + "9" * 5000, "port"),
        (":5557", "host"),
        ("*:5557", "host"),
        ("[]:5557", "host"),
        ("::1:5557", "brackets"),
        ("", "port"),
    ],
)
def test_wrong_addresses_say_what_is_wrong(text: str, word: str) -> None:
    with pytest.raises(InvalidSettings, match=word) as caught:
        ports.parse_address(text, "server.tcp")
    assert caught.value.key == "server.tcp"


def test_services_that_are_off_have_no_address() -> None:
    found = ports.addresses(Server(zmq="", pub="", tcp="127.0.0.1:0"))
    assert list(found) == ["tcp", "http"]


def record_of(folder: Path, **more: object) -> ports.Listening:
    record = ports.listening(Server(tcp="0.0.0.0:0", http="[::1]:0"), {"tcp": 7, "http": 8}, "1")
    record = msgspec.structs.replace(record, **more)
    ports.write_ports(folder, record)
    return record


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert ports.read_ports(tmp_path) is None
    record = record_of(tmp_path)
    assert ports.read_ports(tmp_path) == record
    assert record.pid == os.getpid()
    assert record.host == socket.gethostname()
    assert record.addresses == {"tcp": "0.0.0.0:7", "http": "[::1]:8"}
    assert record.urls == {"tcp": "penstock://127.0.0.1:7", "http": "http://[::1]:8"}
    assert os.listdir(tmp_path) == ["ports.json"], "nothing else is left"


def test_tls_shows_in_the_url() -> None:
    server = Server(tls_certificate="cert.pem")
    urls = ports.listening(server, {"http": 8, "tcp": 7, "zmq": 6}, "1").urls
    assert urls["http"] == "https://127.0.0.1:8"
    assert urls["tcp"] == "penstocks://127.0.0.1:7"
    assert urls["zmq"] == "penstock+zmq://127.0.0.1:6", "CURVE has no scheme of its own"


def test_only_its_own_file_is_removed(tmp_path: Path) -> None:
    record_of(tmp_path, pid=os.getpid() + 1)
    ports.remove_ports(tmp_path)
    assert ports.read_ports(tmp_path) is not None
    record_of(tmp_path)
    ports.remove_ports(tmp_path)
    assert ports.read_ports(tmp_path) is None
    ports.remove_ports(tmp_path)  # nothing there is fine


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"\xff", b'{"pid": "x"}', b"x" * 100_000])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "ports.json").write_bytes(text)
    with pytest.raises(Corrupted, match="remove it"):
        ports.read_ports(tmp_path)
    ports.remove_ports(tmp_path)
    assert (tmp_path / "ports.json").read_bytes() == text


def test_a_killed_brokers_file_is_cleared_unless_somebody_has_the_folder(tmp_path: Path) -> None:
    record_of(tmp_path, pid=1)
    with (tmp_path / "lock").open("w") as lock:
        lock.write("the holder")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ports.writer_of(tmp_path) == "the holder"
        ports.clear_stale_ports(tmp_path)
        assert ports.read_ports(tmp_path) is not None
    assert ports.writer_of(tmp_path) is None
    ports.clear_stale_ports(tmp_path)
    assert ports.read_ports(tmp_path) is None
