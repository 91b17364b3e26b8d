"""Reading the audit log: queries and verification, next to a live writer or on an exported copy."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from penstock.core.audit import (
    AuditRecord,
    Entry,
    Head,
    decode_line,
    is_intact,
    select,
)
from penstock.core.auditproof import FILE_SUFFIX, Verdict, Verifier, file_name
from penstock.log.auditexport import Fault, check_manifest, newest_manifest
from penstock.log.auditseal import (
    FOLDER,
    HEAD_PATH,
    PUBLIC_KEY_PATH,
    SavedHead,
    refuse_newer,
    unseal,
)
from penstock.log.disk import Disk, read_file
from penstock.log.manifest import Manifest
from penstock.log.segment import FOLDER as SEGMENTS
from penstock.model.errors import Corrupted, FormatTooNew

if TYPE_CHECKING:
    from collections.abc import Iterator


def damaged(path: str, line: int | None, why: str) -> Corrupted:
    """The error for an audit file that cannot be trusted."""
    where = f"{path} line {line}" if line else path
    return Corrupted(
        f"{where}: {why}; nothing was deleted. Run 'penstock audit verify' to see how far the log "
        "is sound and restore the file from an export, or move the folder audit/ away whole",
        file=path,
        line=line,
    )


def parse_line(path: str, line: int, raw: bytes) -> Entry:
    """The entry on one line of an audit file; ValueError when it is damaged."""
    if line == 1:
        refuse_newer(path, raw)
    entry = decode_line(raw)
    if isinstance(entry, AuditRecord) and not is_intact(entry):
        raise ValueError(f"record {entry.sequence} does not match its own hash")
    return entry


class AuditReader:
    """A read-only view of the audit folder of a disk.

    It sees what a live writer has written so far; a last line that is not yet complete is
    left out. It takes no lock and changes nothing.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def files(self) -> list[str]:
        """Paths of the audit files, oldest first."""
        names = self._disk.list(FOLDER)
        return [f"{FOLDER}/{name}" for name in names if name.endswith(FILE_SUFFIX)]

    def holds(self, sequence: int, hash: str) -> bool:
        """Whether the chain has that record with that hash; only its line is looked at."""
        paths = [path for path in self.files() if path <= f"{FOLDER}/{file_name(sequence)}"]
        data = b"\n" + read_file(self._disk, paths[-1]) if paths else b""
        at = data.find(b'\n{"kind":"record","sequence":%d,' % sequence)
        end = data.find(b"\n", at + 1)
        return at >= 0 and data[at:end].endswith(b'"hash":"%s"}' % hash.encode())

    def _lines(self) -> Iterator[tuple[str, int, bytes]]:
        paths = self.files()
        for path in paths:
            for number, raw in enumerate(io.BytesIO(read_file(self._disk, path)), 1):
                if raw.endswith(b"\n") or path != paths[-1]:
                    yield path, number, raw

    def _all_records(self) -> Iterator[AuditRecord]:
        for path, number, raw in self._lines():
            try:
                entry = parse_line(path, number, raw)
            except ValueError as error:
                raise damaged(path, number, str(error)) from None
            if isinstance(entry, AuditRecord):
                yield entry

    def records(
        self,
        *,
        message: str | None = None,
        actor: str | None = None,
        since_us: int | None = None,
        until_us: int | None = None,
        operation: str | None = None,
    ) -> Iterator[AuditRecord]:
        """The records that match, oldest first; each is checked against its hash.

        Whether one is missing is a question for `verify`. Corrupted names a damaged line.
        """
        return select(
            self._all_records(),
            message=message,
            actor=actor,
            since_us=since_us,
            until_us=until_us,
            operation=operation,
        )

    def verify(self, *, public_key: str | None = None, expect_last: Head | None = None) -> Verdict:
        """Walk the whole log; the verdict names the first broken link, or a file that is gone.

        Give the public key and a head that were kept elsewhere to be safe from somebody who can
        rewrite the whole folder.
        """
        # The head first: a live writer writes it after the records it speaks of.
        saved = self._read(HEAD_PATH)
        key = public_key or self._read(PUBLIC_KEY_PATH).decode("ascii", "replace").strip()
        verifier = Verifier(public_key=key or None)
        if expect_last is not None:
            verifier.expect(expect_last)
        faults = [
            *self._check_mark(key, verifier),
            *self._check_head(saved, key, verifier),
            *self._check_export(key, verifier),
        ]
        self._feed(verifier)
        for fault in faults:
            verifier.fail(fault.kind, fault.explanation, file=fault.file)
        return verifier.finish()

    def _read(self, path: str) -> bytes:
        return read_file(self._disk, path) if self._disk.exists(path) else b""

    def _check_mark(self, key: str, verifier: Verifier) -> Iterator[Fault]:
        """The manifest of the segments knows how far the chain reached: it is in another folder."""
        try:
            manifest = Manifest.load(self._disk)
        except (Corrupted, FormatTooNew) as error:
            yield Fault(
                "changed", SEGMENTS, f"how far the chain reached is unknown: {error.message}"
            )
            return
        manifest.close()
        mark = manifest.audit
        if mark is None:
            return
        if not self.files():
            yield Fault("removed", FOLDER, f"the chain is gone: {mark.sequence} records were in it")
        elif key and mark.public_key != key:
            yield Fault(
                "removed",
                FOLDER,
                f"another chain is in its place: the one of key {mark.public_key[:16]}..., which had "
                f"{mark.sequence} records, is gone",
            )
        else:
            verifier.expect(Head(mark.sequence, mark.hash))

    def _check_head(self, saved: bytes, key: str, verifier: Verifier) -> Iterator[Fault]:
        if not key and (saved or self.files()):
            yield Fault("removed", PUBLIC_KEY_PATH, "the public key is missing")
        elif saved:
            refuse_newer(HEAD_PATH, saved)
            head = unseal(saved, SavedHead, key)
            if head is None:
                yield Fault("bad-signature", HEAD_PATH, "the head is not signed by the key")
            else:
                verifier.expect(Head(head.sequence, head.hash, head.file, head.checkpoint))
        elif key and newest_manifest(self._disk) is None:
            yield Fault("removed", HEAD_PATH, "the head is missing")

    def _check_export(self, key: str, verifier: Verifier) -> Iterator[Fault]:
        path = newest_manifest(self._disk)
        if path is not None:
            manifest, fault = check_manifest(self._disk, path, key)
            if manifest is not None:
                last = manifest.files[-1].path if manifest.files else None
                verifier.expect(Head(manifest.sequence, manifest.hash, last))
            if fault is not None:
                yield fault

    def _feed(self, verifier: Verifier) -> None:
        seen = set()
        for path, number, raw in self._lines():
            seen.add(path)
            if number == 1:
                refuse_newer(path, raw)
            try:
                entry = decode_line(raw)
            except ValueError as error:
                verifier.fail(
                    "changed", f"the line cannot be read: {error}", file=path, line=number
                )
            else:
                verifier.feed(entry, file=path, line=number)
        for path in self.files():
            if path not in seen:
                verifier.fail("removed", "the file is empty", file=path)
