"""Reading the audit log: queries, verification and exports, next to a live writer or on an exported copy.

An export copies finished files to write-once storage, with a signed list of its content. A finished
file never changes, so one target takes export after export without rewriting anything.

The saved head and the list of an export are signed documents: one line of JSON whose last field is
the Ed25519 signature over a tag and the same line with that field empty.
"""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from penstock.core.audit import (
    FILE_SUFFIX,
    FORMAT,
    AuditRecord,
    Entry,
    Head,
    Signer,
    Verdict,
    Verifier,
    decode_line,
    file_name,
    is_intact,
    is_signed,
    select,
)
from penstock.log.disk import Disk, read_file, write_file
from penstock.log.manifest import Manifest
from penstock.log.segment import FOLDER as SEGMENTS
from penstock.model.errors import Corrupted, FormatTooNew, WriteOnce

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.audit import Kind

FOLDER = "audit"
HEAD_PATH = f"{FOLDER}/head.json"
KEY_PATH = f"{FOLDER}/key"
PUBLIC_KEY_PATH = f"{FOLDER}/key.pub"
IDENTITY_DIGITS = 16  # 64 bits: two buses of one owner are never alike


# -- reading --------------------------------------------------------------------------------------


class BrokenLink(NamedTuple):
    """Something wrong with a whole file."""

    kind: Kind
    file: str
    explanation: str


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

        Give the public key and a head that were kept elsewhere to be safe from anyone who can
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

    def _check_mark(self, key: str, verifier: Verifier) -> Iterator[BrokenLink]:
        """The manifest of the segments knows how far the chain reached: it is in another folder."""
        try:
            manifest = Manifest.load(self._disk)
        except (Corrupted, FormatTooNew) as error:
            yield BrokenLink(
                "changed", SEGMENTS, f"how far the chain reached is unknown: {error.message}"
            )
            return
        manifest.close()
        mark = manifest.audit
        if mark is None:
            return
        if not self.files():
            yield BrokenLink(
                "removed", FOLDER, f"the chain is gone: {mark.sequence} records were in it"
            )
        elif key and mark.public_key != key:
            yield BrokenLink(
                "removed",
                FOLDER,
                f"another chain is in its place: the one of key {mark.public_key[:16]}..., which had "
                f"{mark.sequence} records, is gone",
            )
        else:
            verifier.expect(Head(mark.sequence, mark.hash))

    def _check_head(self, saved: bytes, key: str, verifier: Verifier) -> Iterator[BrokenLink]:
        if not key and (saved or self.files()):
            yield BrokenLink("removed", PUBLIC_KEY_PATH, "the public key is missing")
        elif saved:
            refuse_newer(HEAD_PATH, saved)
            head = unseal(saved, SavedHead, key)
            if head is None:
                yield BrokenLink("bad-signature", HEAD_PATH, "the head is not signed by the key")
            else:
                verifier.expect(Head(head.sequence, head.hash, head.file, head.checkpoint))
        elif key and newest_manifest(self._disk) is None:
            yield BrokenLink("removed", HEAD_PATH, "the head is missing")

    def _check_export(self, key: str, verifier: Verifier) -> Iterator[BrokenLink]:
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


def identity_of(public_key: str) -> str:
    """What tells a bus from every other: a folder keeps one audit key for life, and a copy has it too.

    >>> identity_of("3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29")
    '3b6a27bcceb6a42d'
    """
    return public_key[:IDENTITY_DIGITS]


def read_identity(disk: Disk) -> str:
    """The identity of the bus in a folder; empty while its first writer has not made the key."""
    if not disk.exists(PUBLIC_KEY_PATH):
        return ""
    return identity_of(read_file(disk, PUBLIC_KEY_PATH).decode("ascii", "replace").strip())


# -- exports --------------------------------------------------------------------------------------


def manifest_path(sequence: int) -> str:
    """Where the manifest of an export up to that record lies.

    >>> manifest_path(7)
    'audit/manifest-00000000000000000007.json'
    """
    return f"{FOLDER}/manifest-{sequence:020d}.json"


def export_files(
    source: Disk, target: Disk, paths: Sequence[str], *, head: Head, signer: Signer, at_us: int
) -> AuditManifest:
    """Copy finished audit files and the public key to `target`, then write the signed manifest.

    Files that are there already with the same content are left alone; another content is refused
    with WriteOnce, since one of the two must have been tampered with.
    """
    target.make_dir(FOLDER)
    files = [_copy(source, target, path) for path in paths]
    _copy(source, target, PUBLIC_KEY_PATH)
    path = manifest_path(head.sequence)
    if target.exists(path):
        return msgspec.json.decode(read_file(target, path), type=AuditManifest)
    manifest = AuditManifest(FORMAT, at_us, head.sequence, head.hash, files, signer.public_key)
    manifest = seal(manifest, signer)
    write_file(target, path, [sealed_bytes(manifest)])
    return manifest


