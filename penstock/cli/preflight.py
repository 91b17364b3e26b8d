"""What must be in order before a broker starts: `up` stops at the first, `up --check` lists all."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from penstock.cli import checkup_folder, checkup_keys, checkup_network
from penstock.cli.checkup import Check, check_descriptors, check_needed, guarded
from penstock.log.recovery import ABOUT
from penstock.model.errors import InvalidSettings
from penstock.server.ports import addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.model.settings import Settings


Step: TypeAlias = "tuple[str, Callable[[], Check | Iterator[Check]]]"


def steps(folder: Path, settings: Settings) -> Iterator[Step]:
    """The checks in order: what does not depend on the moment first. Nothing is changed by them."""
    yield "needed extras", partial(check_needed, settings)
    yield from settings_steps(settings)
    yield "folder", partial(checkup_folder.check_place, folder)
    yield "format", partial(checkup_folder.check_format, folder, may_be_new=True)
    yield "space", partial(_check_space, folder, settings)
    yield "open files", partial(check_descriptors, settings)
    yield "lock", partial(checkup_folder.check_free, folder)
    with contextlib.suppress(InvalidSettings):  # the check of the addresses has said so
        for name, address in addresses(settings.server).items():
            yield f"port {name}", partial(checkup_network.check_port, name, address)


def settings_steps(settings: Settings) -> Iterator[Step]:
    """Those that look at nothing but the settings and the files they name."""
    yield "addresses", partial(checkup_network.check_addresses, settings)
    yield "access", partial(checkup_network.check_access, settings)
    yield "secrets", partial(checkup_keys.check_secrets, settings)
    yield "tls", partial(checkup_keys.check_tls, settings)
    yield "curve", partial(checkup_keys.check_curve, settings)


def _check_space(folder: Path, settings: Settings) -> Check:
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    return checkup_folder.check_space(place, settings)


READABLE = frozenset({"space", "open files"})
"""Checks that do not keep a broker from starting: what is there can be read, and `/ready` says the rest."""


def require(folder: Path, settings: Settings) -> list[Check]:
    """Raise the error of the first check that fails; returns the warnings of the others."""
    found: list[Check] = []
    for name, step in steps(folder, settings):
        result = step()
        checks = [result] if isinstance(result, Check) else list(result)
        if name in READABLE:
            checks = [msgspec.structs.replace(each, status="warn") if each.status == "fail" else each for each in checks]  # fmt: skip
        found += checks
    return [check for check in found if check.status == "warn"]


def examine(folder: Path, settings: Settings) -> Iterator[Check]:
    """Every check, with its finding."""
    fit = folder.is_dir()
    for name, step in steps(folder, settings):
        found = list(guarded(name, step))
        yield from found
        if name in ("folder", "format"):
            fit = fit and all(check.status != "fail" for check in found)
    # Last, and in the order of a start, so that the first failure is the one `up` ends with. A start
    # reads these itself: among the steps of `require` they would be read twice.
    if fit and (folder / ABOUT).exists():
        yield from guarded("log", partial(checkup_folder.check_log, folder, settings))
    if fit:
        yield from guarded("audit", partial(checkup_folder.check_audit_end, folder))
        yield from guarded("routes", partial(checkup_folder.check_routes, folder))
