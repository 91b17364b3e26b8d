"""Tables in a folder survive a power cut: bytes and names are on the disk before anything refers to them.

Neither Arrow nor pyiceberg nor deltalake syncs what it writes. A catalogue that is durable sooner than
the files it names would be a broken table, and Spark would never send the batch again.
"""

from __future__ import annotations

import os

from penstock.log.disk import sync_path

MOST_REMEMBERED = 10_000
_named: set[tuple[str, int]] = set()
"""Folders, with their inodes, whose own names are on the disk."""


def sync(path: str) -> None:
    """Have a file on the disk, with the names that lead to it."""
    sync_path(path)
    folder = os.path.dirname(path)
    sync_path(folder)
    if len(_named) > MOST_REMEMBERED:
        _named.clear()
    while (known := (folder, os.stat(folder).st_ino)) not in _named:
        _named.add(known)
        above = os.path.dirname(folder)
        # Where nobody may look nobody makes folders either.
        if above == folder or not os.access(above, os.R_OK):
            break
        sync_path(above)
        folder = above