def _copy(source: Disk, target: Disk, path: str) -> ExportedFile:
    data = read_file(source, path)
    if not target.exists(path):
        write_file(target, path, [data])
    elif read_file(target, path) != data:
        raise WriteOnce(
            f"the export target holds another {path}; nothing on it was changed. "
            "Verify both copies with 'penstock audit verify', or export to an empty place",
            file=path,
        )
    return ExportedFile(path, len(data), hashlib.sha256(data).hexdigest())


def newest_manifest(disk: Disk) -> str | None:
    """The path of the latest manifest in a folder; None when it is no export."""
    names = [name for name in disk.list(FOLDER) if name.startswith("manifest-")]
    names = [name for name in names if name.endswith(".json")]
    return f"{FOLDER}/{names[-1]}" if names else None


def check_manifest(
    disk: Disk, path: str, public_key: str
) -> tuple[AuditManifest | None, BrokenLink | None]:
    """Compare an export with its manifest: the manifest if it is genuine, and what is wrong."""
    data = read_file(disk, path)
    refuse_newer(path, data)
    manifest = unseal(data, AuditManifest, public_key)
    if manifest is None:
        return None, BrokenLink("bad-signature", path, "the manifest is not signed by the key")
    for file in manifest.files:
        if not disk.exists(file.path):
            return manifest, BrokenLink(
                "removed", file.path, "the manifest names it, it is missing"
            )
        if hashlib.sha256(read_file(disk, file.path)).hexdigest() != file.sha256:
            return manifest, BrokenLink(
                "changed", file.path, "it has another SHA-256 than the manifest"
            )
    return manifest, None


# -- signed documents -----------------------------------------------------------------------------


class SavedHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of head.json: how far the log reached when it was written, and in which file."""

    format: int
    at_us: int
    sequence: int
    hash: str
    checkpoint: int
    file: str
    public_key: str
    signature: str = ""


class ExportedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One copied file: its path, length and SHA-256."""

    path: str
    size_bytes: int
    sha256: str


class AuditManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one export holds, and up to which record."""

    format: int
    at_us: int
    sequence: int
    hash: str
    files: list[ExportedFile]
    public_key: str
    signature: str = ""


Document = TypeVar("Document", SavedHead, AuditManifest)

_TAGS: dict[type, bytes] = {
    SavedHead: b"penstock.audit.head.1\n",
    AuditManifest: b"penstock.audit.manifest.1\n",
}


def seal(document: Document, signer: Signer) -> Document:
    """The document with its signature.

    >>> from penstock.core.audit import GENESIS, Signer
    >>> signer = Signer(bytes(32))
    >>> head = seal(SavedHead(1, 0, 0, GENESIS, 0, "audit/x.ndjson", signer.public_key), signer)
    >>> unseal(sealed_bytes(head), SavedHead, signer.public_key) == head
    True
    """
    return msgspec.structs.replace(document, signature=signer.sign(_signed_bytes(document)))


def sealed_bytes(document: SavedHead | AuditManifest) -> bytes:
    """The file a sealed document is stored as."""
    return msgspec.json.encode(document) + b"\n"


def unseal(data: bytes, kind: type[Document], public_key: str) -> Document | None:
    """The document in a file; None unless it is whole and signed by that key."""
    try:
        document = msgspec.json.decode(data, type=kind)
    except ValueError:
        return None
    exact = sealed_bytes(document) == data and document.public_key == public_key
    if exact and is_signed(_signed_bytes(document), public_key, document.signature):
        return document
    return None


def _signed_bytes(document: SavedHead | AuditManifest) -> bytes:
    unsigned = msgspec.structs.replace(document, signature="")
    return _TAGS[type(document)] + msgspec.json.encode(unsigned)


class _Versioned(msgspec.Struct):
    format: int = 0


def refuse_newer(path: str, data: bytes) -> None:
    """Raise FormatTooNew if the JSON object in `data` says that it is."""
    try:
        version = msgspec.json.decode(data, type=_Versioned).format
    except ValueError:
        return
    if version > FORMAT:
        raise FormatTooNew(
            f"{path} has audit format {version}, this Penstock reads up to {FORMAT}. "
            "Nothing was changed; install a newer Penstock",
            file=path,
            format=version,
        )
