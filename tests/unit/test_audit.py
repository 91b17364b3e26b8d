"""The audit chain: every change to it is found and named (row T9)."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.audit import (
    GENESIS,
    MAX_RECORD_BYTES,
    AuditChain,
    AuditRecord,
    Checkpoint,
    Entry,
    Head,
    Signer,
    Verifier,
    canonical,
    decode_line,
    encode_line,
    select,
    signed_bytes,
    verify,
)
from penstock.model.errors import InvalidInput, InvalidSettings

SIGNER = Signer(bytes(range(32)))
OTHER = Signer(bytes(32))


def fields(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "at_us": 1_700_000_000_000_000 + number,
        "actor": f"actor-{number % 3}",
        "operation": "dlq.replay",
        "targets": [f"orders/0/{number}"],
        "reason": "fixed é",
        "prior": {"state": "dead", "attempt": 5, "owner": None},
        "result": {"state": "queued"},
        "ref": number,
    } | changes


def build(count: int, every: int = 0) -> list[Entry]:
    chain, entries = AuditChain(), list[Entry]()
    for number in range(1, count + 1):
        entries.append(chain.append(**fields(number)))
        if every and number % every == 0:
            entries.append(chain.checkpoint(SIGNER, at_us=number))
    return entries


def rehash(records: list[Entry], start: int) -> list[Entry]:
    """What a forger without the key would do: hash everything from there on again."""
    first = records[start]
    assert isinstance(first, AuditRecord)
    chain = AuditChain(sequence=first.sequence - 1, hash=first.prev_hash)
    fresh = list(records[:start])
    for record in records[start:]:
        if isinstance(record, AuditRecord):
            kept = msgspec.structs.asdict(record)
            for name in ("sequence", "prev_hash", "hash"):
                del kept[name]
            record = chain.append(**kept)
        fresh.append(record)
    return fresh


def test_hash_as_the_reference_says() -> None:
    """T9: docs/reference/audit.md, written down a second time without the library."""
    record = AuditChain().append(**fields(7, targets=["a", "bé"]))

    def text(value: str) -> bytes:
        return struct.pack(">I", len(value.encode())) + value.encode()

    expected = (
        b"penstock.audit.record.1\n"
        + bytes(32)
        + struct.pack(">QQqq", 1, 1, 7, 1_700_000_000_000_007)
        + text("actor-1")
        + text("dlq.replay")
        + text("fixed é")
        + struct.pack(">I", 2)
        + text("a")
        + text("bé")
        + struct.pack(">I", 3)
        + text("attempt")
        + b"i"
        + struct.pack(">q", 5)
        + text("owner")
        + b"n"
        + text("state")
        + b"s"
        + text("dead")
        + struct.pack(">I", 1)
        + text("state")
        + b"s"
        + text("queued")
    )
    assert record.hash == hashlib.sha256(expected).hexdigest()


def test_a_sound_chain() -> None:
    entries = build(25, every=10)
    verdict = verify(entries, public_key=SIGNER.public_key)
    assert verdict.ok
    assert (verdict.records, verdict.checkpoints, verdict.last.sequence) == (25, 2, 25)


def test_an_empty_chain() -> None:
    assert verify([]).last == Head(0, GENESIS)


@pytest.mark.parametrize("place", [1, 2, 13, 25])
def test_changed_record_is_named(place: int) -> None:
    entries = build(25)
    entries[place - 1] = msgspec.structs.replace(entries[place - 1], actor="mallory")
    broken = verify(entries).broken
    assert broken is not None
    assert (broken.kind, broken.sequence) == ("changed", place)


@settings(deadline=None)
@given(st.sampled_from(AuditRecord.__struct_fields__), st.integers(0, 11))
def test_every_field_is_covered(name: str, place: int) -> None:
    """T9: no field of a record can change unnoticed."""
    entries = build(12)
    value = getattr(entries[place], name)
    if isinstance(value, int):
        other: Any = value + 1
    elif isinstance(value, str):
        other = ("1" if value[0] == "0" else "0") + value[1:]
    elif isinstance(value, list):
        other = [*value, "more"]
    else:
        other = {**value, "state": 1}
    entries[place] = msgspec.structs.replace(entries[place], **{name: other})
    broken = verify(entries).broken
    assert broken is not None
    assert (broken.kind, broken.sequence) == ("changed", place + 1)


def test_states_of_different_type_have_different_hashes() -> None:
    hashes = {
        AuditChain().append(**fields(1, prior={"a": value})).hash for value in ("", "0", 0, None)
    }
    assert len(hashes) == 4


@pytest.mark.parametrize("place", [1, 2, 13, 24])
def test_removed_record_is_named(place: int) -> None:
    entries = build(25)
    del entries[place - 1]
    broken = verify(entries).broken
    assert broken is not None
    assert (broken.kind, broken.sequence) == ("removed", place)


def test_swapped_records_are_reordered() -> None:
    entries = build(25)
    entries[9], entries[14] = entries[14], entries[9]
    broken = verify(entries).broken
    assert broken is not None
    assert (broken.kind, broken.sequence) == ("reordered", 10)


def test_repeated_record_is_duplicated() -> None:
    entries = build(10)
    entries.insert(7, entries[4])
    broken = verify(entries).broken
    assert broken is not None
    assert (broken.kind, broken.sequence) == ("duplicated", 5)


def test_one_record_hashed_again_breaks_the_next_link() -> None:
    entries = build(10)
    forged = rehash([msgspec.structs.replace(entries[4], actor="mallory")], 0)
    entries[4:5] = forged
    broken = verify(entries).broken
    assert broken is not None
    assert (broken.kind, broken.sequence) == ("changed", 5)


def test_a_signed_predecessor_is_not_blamed() -> None:
    entries = build(10, every=5)
    chain = AuditChain(sequence=5, hash="1" * 64)
    entries[6] = chain.append(**fields(6))
    broken = verify(entries).broken
    assert broken is not None
    assert (broken.kind, broken.sequence) == ("changed", 6)


def test_everything_hashed_again_contradicts_the_checkpoint() -> None:
    entries = build(20, every=10)
    entries[3] = msgspec.structs.replace(entries[3], actor="mallory")
    forged = rehash(entries, 3)
    broken = verify(forged, public_key=SIGNER.public_key).broken
    assert broken is not None
    assert (broken.kind, broken.sequence) == ("changed", 10)
    without = [entry for entry in forged if isinstance(entry, AuditRecord)]
    assert verify(without).ok, "which is why a head or a key is kept elsewhere"
    kept = [entry for entry in build(20) if isinstance(entry, AuditRecord)][-1]
    assert not verify(without, expect_last=Head(20, kept.hash)).ok


def sign_again(checkpoint: Checkpoint, signer: Signer) -> Checkpoint:
    other = msgspec.structs.replace(checkpoint, public_key=signer.public_key)
    return msgspec.structs.replace(other, signature=signer.sign(signed_bytes(other)))


def test_signature_by_another_key() -> None:
    entries = build(20, every=10)
    assert isinstance(entries[10], Checkpoint)
    entries[10] = sign_again(entries[10], OTHER)
    broken = verify(entries, public_key=SIGNER.public_key).broken
    assert broken is not None
    assert (broken.kind, broken.sequence) == ("bad-signature", 10)
    assert not verify(entries).ok, "a key that changes on the way is noticed without knowing it"


@pytest.mark.parametrize(
    "name", ["sequence", "hash", "at_us", "previous", "public_key", "signature"]
)
def test_every_field_of_a_checkpoint_is_signed(name: str) -> None:
    entries = build(10, every=10)
    value = getattr(entries[10], name)
    other = value + 1 if isinstance(value, int) else ("1" if value[0] == "0" else "0") + value[1:]
    entries[10] = msgspec.structs.replace(entries[10], **{name: other})
    broken = verify(entries, public_key=SIGNER.public_key).broken
    assert broken is not None
    assert broken.kind == "bad-signature"


@pytest.mark.parametrize(
    "bad", [{"hash": "zz"}, {"signature": "no"}, {"sequence": -1}, {"public_key": "ab"}]
)
def test_nonsense_in_a_checkpoint_is_a_bad_signature(bad: dict[str, Any]) -> None:
    entries = build(10, every=10)
    entries[10] = msgspec.structs.replace(entries[10], **bad)
    broken = verify(entries, public_key=SIGNER.public_key).broken
    assert broken is not None
    assert broken.kind == "bad-signature"


def test_removed_moved_and_repeated_checkpoints() -> None:
    entries = build(30, every=10)
    gone = entries[:10] + entries[11:]
    moved = [*entries[:10], entries[11], entries[10], *entries[12:]]
    twice = [*entries[:11], entries[10], *entries[11:]]
    kinds = {"removed": gone, "reordered": moved, "duplicated": twice}
    for kind, changed in kinds.items():
        broken = verify(changed).broken
        assert broken is not None
        assert (broken.kind, broken.sequence) == (kind, 10)


def test_cut_tail_is_seen_up_to_a_checkpoint_or_a_head() -> None:
    entries = build(25, every=10)
    head = verify(entries).last
    cut = entries[:-3]
    assert verify(cut).ok, "nothing inside a shorter chain tells that it was longer"
    broken = verify(cut, expect_last=head).broken
    assert broken is not None
    assert (broken.kind, broken.sequence) == ("truncated", 23)
    records_cut = [*entries[:8], entries[10]]
    broken = verify(records_cut).broken
    assert broken is not None
    assert (broken.kind, broken.sequence) == ("removed", 9)


def test_two_heads_for_one_place_must_agree() -> None:
    entries = build(5)
    verifier = Verifier()
    verifier.expect(verify(entries).last)
    verifier.expect(Head(5, "1" * 64))
    for entry in entries:
        verifier.feed(entry)
    assert not verifier.finish().ok


@settings(deadline=None)
@given(st.integers(0, 24), st.integers(0, 24), st.sampled_from(["remove", "swap", "repeat"]))
def test_no_rearrangement_passes(one: int, two: int, what: str) -> None:
    entries = build(25)
    head = verify(entries).last
    if what == "remove":
        del entries[one]
    elif what == "swap":
        if one == two:
            return
        entries[one], entries[two] = entries[two], entries[one]
    else:
        entries.insert(two, entries[one])
    verdict = verify(entries, expect_last=head)
    assert not verdict.ok


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
STATE = st.dictionaries(TEXT, st.none() | TEXT | st.integers(-(2**63), 2**63 - 1), max_size=4)


@settings(deadline=None)
@given(TEXT, TEXT, st.lists(TEXT, max_size=4), TEXT, STATE, STATE)
def test_lines_come_back_as_they_were(
    actor: str, operation: str, targets: list[str], reason: str, prior: Any, result: Any
) -> None:
    record = AuditChain().append(
        at_us=1, actor=actor, operation=operation, targets=targets, reason=reason,
        prior=prior, result=result, ref=0,
    )  # fmt: skip
    line = encode_line(record)
    assert line.count(b"\n") == 1
    back = decode_line(line)
    assert back == record
    assert verify([back]).ok


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.replace(b'"actor":', b'"actor":"mallory","actor":'),
        lambda line: line.replace(b",", b", ", 1),
        lambda line: line[:-1],
        lambda line: line.replace(b"}\n", b',"extra":1}\n'),
        lambda line: b"\n",
    ],
    ids=["hidden second value", "space", "no newline", "unknown field", "empty"],
)
def test_lines_in_another_form_are_refused(change: Any) -> None:
    line = encode_line(build(1)[0])
    with pytest.raises(ValueError):
        decode_line(change(line))


@pytest.mark.parametrize(
    "bad",
    [
        {"actor": "\ud800"},
        {"prior": {"a": 2**63}},
        {"prior": {"a": True}},
        {"result": {"a": 1.5}},
        {"result": {1: "a"}},
        {"at_us": 2**63},
        {"targets": [5]},
        {"reason": "x" * (MAX_RECORD_BYTES + 1)},
        {"ref": -1},
        {"ref": 3},
    ],
)
def test_what_cannot_be_recorded_leaves_the_chain_alone(bad: dict[str, Any]) -> None:
    chain = AuditChain()
    chain.append(**fields(4))
    before = dict(chain.__dict__)
    with pytest.raises(InvalidInput):
        chain.append(**fields(5, **bad))
    assert chain.__dict__ == before


def test_refs_count_for_replay() -> None:
    chain = AuditChain()
    for ref in (3, 0, 9, 9, 0, 9):
        chain.append(**fields(1, ref=ref))
    assert (chain.last_ref, chain.last_ref_count) == (9, 3)


def test_follow_takes_only_the_next_intact_record() -> None:
    one, two, three = build(3)
    chain = AuditChain()
    assert isinstance(one, AuditRecord)
    assert isinstance(two, AuditRecord)
    assert isinstance(three, AuditRecord)
    assert chain.follow(one)
    assert not chain.follow(three)
    assert not chain.follow(msgspec.structs.replace(two, actor="mallory"))
    assert chain.follow(two)
    assert (chain.sequence, chain.hash, chain.last_ref) == (2, two.hash, 2)


def test_a_key_of_wrong_length() -> None:
    with pytest.raises(InvalidSettings):
        Signer(b"short")


def test_select() -> None:
    """T9: query by message, actor and time window."""
    records = [entry for entry in build(12) if isinstance(entry, AuditRecord)]
    start = 1_700_000_000_000_000

    def found(**query: Any) -> list[int]:
        return [record.sequence for record in select(records, **query)]

    assert found() == list(range(1, 13))
    assert found(message="orders/0/4") == [4]
    assert found(message="orders/0") == []
    assert found(actor="actor-1") == [1, 4, 7, 10]
    assert found(since_us=start + 3, until_us=start + 6) == [3, 4, 5]
    assert found(operation="other") == []
    assert found(actor="actor-1", since_us=start + 5) == [7, 10]


def test_signatures_have_one_spelling() -> None:
    entries = build(10, every=10)
    assert isinstance(entries[10], Checkpoint)
    entries[10] = msgspec.structs.replace(entries[10], signature=entries[10].signature.upper())
    assert not verify(entries).ok


def test_the_reference_page_shows_the_true_bytes() -> None:
    page = Path(__file__).parents[2].joinpath("docs/reference/audit.md").read_text()
    line, shown = (part.partition("\n")[2] for part in page.split("```")[1:4:2])
    record = decode_line(line.encode())
    assert isinstance(record, AuditRecord)
    assert verify([record]).ok
    assert canonical(record) == bytes.fromhex("".join(shown.split()))
