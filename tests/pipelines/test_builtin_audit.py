"""Audit verification by Spark: every kind of damage gets the verdict of `penstock audit verify` (S5, T9, X13)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.core.audit import AuditEntry, Head, Verdict
from penstock.log.audit_log import AuditLog
from penstock.log.audit_reader import AuditReader
from penstock.log.disk import RealDisk
from penstock.model.errors import Corrupted, FormatTooNew, InvalidSettings, NotADataFolder
from penstock.pipelines.builtin.audit import ParallelReader
from penstock.pipelines.testkit import run_on_rows


def entry(number: int) -> AuditEntry:
    return AuditEntry(
        at_us=1_000 + number, actor="ann", operation="dlq.replay", targets=[f"orders/0/{number}"],
        reason="because", prior={"state": "dead"}, result={"state": "queued"}, ref=number // 2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("audit")
    log = AuditLog.open(
        RealDisk(root), now_us=1, entropy=bytes(range(32)), checkpoint_every=5, max_file_bytes=3_000
    )
    for first in range(1, 40, 3):
        log.append_many([entry(number) for number in range(first, first + 3)])
    log.export(RealDisk(root / "export"), at_us=5_000)
    log.append_many([entry(50)])
    log.close()
    return root


def files(root: Path) -> list[Path]:
    return sorted((root / "audit").glob("*.ndjson"))


def rewrite(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def move(root: Path, source: int, target: int) -> None:
    lines = files(root)[source].read_bytes().splitlines(keepends=True)
    rewrite(files(root)[source], lambda found: [found[0], *found[2:]])
    rewrite(files(root)[target], lambda found: [*found, lines[1]])


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda root: None,
    "a byte in the middle": lambda root: rewrite(files(root)[2], lambda lines: [*lines[:2], lines[2].replace(b"ann", b"bob"), *lines[3:]]),
    "the first record of a file": lambda root: rewrite(files(root)[2], lambda lines: [lines[0], lines[1].replace(b"ann", b"bob"), *lines[2:]]),
    "the header of a file": lambda root: rewrite(files(root)[2], lambda lines: [lines[0].replace(b'"last_ref_count":', b'"last_ref_count":1'), *lines[1:]]),
    "no header": lambda root: rewrite(files(root)[2], lambda lines: lines[1:]),
    "the last line of a file is gone": lambda root: rewrite(files(root)[1], lambda lines: lines[:-1]),
    "the last record and its signature are gone": lambda root: rewrite(files(root)[1], lambda lines: lines[:-2]),
    "a record of the middle is gone": lambda root: rewrite(files(root)[1], lambda lines: [*lines[:3], *lines[4:]]),
    "a whole file is gone": lambda root: files(root)[2].unlink(),
    "the first file is gone": lambda root: files(root)[0].unlink(),
    "the last file is gone": lambda root: files(root)[-1].unlink(),
    "an empty file": lambda root: files(root)[2].write_bytes(b""),
    "an unreadable header": lambda root: rewrite(files(root)[2], lambda lines: [b"what\n", *lines[1:]]),
    "a record moved to a later file": lambda root: move(root, 1, 3),
    "a file renamed": lambda root: files(root)[2].rename(root / "audit" / "00000000000000000999.ndjson"),
    "a signature": lambda root: rewrite(files(root)[3], lambda lines: [line.replace(b'"signature":"', b'"signature":"0') for line in lines]),
    "no key": lambda root: (root / "audit" / "key.pub").unlink(),
    "no head": lambda root: (root / "audit" / "head.json").unlink(),
    "two things": lambda root: (DAMAGE["a byte in the middle"](root), files(root)[4].unlink()),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_verdict_is_that_of_the_command(
    spark: Any, whole: Path, tmp_path: Path, damage: str
) -> None:
    """S5, T9, X13: the first broken link is named, at boundaries and for whole files as well."""
    root = tmp_path / "copy"
    shutil.copytree(whole, root)
    DAMAGE[damage](root)
    expected = AuditReader(RealDisk(root)).verify()
    assert expected.ok == (damage == "nothing")
    assert ParallelReader(spark, str(root)).verify() == expected


def head_elsewhere(root: Path) -> Head:
    verdict: Verdict = AuditReader(RealDisk(root)).verify()
    return Head(verdict.last.sequence + 5, "0" * 64)


def test_a_head_kept_elsewhere_and_an_export_are_checked(spark: Any, whole: Path) -> None:
    """T9: a cut-off tail shows against a head; an export is verified like the folder it came from."""
    head = head_elsewhere(whole)
    expected = AuditReader(RealDisk(whole)).verify(expect_last=head)
    assert not expected.ok
    assert ParallelReader(spark, str(whole)).verify(expect_last=head) == expected
    export = AuditReader(RealDisk(whole / "export")).verify()
    assert export.ok
    assert ParallelReader(spark, str(whole / "export")).verify() == export


def test_a_broken_chain_fails_the_pipeline_or_is_reported(
    spark: Any, whole: Path, tmp_path: Path
) -> None:
    """S5: one command; its failure names the record, the file and the kind."""
    (row,) = run_on_rows("audit", spark, url=str(whole))
    assert (row["ok"], row["records"], row["files"]) == (True, 40, len(files(whole)))
    root = tmp_path / "copy"
    shutil.copytree(whole, root)
    gone = files(root)[2]
    gone.unlink()
    with pytest.raises(Corrupted, match=rf"removed.*record {int(gone.stem)} is missing"):
        run_on_rows("audit", spark, url=str(root))
    (row,) = run_on_rows("audit", spark, params={"report": True}, url=str(root))
    assert (row["ok"], row["broken_kind"], row["broken_file"]) == (False, "removed", f"audit/{gone.name}")  # fmt: skip


def test_wrong_questions_are_refused(spark: Any, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="last_hash"):
        run_on_rows("audit", spark, params={"last_sequence": 3}, url=str(whole))
    with pytest.raises(NotADataFolder):
        run_on_rows("audit", spark, url=str(tmp_path))
    root = tmp_path / "newer"
    shutil.copytree(whole, root)
    rewrite(files(root)[2], lambda lines: [lines[0].replace(b'"format":1', b'"format":9'), *lines[1:]])  # fmt: skip
    with pytest.raises(FormatTooNew):
        ParallelReader(spark, str(root)).verify()
