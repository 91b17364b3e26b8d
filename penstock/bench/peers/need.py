"""What a peer of the benchmarks needs to be installed, or the command that installs it."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.model.errors import MissingExtra


def need_module(name: str, peer: str) -> Any:
    """Import a peer's client library, or raise with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"the peer {peer} needs the Python package {name!r}: pip install 'penstock[bench]'",
            peer=peer,
            command="pip install 'penstock[bench]'",
        ) from error


def need_binary(found: str | None, peer: str, command: str) -> str:
    """The server's path, or an error with the command that installs it."""
    if found is None:
        raise MissingExtra(
            f"the peer {peer} needs its server on this machine: {command}",
            peer=peer,
            command=command,
        )
    return found
