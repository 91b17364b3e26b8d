"""New admission limits and keys for a running broker, from the files it was started with.

A broker reads its settings file, and the files with its keys, again on SIGHUP and when one of them
changes. Admission limits and the keys of `auth` take effect at once; every other setting waits for a
restart, and the log says which ones do. A file with a mistake changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core.admission import AdmissionLimits
from penstock.model.errors import PenstockError
from penstock.server.auth import Authenticator, Keys, keys_of

if TYPE_CHECKING:
    from penstock.core.admission import Admission
    from penstock.model.settings import Auth, Settings

log = logging.getLogger("penstock.server.reload")

LOOK_S = 1.0
"""Between two looks at the file. A changed file is read when it stayed the same for one look, and so not
while an editor writes it."""

MAX_NAMED = 20
"""Changed settings that one log line names; more are counted."""

KEPT = "the limits in force"

SECRETS = frozenset({"auth", "curve_secret_key"})
"""Words in a name whose value is not written to a log."""

Stamp = tuple[tuple[int, int, int] | None, ...]


def broker_settings(settings: Settings) -> Settings:
    """Settings with a broker's default limits where none are set: a broker does not trust its clients.

    >>> from penstock.model.settings import Admission, Settings
    >>> broker_settings(Settings(admission=Admission(max_queued_direct=7))).admission.max_queued_direct
    7
    >>> broker_settings(Settings()).admission.max_global_ingress
    8192
    """
    defaults, admission = AdmissionLimits(), settings.admission
    filled = {
        name: getattr(defaults, name)
        for name in admission.__struct_fields__
        if getattr(admission, name) is None
    }
    return msgspec.structs.replace(settings, admission=msgspec.structs.replace(admission, **filled))


def limits_of(settings: Settings) -> AdmissionLimits:
    """The admission settings as limits of the admission machine."""
    return msgspec.convert(settings.admission, AdmissionLimits, from_attributes=True)


class Reloader:
    """Watches the settings file and the key files, and puts new limits and keys in force."""

    def __init__(
        self,
        admission: Admission,
        settings: Settings,
        load: Callable[[], Settings],
        path: str | Path | None,
        authenticator: Authenticator | None = None,
    ) -> None:
        self.settings = settings
        """Admission and keys as in force; the other settings as they would be after a restart."""
        self._admission = admission
        self._started = settings
        self._load = load
        self._path = None if path is None else Path(path)
        self._authenticator = authenticator
        self._wake = asyncio.Event()
        self._loaded = self._stamp()

    def request(self) -> None:
        """Read the file again now: what SIGHUP does."""
        self._wake.set()

    async def watch(self) -> None:
        """Reload on request and when a file changes, until it is cancelled."""
        before = self._loaded
        while True:
            asked = await self._pause()
            now = await asyncio.to_thread(self._stamp)
            if asked or (now == before and now not in (None, self._loaded)):
                await self.reload("SIGHUP" if asked else "the file changed")
            elif now is None and before is not None and self._path is not None:
                log.warning("settings file gone", extra={"file": str(self._path), "kept": KEPT})
            before = now

    async def _pause(self) -> bool:
        """Wait for a request or for the next look; True for a request."""
        try:
            async with asyncio.timeout(LOOK_S):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    async def reload(self, why: str) -> bool:
        """Read the file and put its admission limits in force; False when it was refused."""
        about = {"why": why, "file": str(self._path or "none")}
        stamp = await asyncio.to_thread(self._stamp)
        try:
            settings = broker_settings(await asyncio.to_thread(self._load))
            limits = limits_of(settings)
            renewed = await self._keys(settings.auth)
            self._admission.reload(limits)
            if renewed is not None and self._authenticator is not None:
                self._log_keys(about, self._authenticator.change(renewed), renewed)
        except (PenstockError, OSError, ValueError) as error:
            log.error("reload refused", extra={**about, "problem": str(error), "kept": KEPT})
            return False
        except Exception:
            log.exception("reload failed", extra={**about, "kept": KEPT})
            return False
        finally:
            self._loaded = stamp  # a refused file is not tried again before it changes
        self._report(about, settings)
        self.settings = settings
        return True

    async def _keys(self, auth: Auth) -> Keys | None:
        """The keys of new settings; raises when they cannot replace those in force."""
        if self._authenticator is None:
            return None
        keys = await asyncio.to_thread(keys_of, auth)
        self._authenticator.check_change(keys)
        return keys

    @staticmethod
    def _log_keys(about: dict[str, str], changed: bool, keys: Keys) -> None:
        if changed:
            count = {"admin_tokens": len(keys.admin_tokens), "jwt_secrets": len(keys.secrets)}
            log.info("keys changed", extra={**about, **count})

    def _report(self, about: dict[str, str], settings: Settings) -> None:
        changed = changes(self.settings, settings)
        now = {key: pair for key, pair in changed.items() if key.startswith("admission.")}
        if now:
            named = dict(list(now.items())[:MAX_NAMED])
            log.info("limits changed", extra={**about, "count": len(now), "changes": named})
        else:
            log.info("limits unchanged", extra=about)
        at_once = ("admission.",) if self._authenticator is None else ("admission.", "auth.")
        later = [key for key in changes(self._started, settings) if not key.startswith(at_once)]
        if later:
            fields = {"count": len(later), "settings": later[:MAX_NAMED]}
            log.warning("settings wait for a restart", extra=fields)

    def _stamp(self) -> Stamp | None:
        """Changes when one of the files does; None when there is no settings file."""
        auth = self.settings.auth
        keys = [Path(name) for name in (auth.admin_token_file, auth.jwt_secret_file) if name]
        main = None if self._path is None else _stamp_of(self._path)
        if main is None and (self._path is not None or not keys):
            return None
        return (main, *map(_stamp_of, keys))


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def changes(before: Settings, after: Settings) -> dict[str, tuple[Any, Any]]:
    """Each setting that differs, with both values; secrets are hidden.

    >>> from penstock.model.settings import Admission, Settings
    >>> changes(Settings(), Settings(admission=Admission(max_global_ingress=5)))
    {'admission.max_global_ingress': (None, 5)}
    """
    old, new = flat(before), flat(after)
    return {
        key: ("hidden", "hidden") if hidden(key) else (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def hidden(key: str) -> bool:
    """Whether a setting is a secret."""
    return not SECRETS.isdisjoint(key.split(".")) or key == "client.token"


def flat(settings: Settings) -> dict[str, Any]:
    """Every setting by its dotted name, and each limit of a single tenant."""
    found: dict[str, Any] = {}
    for group in settings.__struct_fields__:
        table = getattr(settings, group)
        for field in table.__struct_fields__:
            value = getattr(table, field)
            if not isinstance(value, dict):
                found[f"{group}.{field}"] = value
                continue
            for tenant, limits in value.items():
                unset = type(limits)()
                for name in limits.__struct_fields__:
                    if getattr(limits, name) != getattr(unset, name):
                        found[f"{group}.{field}.{tenant}.{name}"] = getattr(limits, name)
    return found
