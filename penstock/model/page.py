"""How much of a list is shown at once, over HTTP and by the command line alike."""

from __future__ import annotations

MAX_PAGE = 10_000  # rows of one answer: about 3 MB of JSON, made in well under 100 ms
MAX_SKIP = 1_000_000  # rows before a page; who wants more should filter
