"""The command line: one command, `penstock`; one file for each noun. docs/reference/cli.md lists it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `penstock` with the given words, or those of the process, and end with its exit code."""
    try:
        from penstock.cli.app import run

        code = run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:  # before or after the command itself, which handles its own
        code = 130
    sys.exit(code)
