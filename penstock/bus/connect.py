"""`penstock.connect`: one URL decides where events live, and so which engine the bus has."""

from __future__ import annotations

import logging
import os
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import parse_qs, urlsplit

from penstock.bus.bus import Bus
from penstock.engines.broker import engine_for
from penstock.engines.credential import Token
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.embedded.follower import FollowerEngine
from penstock.engines.engine import Engine
from penstock.engines.memory import MemoryEngine
from penstock.log.disk import RealDisk
from penstock.model.codec import codecs
from penstock.model.compressor import compressors
from penstock.model.errors import InvalidSettings, UnknownScheme
from penstock.model.event import Identity
from penstock.model.parameter import checked, path, refused
from penstock.model.settings import Settings
from penstock.model.settings_loader import load, unknown

# Schemes of later releases, named here so that the error can say so.
PLANNED = ("nats", "amqp", "ring")
BROKER = ("penstock", "penstocks", "penstock+zmq")

log = logging.getLogger("penstock.settings")
_told: set[str] = set()


def connect(
    url: str | Path,
    *,
    settings: Settings | None = None,
    identity: Identity | None = None,
    token: Token | None = None,
    **flags: Any,
) -> Bus:
    """A bus at a URL: `mem:`, the path of a folder (`?mode=ro` to only read it), or a broker.

    `penstock://host:port` speaks TCP with a broker that `penstock up` runs, `penstocks://` the same
    inside TLS, `penstock+zmq://host:port` ZeroMQ.

    Settings come from the file named by PENSTOCK_CONFIG, from the environment and from `flags`
    (`durability__fsync="never"`), unless `settings` gives all of them.

    `token` is shown to a broker: a text, or a function that returns the newest token for each new
    connection. `client.token_file` does the same with a file.

    >>> connect("mem:", durability__fsync="never").settings.durability.fsync
    'never'
    """
    if settings is None:
        dotted = {name.replace("__", ".", 1): value for name, value in flags.items()}
        settings = load(os.environ.get("PENSTOCK_CONFIG"), os.environ, dotted)
        tell_unknown()
    elif flags:
        raise InvalidSettings(f"give settings or flags, not both; got flags {sorted(flags)}")
    elif not isinstance(settings, Settings):
        raise refused("settings", "a penstock Settings", settings)
    if identity is None:
        identity = Identity(settings.identity.tenant, settings.identity.subject)
    elif not isinstance(identity, Identity):
        raise refused("identity", "a penstock Identity", identity)
    identity = checked(identity)
    codecs.get(settings.media.codec)
    compressors.get(settings.media.compressor)
    scheme, place, options = _parse(_url(url))
    if token is not None and scheme not in BROKER:
        raise InvalidSettings("only a broker asks for a token; leave it out", key="token")
    engine: Engine
    if scheme in BROKER:
        engine = engine_for(scheme, place, settings, identity, options.get("client", ""), token)
    elif scheme == "mem":
        engine = MemoryEngine(settings)
    elif options.get("mode") == "ro":
        engine = FollowerEngine(RealDisk(place), settings)
    else:
        engine = EmbeddedEngine(RealDisk(place), settings)
    without = frozenset(filter(None, options.get("without", "").split(",")))
    return Bus(engine, settings, identity, engine.capabilities - without)


def _url(url: object) -> str:
    if not isinstance(url, str | PurePath):
        raise refused("url", "text or a Path", url)
    return path("url", str(url))


def tell_unknown() -> None:
    """Log each variable of the environment that looks like a setting and is none, once."""
    for problem in unknown(os.environ):
        if problem.source not in _told:
            _told.add(problem.source)
            log.warning("%s; it is not heeded", problem.text)


def _parse(url: str) -> tuple[str, str, dict[str, str]]:
    try:
        parts = urlsplit(url)
    except ValueError as error:  # brackets that do not close
        raise UnknownScheme(
            f"{url!r} is no URL: {error}. Use penstock://host:port", url=url
        ) from None
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    unknown = set(options) - {"mode", "without"}
    if parts.scheme in BROKER:
        unknown -= {"client"}
    if unknown or options.get("mode", "rw") not in ("rw", "ro"):
        raise UnknownScheme(
            f"{url!r} has an option this bus does not know; use ?mode=ro to open a folder read-only",
            url=url,
        )
    if parts.scheme == "mem":
        return "mem", "", options
    if parts.scheme in BROKER and parts.netloc and parts.path in ("", "/"):
        return parts.scheme, parts.netloc, options
    if parts.scheme in ("", "file") and not parts.netloc and (parts.path or url == "."):
        return "file", parts.path, options
    planned = ", and it comes with a later release" if parts.scheme in PLANNED else ""
    raise UnknownScheme(
        f"no engine serves {url!r}{planned}. Use 'mem:', the path of a folder, or "
        "penstock://host:port",
        url=url,
    )
