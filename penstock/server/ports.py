"""Where a broker listens: the addresses of its settings, and `ports.json` in its data folder.

Port 0 takes any free port, so a running broker writes its ports to a file when it is ready, and removes
the file when it stops. A killed broker leaves its file; the folder's lock shows that (`writer_of`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.log.disk import RealDisk, holder_in_words, write_file
from penstock.model.errors import Corrupted, InvalidSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.model.settings import Server

FILE = "ports.json"
SERVICES = ("zmq", "pub", "tcp", "http")
"""Fields of `server` that hold an address, in the order they are shown."""
MAX_FILE_BYTES = 64 * 1024  # `ports.json` has under 1 KB; a larger file is something else
MAX_PORT = 65_535
SCHEMES = {"zmq": "penstock+zmq", "pub": "tcp", "tcp": "penstock", "http": "http"}


class Address(NamedTuple):
    """A host and a port to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, key: str = "address") -> Address:
    """Parse `HOST:PORT`; `key` names the setting in the error.

    >>> parse_address("127.0.0.1:5557"), str(parse_address("[::1]:0"))
    (Address(host='127.0.0.1', port=5557), '[::1]:0')
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    # A port has up to five digits, and int() of a long text takes time.
    number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else -1
    if not colon or not 0 <= number <= MAX_PORT:
        problem = f"the port must be 0 to {MAX_PORT}; 0 takes a free one"
    elif host in ("", "*"):
        problem = "the host is missing; 0.0.0.0 is every IPv4 interface"
    elif ":" in host and not bracketed:
        problem = "write an IPv6 address in brackets"
    else:
        return Address(host, number)
    raise InvalidSettings(
        f"{key} = {text!r}: {problem}. Write HOST:PORT, such as 127.0.0.1:5557, or nothing to turn it off",
        key=key,
        value=text,
    )


def addresses(server: Server) -> dict[str, Address]:
    """The services that are switched on, with the addresses in the settings.

    >>> from penstock.model.settings import Server
    >>> {name: str(at) for name, at in addresses(Server(zmq="", pub="", http="")).items()}
    {'tcp': '127.0.0.1:5557'}
    """
    texts = {name: getattr(server, name) for name in SERVICES}
    return {name: parse_address(text, f"server.{name}") for name, text in texts.items() if text}


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """A running broker, as `ports.json` describes it."""

    pid: int
    host: str
    version: str
    since_us: int
    """Wall clock at the start."""
    uptime_us: int
    """The machine's uptime then: both together show whether the wall clock was set since."""
    ports: dict[str, int]
    addresses: dict[str, str]
    """Where each service listens."""
    urls: dict[str, str]
    """The URL of each service for a client on this machine."""


def uptime_us() -> int:
    """Microseconds since the machine was started, sleep included; this clock cannot be set."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000


def listening(server: Server, ports: Mapping[str, int], version: str) -> Listening:
    """Describe this process, which listens on `ports`."""
    taken = {
        name: Address(address.host, ports[name])
        for name, address in addresses(server).items()
        if name in ports
    }
    return Listening(
        pid=os.getpid(),
        host=socket.gethostname(),
        version=version,
        since_us=time.time_ns() // 1_000,
        uptime_us=uptime_us(),
        ports=dict(ports),
        addresses={name: str(address) for name, address in taken.items()},
        urls={name: _url(name, address, server) for name, address in taken.items()},
    )


def _url(service: str, address: Address, server: Server) -> str:
    scheme = SCHEMES[service]
    if service in ("tcp", "http") and server.tls_certificate:
        scheme += "s"
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)  # noqa: S104
    return f"{scheme}://{Address(near, address.port)}"


def write_ports(folder: str | Path, record: Listening) -> None:
    """Write `ports.json`, completely or not at all."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    write_file(RealDisk(folder), FILE, [text, b"\n"])


def read_ports(folder: str | Path) -> Listening | None:
    """Read `ports.json`; None without one. It may be left over from a killed broker."""
    path = Path(folder) / FILE
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=Listening)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupted(
            f"{path} cannot be read: {error}. No events are in it: remove it, and restart the broker",
            path=str(path),
        ) from None


def remove_ports(folder: str | Path) -> None:
    """Remove `ports.json` if this process wrote it."""
    with contextlib.suppress(Corrupted):  # another process wrote it, then
        record = read_ports(folder)
        if record is not None and (record.pid, record.host) == (os.getpid(), socket.gethostname()):
            (Path(folder) / FILE).unlink(missing_ok=True)


def clear_stale_ports(folder: str | Path) -> None:
    """Remove the file of a killed broker, so that it does not pass for that of the starting one."""
    if (Path(folder) / FILE).exists() and writer_of(folder) is None:
        (Path(folder) / FILE).unlink(missing_ok=True)


def writer_of(folder: str | Path) -> str | None:
    """The process that writes the folder, as its lock file describes it; the lock is not touched."""
    path = Path(folder) / "lock"
    try:
        status = path.stat()
        holder = path.read_text(errors="replace").strip()
        table = Path("/proc/locks").read_text()
    except OSError:
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    if any(f" {device} " in line and " FLOCK " in line for line in table.splitlines()):
        return holder_in_words(holder)
    return None
