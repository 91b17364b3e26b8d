"""Removal of files that no table lists: what attempts, copies and compactions leave behind."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from pyarrow.fs import FileSelector, FileType

from penstock.pipelines.lakehouse.warehouse import filesystem


def remove_old(
    folder: str,
    listed: Iterable[str],
    properties: Mapping[str, str],
    *,
    keep_s: float,
    suffix: str = "",
) -> int:
    """Delete files that are not listed, unless a writer or a reader may have them; returns how many.

    The last folder and the name tell files apart: libraries write whole paths differently.
    """
    fs, found = _files(folder, properties)
    kept = {_last_words(each) for each in listed}
    removed = 0
    for each in found:
        old = time.time() - each.mtime.timestamp() > keep_s
        if old and each.path.endswith(suffix) and _last_words(each.path) not in kept:
            fs.delete_file(each.path)
            removed += 1
    return removed


def remove_others(folder: str, listed: Iterable[str], properties: Mapping[str, str]) -> int:
    """Delete the files of a batch's attempts that a table lists nothing of; returns how many went.

    Where it lists none of the batch, its files were compacted, and older snapshots still need those
    of one attempt: all stay until they are old. Attempts are told apart by their names, for
    libraries write whole paths differently, and a file that is wrongly taken for unlisted is gone.
    """
    fs, found = _files(folder, properties)
    files = [each.path for each in found]
    kept = {_attempt(each) for each in listed}
    others = [each for each in files if _attempt(each) not in kept]
    if len(others) == len(files):
        return 0
    for each in others:
        fs.delete_file(each)
    return len(others)


def _attempt(path: str) -> str:
    return path.rsplit("/", 2)[1]


def _last_words(path: str) -> tuple[str, ...]:
    return tuple(path.rsplit("/", 2)[1:])


def _files(folder: str, properties: Mapping[str, str]) -> tuple[Any, list[Any]]:
    fs, path = filesystem(folder, properties)
    chosen = FileSelector(path, recursive=True, allow_not_found=True)
    return fs, [each for each in fs.get_file_info(chosen) if each.type == FileType.File]
