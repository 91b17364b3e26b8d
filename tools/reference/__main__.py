"""Rewrites every printed page of docs/reference, and names those that changed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tools.reference import ask, capabilities, cli, conformance, metrics, proto, settings

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference"
PROTOCOL = DOCS / "protocol.md"


def main() -> None:
    """All pages, and the one section that is printed into a page written by hand."""
    pages = {
        PROTOCOL: ask.within(PROTOCOL.read_text()),
        DOCS / "capabilities.md": asyncio.run(capabilities.page()),
        DOCS / "cli.md": cli.page(),
        DOCS / "conformance.md": conformance.page(),
        DOCS / "metrics.md": metrics.page(),
        DOCS / "penstock.proto": proto.page(),
        DOCS / "settings.md": settings.page(),
    }
    for path, text in pages.items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"rewritten: {path.name}")


if __name__ == "__main__":
    main()
