"""Copies of the audit log for write-once storage, each with a signed list of what it holds.

Only finished files are copied, and a finished file never changes, so one target takes export
after export without anything on it ever being rewritten.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.core.audit import FORMAT, Head, Signer
from penstock.log.auditseal import (
    FOLDER,
    PUBLIC_KEY_PATH,
    AuditManifest,
    ExportedFile,
    refuse_newer,
    seal,
    sealed_bytes,
    unseal,
)
from penstock.log.disk import Disk, read_file, write_file
from penstock.model.errors import WriteOnce

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.auditproof import Kind


class Fault(NamedTuple):
    """Something wrong with a whole file."""

    kind: Kind
    file: str
    explanation: str


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
) -> tuple[AuditManifest | None, Fault | None]:
    """Compare an export with its manifest: the manifest if it is genuine, and what is wrong."""
    data = read_file(disk, path)
    refuse_newer(path, data)
    manifest = unseal(data, AuditManifest, public_key)
    if manifest is None:
        return None, Fault("bad-signature", path, "the manifest is not signed by the key")
    for file in manifest.files:
        if not disk.exists(file.path):
            return manifest, Fault("removed", file.path, "the manifest names it, it is missing")
        if hashlib.sha256(read_file(disk, file.path)).hexdigest() != file.sha256:
            return manifest, Fault("changed", file.path, "it has another SHA-256 than the manifest")
    return manifest, None
