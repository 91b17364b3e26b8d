"""The audit log on disk survives crashes, and names every missing piece (row T9)."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.audit import AuditEntry, Head
from penstock.log.audit_log import AuditLog
from penstock.log.audit_reader import AuditReader
from penstock.log.disk import Bytes, RealDisk, RealFile
from penstock.model.errors import (
    Corrupted,
    DiskFull,
    FormatTooNew,
    InvalidInput,
    InvalidSettings,
    WriteOnce,
    WriterFailed,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SEED = bytes(range(32))


def entry(number: int, **changes: Any) -> AuditEntry:
    values: dict[str, Any] = {
        "at_us": 1_000 + number,
        "actor": f"actor-{number % 3}",
        "operation": "dlq.replay",
        "targets": [f"orders/0/{number}"],
        "reason": "because",
        "prior": {"state": "dead"},
        "result": {"state": "queued"},
        "ref": number,
    }
    return AuditEntry(**(values | changes))


def entries(first: int, count: int) -> list[AuditEntry]:
    return [entry(number) for number in range(first, first + count)]


def open_log(root: Path, **options: Any) -> AuditLog:
    return AuditLog.open(RealDisk(root), **({"now_us": 1, "entropy": SEED} | options))


def filled(root: Path, count: int = 30, *, close: bool = True, **options: Any) -> AuditLog:
    """Three records a call; with the default options here, several files."""
    log = open_log(root, **({"checkpoint_every": 5, "max_file_bytes": 3_000} | options))
    for first in range(1, count + 1, 3):
        log.append_many(entries(first, min(3, count + 1 - first)))
    if close:
        log.close()
    return log


def paths(root: Path) -> list[Path]:
    return sorted((root / "audit").glob("*.ndjson"))


def broken(root: Path, **options: Any) -> tuple[str, int, str | None]:
    found = AuditReader(RealDisk(root)).verify(**options).broken
    assert found is not None
    assert found.explanation
    return found.kind, found.sequence, found.file


def first_sequence(path: Path) -> int:
    return int(path.stem)


def test_append_close_reopen_goes_on(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert [record.sequence for record in log.append_many(entries(1, 3))] == [1, 2, 3]
    assert log.append_many([]) == []
    log.close()
    log = open_log(tmp_path, entropy=None)
    assert log.torn is None
    assert (log.last_ref, log.head.sequence) == (3, 3)
    assert log.append_many([entry(4)])[0].sequence == 4
    assert [record.ref for record in log.records()] == [1, 2, 3, 4]
    assert log.verify().ok
    log.close()
    verdict = AuditReader(RealDisk(tmp_path)).verify()
    assert verdict.ok
    assert (verdict.records, verdict.checkpoints) == (4, 2)


def test_lines_are_readable_and_rotation_keeps_order(tmp_path: Path) -> None:
    """T9: rotation that keeps order."""
    filled(tmp_path)
    files = paths(tmp_path)
    assert len(files) > 3
    assert files[0].name == "00000000000000000001.ndjson"
    sequences = []
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert (lines[0]["kind"], lines[0]["first_sequence"]) == ("header", first_sequence(file))
        sequences += [line["sequence"] for line in lines if line["kind"] == "record"]
    assert sequences == list(range(1, 31))
    verdict = AuditReader(RealDisk(tmp_path)).verify()
    assert verdict.ok
    assert verdict.records == 30


def test_query(tmp_path: Path) -> None:
    """T9: query by message, actor, time window."""
    log = filled(tmp_path, close=False)
    assert [record.ref for record in log.records(message="orders/0/7")] == [7]
    assert [r.ref for r in log.records(actor="actor-1", since_us=1_010, until_us=1_020)] == [
        10, 13, 16, 19,
    ]  # fmt: skip
    assert list(log.records(operation="none")) == []
    log.close()


@pytest.mark.parametrize("which", [0, 1, -2, -1])
def test_removed_file_is_named(tmp_path: Path, which: int) -> None:
    """T9: a removed file, first, middle or last, is named."""
    filled(tmp_path)
    gone = paths(tmp_path)[which]
    gone.unlink()
    assert broken(tmp_path) == ("removed", first_sequence(gone), f"audit/{gone.name}")


def test_removed_last_file_without_records_is_named(tmp_path: Path) -> None:
    log = filled(tmp_path, close=False)
    log.export(RealDisk(tmp_path / "worm"), at_us=9)
    log.close()
    gone = paths(tmp_path)[-1]
    assert gone.read_bytes().count(b"\n") == 1
    gone.unlink()
    assert broken(tmp_path) == ("removed", 31, f"audit/{gone.name}")
    with pytest.raises(Corrupted, match=gone.name):
        open_log(tmp_path)


def test_all_files_removed(tmp_path: Path) -> None:
    filled(tmp_path)
    for file in paths(tmp_path):
        file.unlink()
    assert broken(tmp_path) == ("removed", 1, "audit/00000000000000000001.ndjson")
    with pytest.raises(Corrupted):
        open_log(tmp_path)


def test_cut_tail_of_a_middle_file_names_that_file(tmp_path: Path) -> None:
    filled(tmp_path)
    file = paths(tmp_path)[1]
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]))
    assert broken(tmp_path) == ("removed", first_sequence(file) + 1, f"audit/{file.name}")


def test_cut_tail_of_the_last_file_is_truncated(tmp_path: Path) -> None:
    filled(tmp_path)
    file = paths(tmp_path)[-1]
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]))
    assert broken(tmp_path) == ("truncated", first_sequence(file) + 1, f"audit/{file.name}")
    with pytest.raises(Corrupted, match=r"head\.json"):
        open_log(tmp_path)


def test_swapped_file_names(tmp_path: Path) -> None:
    filled(tmp_path)
    one, two = paths(tmp_path)[1:3]
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    assert broken(tmp_path) == ("reordered", first_sequence(one), f"audit/{one.name}")


def test_removed_or_repeated_header(tmp_path: Path) -> None:
    filled(tmp_path)
    file = paths(tmp_path)[1]
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[1:]))
    assert broken(tmp_path) == ("removed", first_sequence(file), f"audit/{file.name}")
    file.write_bytes(b"".join([*lines[:2], lines[0], *lines[2:]]))
    assert broken(tmp_path) == ("duplicated", first_sequence(file) + 1, f"audit/{file.name}")


@pytest.mark.parametrize(
    "field", ["format", "prev_hash", "previous_file", "last_ref", "last_ref_count"]
)
def test_changed_header(tmp_path: Path, field: str) -> None:
    filled(tmp_path)
    file = paths(tmp_path)[2]
    header, rest = file.read_bytes().split(b"\n", 1)
    values = json.loads(header)
    values[field] = "1" * 64 if field == "prev_hash" else abs(values[field] - 1)
    file.write_bytes(json.dumps(values, separators=(",", ":")).encode() + b"\n" + rest)
    kind, _, named = broken(tmp_path)
    assert (kind, named) == ("changed", f"audit/{file.name}")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_flipped_bit_is_found_and_its_file_named(data: st.DataObject) -> None:
    """T9: the first broken link is named, whatever byte of whatever file changed."""
    with tempfile.TemporaryDirectory() as folder:
        filled(Path(folder), 12)
        check_one_flip(Path(folder), data)


def check_one_flip(root: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from([*paths(root), root / "audit/head.json"]))
    content = bytearray(file.read_bytes())
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    if b'"format":1,' not in content and b'"format":' in content:
        return  # another format number: test_newer_format_is_refused
    verdict = AuditReader(RealDisk(root)).verify()
    assert verdict.broken is not None
    if file != paths(root)[-1]:
        assert verdict.broken.file == f"audit/{file.name}"


def test_missing_head_and_key_are_named(tmp_path: Path) -> None:
    filled(tmp_path)
    head, key = tmp_path / "audit/head.json", tmp_path / "audit/key.pub"
    saved = head.read_bytes()
    head.unlink()
    assert broken(tmp_path)[::2] == ("removed", "audit/head.json")
    with pytest.raises(Corrupted, match=r"head\.json"):
        open_log(tmp_path)
    head.write_bytes(saved)
    key.unlink()
    assert broken(tmp_path)[::2] == ("removed", "audit/key.pub")


def test_an_older_head_is_true_and_a_foreign_one_is_not(tmp_path: Path) -> None:
    filled(tmp_path / "a", close=False)
    older = (tmp_path / "a/audit/head.json").read_bytes()
    filled(tmp_path / "b")
    (tmp_path / "b/audit/head.json").write_bytes(older)
    assert AuditReader(RealDisk(tmp_path / "b")).verify().ok
    filled(tmp_path / "c", entropy=bytes(32))
    (tmp_path / "c/audit/head.json").write_bytes(older)
    assert broken(tmp_path / "c")[::2] == ("bad-signature", "audit/head.json")
    with pytest.raises(Corrupted, match="signed"):
        open_log(tmp_path / "c")


def test_head_and_key_kept_elsewhere_defeat_a_full_rewrite(tmp_path: Path) -> None:
    log = filled(tmp_path / "a", close=False)
    kept, key = log.head, log.public_key
    log.close()
    forged = open_log(tmp_path / "b", entropy=bytes(32))
    forged.append_many(entries(1, 20))
    forged.close()
    disk = RealDisk(tmp_path / "b")
    assert AuditReader(disk).verify().ok
    assert not AuditReader(disk).verify(expect_last=Head(kept.sequence, kept.hash)).ok
    assert broken(tmp_path / "b", public_key=key)[0] == "bad-signature"


def test_nothing_there_is_an_empty_log(tmp_path: Path) -> None:
    verdict = AuditReader(RealDisk(tmp_path)).verify()
    assert (verdict.ok, verdict.records) == (True, 0)


def test_torn_tail_at_every_byte(tmp_path: Path) -> None:
    """A crash in the middle of an append: cut off, reported, re-appended without doubles."""
    log = open_log(tmp_path)
    log.append_many(entries(1, 2))
    file = paths(tmp_path)[0]
    sound = file.stat().st_size
    log.append_many([entry(3), entry(4, ref=4), entry(5, ref=4)])
    content = file.read_bytes()
    for size in range(sound, len(content) + 1, 7):
        file.write_bytes(content[:size])
        log = open_log(tmp_path)
        complete = content[:size].rfind(b"\n") + 1
        lost = size - complete
        assert (log.torn.lost_bytes if log.torn else 0) == lost
        assert file.stat().st_size == complete
        log.append_missing([*entries(1, 3), entry(4, ref=4), entry(5, ref=4)])
        log.append_missing([*entries(1, 3), entry(4, ref=4), entry(5, ref=4)])
        assert [record.targets for record in log.records()] == [
            [f"orders/0/{number}"] for number in range(1, 6)
        ]
        assert log.verify().ok
        log._file.close()


def scramble(file: Path, line: int) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    lines[line] = bytes(len(lines[line]))
    file.write_bytes(b"".join(lines))


@pytest.mark.parametrize("line", [3, 4, 5])
def test_lost_page_inside_the_last_write_is_a_torn_tail(tmp_path: Path, line: int) -> None:
    """Pages of one unsynced write may reach the disk in any order."""
    log = open_log(tmp_path)
    log.append_many(entries(1, 2))
    log.append_many(entries(3, 3))
    file = paths(tmp_path)[0]
    scramble(file, line)
    log = open_log(tmp_path)
    assert log.torn is not None
    assert log.head.sequence == line - 1
    log.close()


@pytest.mark.parametrize("line", [1, 2])
def test_damage_before_the_last_write_is_refused(tmp_path: Path, line: int) -> None:
    log = open_log(tmp_path)
    log.append_many(entries(1, 2))
    log.append_many(entries(3, 3))
    file = paths(tmp_path)[0]
    scramble(file, line)
    content = file.read_bytes()
    with pytest.raises(Corrupted) as caught:
        open_log(tmp_path)
    assert (caught.value.file, caught.value.line) == (f"audit/{file.name}", line + 1)
    assert file.read_bytes() == content


def test_damaged_checkpoint_before_a_later_write_is_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    head = tmp_path / "audit/head.json"
    older = head.read_bytes()
    log.append_many(entries(1, 2))
    log.checkpoint(at_us=5)
    log.append_many(entries(3, 1))
    head.write_bytes(older)
    scramble(paths(tmp_path)[0], 3)
    with pytest.raises(Corrupted):
        open_log(tmp_path)


def test_torn_end_that_the_head_knew_is_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append_many(entries(1, 2))
    log.checkpoint(at_us=5)
    scramble(paths(tmp_path)[0], 2)
    with pytest.raises(Corrupted):
        open_log(tmp_path)


def test_intact_line_in_the_wrong_place_is_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append_many(entries(1, 4))
    file = paths(tmp_path)[0]
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(Corrupted, match="follow record 1"):
        open_log(tmp_path)


def test_damaged_record_is_never_served(tmp_path: Path) -> None:
    log = filled(tmp_path, close=False)
    file = paths(tmp_path)[1]
    file.write_bytes(file.read_bytes().replace(b"because", b"BECAUSE", 1))
    with pytest.raises(Corrupted) as caught:
        list(log.records())
    assert caught.value.file == f"audit/{file.name}"
    log.close()


def test_reader_leaves_out_a_line_in_the_making(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append_many(entries(1, 2))
    file = paths(tmp_path)[0]
    file.write_bytes(file.read_bytes() + b'{"kind":"rec')
    reader = AuditReader(RealDisk(tmp_path))
    assert len(list(reader.records())) == 2
    assert reader.verify().ok


def test_replay_needs_a_journal_position(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    with pytest.raises(InvalidInput):
        log.append_missing([entry(1, ref=0)])
    log.append_many([entry(1, ref=0), entry(2, ref=7), entry(3, ref=0)])
    assert log.last_ref == 7
    assert log.append_missing([entry(2, ref=7)]) == []
    log.close()


def test_refs_survive_rotation(tmp_path: Path) -> None:
    log = open_log(tmp_path, max_file_bytes=1)
    log.append_many([entry(1, ref=5), entry(2, ref=5)])
    log.append_many([entry(3, ref=0)])
    log.close()
    log = open_log(tmp_path, max_file_bytes=1)
    log.append_missing([entry(1, ref=5), entry(2, ref=5), entry(4, ref=5)])
    assert [record.targets[0][-1] for record in log.records()] == ["1", "2", "3", "4"]
    assert log.verify().ok
    log.close()


def test_bad_entry_records_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    with pytest.raises(InvalidInput):
        log.append_many([entry(1), entry(2, actor="\ud800")])
    assert list(log.records()) == []
    assert log.append_many([entry(1)])[0].sequence == 1
    log.close()


class FaultyFile(RealFile):
    """Fails as told by its disk, after writing half of what it was given."""

    faults: dict[str, int]

    def append(self, parts: Sequence[Bytes]) -> None:
        if "append" in self.faults:
            data = b"".join(parts)
            super().append([data[: len(data) // 2]])
            raise OSError(self.faults["append"], "told to")
        super().append(parts)

    def sync(self) -> None:
        if "sync" in self.faults:
            raise OSError(self.faults["sync"], "told to")
        super().sync()


class FaultyDisk(RealDisk):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.faults: dict[str, int] = {}

    def open(self, path: str, *, create: bool = False, write: bool = False) -> RealFile:
        flags = os.O_RDWR if create or write else os.O_RDONLY
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        file = FaultyFile(os.open(self.root / path, flags, 0o640))
        file.faults = self.faults
        return file


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_keeps_the_log_usable(tmp_path: Path, full: int) -> None:
    """A quota that is used up is as good as a full disk: there will be room again."""
    disk = FaultyDisk(tmp_path)
    log = AuditLog.open(disk, now_us=1, entropy=SEED, max_file_bytes=1_000, checkpoint_every=2)
    log.append_many(entries(1, 1))
    disk.faults["append"] = full
    for _ in range(3):
        with pytest.raises(DiskFull) as caught:
            log.append_many(entries(2, 5))
        assert caught.value.retry_after_s > 0
    assert [record.ref for record in log.records()] == [1]
    disk.faults.clear()
    log.append_many(entries(2, 5))
    disk.faults["append"] = full
    with pytest.raises(DiskFull):
        log.append_many(entries(7, 1))
    disk.faults.clear()
    log.append_many(entries(7, 1))
    assert len(paths(tmp_path)) == 2
    assert [record.ref for record in log.records()] == list(range(1, 8))
    log.close()
    assert AuditReader(disk).verify().ok


@pytest.mark.parametrize(
    "fault", [("sync", errno.EIO), ("sync", errno.ENOSPC), ("append", errno.EIO)]
)
def test_failed_write_is_final(tmp_path: Path, fault: tuple[str, int]) -> None:
    """A failed fsync is fatal to the writer, never retried as if it had worked."""
    disk = FaultyDisk(tmp_path)
    log = AuditLog.open(disk, now_us=1, entropy=SEED)
    log.append_many(entries(1, 1))
    disk.faults[fault[0]] = fault[1]
    with pytest.raises(WriterFailed):
        log.append_many(entries(2, 1))
    disk.faults.clear()
    with pytest.raises(WriterFailed):
        log.append_many(entries(2, 1))
    log.close()
    log = AuditLog.open(disk, now_us=1)
    log.append_missing(entries(1, 2))
    assert [record.ref for record in log.records()] == [1, 2]
    assert log.verify().ok
    log.close()
    with pytest.raises(WriterFailed, match="closed"):
        log.append_many(entries(3, 1))


def test_one_sync_for_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path)
    syncs: list[int] = []
    monkeypatch.setattr(RealFile, "sync", lambda self: syncs.append(1))
    log.append_many(entries(1, 50))
    assert len(syncs) == 1
    log.close()


def test_keys(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="needs a key"):
        open_log(tmp_path, entropy=None)
    with pytest.raises(InvalidSettings):
        open_log(tmp_path, entropy=b"short")
    log = open_log(tmp_path)
    public = log.public_key
    log.close()
    key = tmp_path / "audit/key"
    assert bytes.fromhex(key.read_text()) == SEED
    with pytest.raises(InvalidSettings, match="not the one"):
        open_log(tmp_path, key=bytes(32))
    key.unlink()
    with pytest.raises(Corrupted, match="signing key is missing"):
        open_log(tmp_path, entropy=bytes(32))
    log = open_log(tmp_path, key=SEED, entropy=None)
    assert log.public_key == public
    log.close()
    assert not key.exists(), "a key that comes from outside stays outside"
    key.write_text("nonsense")
    with pytest.raises(Corrupted, match="not a key"):
        open_log(tmp_path)


@pytest.mark.parametrize("options", [{"checkpoint_every": 0}, {"max_file_bytes": 0}])
def test_settings_out_of_range(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(InvalidSettings):
        open_log(tmp_path, **options)


def test_newer_format_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    for file in (paths(tmp_path)[0], tmp_path / "audit/head.json"):
        content = file.read_bytes()
        file.write_bytes(content.replace(b'"format":1', b'"format":2,"new":0'))
        with pytest.raises(FormatTooNew):
            open_log(tmp_path)
        with pytest.raises(FormatTooNew):
            AuditReader(RealDisk(tmp_path)).verify()
        file.write_bytes(content)


def test_interrupted_beginning(tmp_path: Path) -> None:
    """A crash between the key, the head and the first file leaves nothing that cannot be opened."""
    open_log(tmp_path).close()
    for name in ("00000000000000000001.ndjson", "head.json", "key.pub"):
        (tmp_path / "audit" / name).unlink()
        log = open_log(tmp_path, entropy=None)
        assert log.head.sequence == 0
        log.close()
        (tmp_path / "audit/00000000000000000001.ndjson").unlink()


def test_export_and_export_again(tmp_path: Path) -> None:
    """T9: export to write-once storage: nothing on the target is ever rewritten."""
    target = tmp_path / "worm"
    log = filled(tmp_path, close=False)
    first = log.export(RealDisk(target), at_us=50)
    assert log.export(RealDisk(target), at_us=51) == first
    before = {file.name: file.read_bytes() for file in (target / "audit").iterdir()}
    assert "key" not in before
    log.append_many(entries(31, 4))
    second = log.export(RealDisk(target), at_us=60)
    assert (first.sequence, second.sequence) == (30, 34)
    for name, content in before.items():
        assert (target / "audit" / name).read_bytes() == content
    log.append_many(entries(35, 1))
    log.close()
    reader = AuditReader(RealDisk(target))
    verdict = reader.verify(public_key=log.public_key)
    assert verdict.ok
    assert verdict.records == 34
    assert len(list(reader.records())) == 34
    assert AuditReader(RealDisk(tmp_path)).verify().ok


def test_damaged_exports_are_found(tmp_path: Path) -> None:
    log = filled(tmp_path, close=False)
    for what in ("last", "manifest", "file", "trailing"):
        target = tmp_path / what
        log.export(RealDisk(target), at_us=50)
        files = paths(target)
        manifest = next((target / "audit").glob("manifest-*"))
        if what == "last":
            files[-1].unlink()
            assert broken(target)[::2] == ("removed", f"audit/{files[-1].name}")
        elif what == "manifest":
            manifest.write_bytes(manifest.read_bytes().replace(b'"at_us":50', b'"at_us":51'))
            assert broken(target)[::2] == ("bad-signature", f"audit/{manifest.name}")
        elif what == "file":
            files[0].write_bytes(files[0].read_bytes().replace(b"because", b"BECAUSE"))
            assert broken(target)[::2] == ("changed", f"audit/{files[0].name}")
            with pytest.raises(WriteOnce):
                log.export(RealDisk(target), at_us=52)
        else:
            files[-1].write_bytes(files[-1].read_bytes() + b"{")
            assert broken(target)[::2] == ("changed", f"audit/{files[-1].name}")
    log.close()


def test_what_a_dead_writer_left_is_synced_on_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`last_ref` lets the engine drop journal entries, so it may name durable records only."""
    log = open_log(tmp_path)
    log.append_many(entries(1, 2))
    syncs: list[int] = []
    monkeypatch.setattr(RealFile, "sync", lambda self: syncs.append(1))
    assert open_log(tmp_path).last_ref == 2
    assert len(syncs) == 1


