"""Signed JSON documents of the audit folder: the saved head and the manifest of an export.

A sealed document is one line of JSON whose last field is the Ed25519 signature over a tag and
the same line with that field empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from penstock.core.audit import FORMAT, is_signed
from penstock.log.disk import read_file
from penstock.model.errors import FormatTooNew

if TYPE_CHECKING:
    from penstock.core.audit import Signer
    from penstock.log.disk import Disk

FOLDER = "audit"
HEAD_PATH = f"{FOLDER}/head.json"
KEY_PATH = f"{FOLDER}/key"
PUBLIC_KEY_PATH = f"{FOLDER}/key.pub"
IDENTITY_DIGITS = 16  # 64 bits: two buses of one owner are never alike


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


def _signed_bytes(document: SavedHead | AuditManifest) -> bytes:
    unsigned = msgspec.structs.replace(document, signature="")
    return _TAGS[type(document)] + msgspec.json.encode(unsigned)


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
