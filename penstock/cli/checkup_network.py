"""Checks of the addresses a broker listens on; part of penstock.cli.checkup."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.checkup import Check
from penstock.model.errors import ConnectionFailed, InvalidSettings
from penstock.server.ports import Address, Listening, addresses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.model.settings import Settings

LEAST_TOKEN_CHARS = 16  # one password for everything: not to be guessed
LISTEN = "0A"  # state in /proc/net/tcp


def check_addresses(settings: Settings, running: Listening | None = None) -> Check:
    """Whether each address can be understood, and no two services want the same; those of a running broker."""
    found = addresses(settings.server)
    taken: dict[Address, str] = {}
    for name, address in found.items():
        other = taken.setdefault(address, name)
        if other != name and address.port:
            raise InvalidSettings(
                f"server.{other} and server.{name} are both {address}. Give each a port of its own",
                key=f"server.{name}",
            )
    if not found:
        raise InvalidSettings(
            "every service is off, so nobody could reach the broker. Set server.tcp, such as "
            "127.0.0.1:5557",
            key="server.tcp",
        )
    shown = dict(found) if running is None else running.addresses
    return Check("addresses", "ok", ", ".join(f"{name} {at}" for name, at in shown.items()))


def check_port(name: str, address: Address) -> Check:
    """Whether the address is free at this moment; tried by taking it, and giving it back."""
    try:
        for family, kind, _, _, where in socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(where)
    except OSError as error:
        raise _not_free(name, address, error) from None
    return Check(f"port {name}", "ok", f"{address} is free" if address.port else "any free one")


def _not_free(name: str, address: Address, error: OSError) -> ConnectionFailed:
    why, advice = error.strerror or str(error), f"Choose another address with --{name}"
    if error.errno == errno.EADDRINUSE:
        owner = owner_of(address.port)
        why = f"it is taken by {owner}" if owner else "another process has it"
        advice = f"Stop that process, or choose another port with --{name} (0 takes a free one)"
    elif error.errno == errno.EADDRNOTAVAIL:
        advice = "Use an address of this machine: `ip address` lists them"
    elif error.errno == errno.EACCES:
        advice = "Use a port from 1024 on, or give the process CAP_NET_BIND_SERVICE"
    return ConnectionFailed(
        f"cannot listen on {address} (server.{name}): {why}. {advice}",
        address=str(address),
        service=name,
    )


def owner_of(port: int) -> str | None:
    """The process that listens on a port, as far as /proc tells: other users' are hidden from us."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{words[9]}]")
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in inodes:
                        return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
    return None


def check_ports(
    settings: Settings,
    running: Listening | None,
    written: frozenset[str] = frozenset(),
    *,
    defaults: bool = True,
) -> Iterator[Check]:
    """Every address: free, or served by this folder's own broker.

    A port that is taken is a failure where somebody wrote that address into the settings
    (`written`); one of the defaults only matters to those who want a broker here. Without
    `defaults` nobody does: a client of a broker may find the very one it talks to on them.
    """
    for name, address in addresses(settings.server).items():
        wanted = f"server.{name}" in written
        if not defaults and not wanted:
            continue
        if running is not None:
            yield _check_running(name, address, running, wanted)
            continue
        try:
            yield check_port(name, address)
        except ConnectionFailed as error:
            bad = f"server.{name}" in written
            what, _, advice = error.message.partition(". ")
            yield Check(f"port {name}", "fail" if bad else "warn", what, advice, error.code)


def _check_running(name: str, address: Address, running: Listening, wanted: bool) -> Check:
    """Where the broker of this folder really listens; only what was written can differ from that."""
    actual = running.addresses.get(name)
    whose = f"this folder's broker, pid {running.pid}"
    if wanted and address.port and actual != str(address):
        found = f"{whose} listens on {actual}" if actual else f"{whose} has this service off"
        return Check(f"port {name}", "warn", f"{found}, and server.{name} says {address}", "restart the broker with these settings, or give the doctor those it runs with")  # fmt: skip
    if actual is None:
        return Check(f"port {name}", "ok", f"off at {whose}")
    return Check(f"port {name}", "ok", f"{actual} is {whose}")


def check_access(settings: Settings) -> Iterator[Check]:
    """Whether strangers are kept out."""
    from penstock.server.auth import Doorkeeper, check_listen, is_loopback

    auth, server = settings.auth, settings.server
    door = Doorkeeper(auth)
    asks = door.asks
    found = addresses(server)
    for name, address in found.items():
        check_listen(str(address), auth, f"server.{name}")
    open_to = [name for name, address in found.items() if not is_loopback(address.host)]
    if "pub" in open_to and not (server.curve_secret_key and server.curve_clients):
        raise InvalidSettings(
            f"server.pub: {found['pub']} can be reached from other hosts, and a subscriber shows no "
            "token. Set server.curve_secret_key and server.curve_clients, or listen on 127.0.0.1",
            key="server.pub",
        )
    reached = f"reachable from other machines: {', '.join(open_to) or 'nothing'}"
    yield Check("access", "ok", f"{reached}; a token is {'needed' if asks else 'not needed'}")
    shortest = min(map(len, door.keys.admin_tokens), default=LEAST_TOKEN_CHARS)
    if shortest < LEAST_TOKEN_CHARS:
        yield Check("access", "warn", f"auth.admin_token has {shortest} characters", f"use {LEAST_TOKEN_CHARS} or more, by chance: openssl rand -hex 32")  # fmt: skip
    plain = [name for name in open_to if name in ("tcp", "http") and not server.tls_certificate]
    plain += [name for name in open_to if name == "zmq" and not server.curve_secret_key]
    if plain:
        yield Check("access", "warn", f"tokens and events cross the network in the clear: {', '.join(plain)}", "set server.tls_certificate (tcp, http) and server.curve_secret_key (zmq)")  # fmt: skip