def test_what_the_head_proves_durable_is_not_written_again(tmp_path: Path) -> None:
    """Found by the simulator, seed 70: a power cut while it was rewritten tore what had been safe."""
    log = open_log(tmp_path)
    log.append_many(entries(1, 3))
    log.close()  # saves the head
    [path] = paths(tmp_path)
    before = path.read_bytes()

    class Watched(RealDisk):
        def open(self, path: str, *, create: bool = False, write: bool = False) -> RealFile:
            file = super().open(path, create=create, write=write)
            if path.endswith(".ndjson"):
                file.write_at = refuse  # type: ignore[method-assign]
            return file

    def refuse(offset: int, data: Bytes) -> None:
        assert not data, f"{len(data)} bytes at {offset} are written again, and they were safe"

    log = AuditLog.open(Watched(tmp_path), now_us=2)
    assert path.read_bytes()[: len(before)] == before
    assert log.head.sequence == 3
    log.close()


def test_lost_last_checkpoint_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path, 4)
    file = paths(tmp_path)[-1]
    lines = file.read_bytes().splitlines(keepends=True)
    assert b'"kind":"checkpoint"' in lines[-1]
    file.write_bytes(b"".join(lines[:-1]))
    assert broken(tmp_path) == ("truncated", 4, f"audit/{file.name}")
    with pytest.raises(Corrupted):
        open_log(tmp_path)
    file.write_bytes(b"".join(lines)[:-1])
    with pytest.raises(Corrupted):
        open_log(tmp_path)
