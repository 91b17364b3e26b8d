"""`penstock dlq` exactly as T8 says, and `penstock audit` (T9) about it."""

from __future__ import annotations

import asyncio
import os
import pwd
from typing import Any

import pytest

import penstock
from penstock.cli.dlq import system_user

AUDITED = ("--actor", "ann", "--reason", "fixed the bug")


async def buried(bus: penstock.Bus, group: str, count: int) -> list[Any]:
    """The dead letters of a group, once there are so many: burying runs beside the consumer."""
    async with asyncio.timeout(10):
        while len(letters := await bus.dead_letters.list(consumer=group)) < count:
            await asyncio.sleep(0.02)
    return letters


async def kill(
    cli, values: list[bytes], topic: str = "orders", group: str = "billing"
) -> list[str]:
    """Dead letters the way they come about: a consumer rejects events."""
    async with penstock.connect(str(cli.data)) as bus:
        for value in values:
            await bus.publish(topic, value, key=b"k", headers={"h": "v"})
        async with bus.subscribe(topic, group=group) as subscription:
            for number in range(1, len(values) + 1):
                event = await subscription.get(timeout_s=10)
                assert event is not None
                await event.reject("cannot be billed")
                letters = await buried(bus, group, number)
        return [letter.id for letter in reversed(letters)]


async def test_list_and_inspect(cli):
    ids = await kill(cli, [b'{"id": 7}', b"\xff"])
    await kill(cli, [b"other"], topic="mails", group="sender")
    rows = cli.ok("dlq", "list", "--json").rows
    assert len(rows) == 3
    assert [
        row["id"] for row in cli.ok("dlq", "list", "--consumer", "billing", "--json").rows
    ] == ids[::-1], "newest first"
    assert len(cli.ok("dlq", "list", "--topic", "mails", "--json").rows) == 1
    assert len(cli.ok("dlq", "list", "--tenant", "default", "--json").rows) == 3
    assert cli.ok("dlq", "list", "--tenant", "nobody", "--json").rows == []
    assert len(cli.ok("dlq", "list", "--limit", "2", "--json").rows) == 2
    assert "cannot be billed" in cli.ok("dlq", "list").text
    one = cli.ok("dlq", "inspect", "--id", ids[0], "--json").row
    assert (one["consumer"], one["topic"], one["key"], one["headers"]) == (
        "billing",
        "orders",
        "k",
        {"h": "v"},
    )
    assert (one["reason"], one["attempts"], one["replay_count"]) == ("cannot be billed", 1, 0)
    assert '"id"' in cli.ok("dlq", "inspect", "--id", ids[0]).text
    assert cli("dlq", "inspect", "--id", "nosuch").code == 3


async def test_replay_needs_the_target_restated_and_the_word(cli):
    (letter,) = await kill(cli, [b"x"])
    right = ["--target-consumer", "billing", "--target-topic", "orders", *AUDITED]
    for words, code in (
        ([*right], "refused.confirmation"),
        ([*right, "--confirm", "replay"], "refused.confirmation"),
        ([*right, "--confirm", "PURGE"], "refused.confirmation"),
        (["--target-consumer", "other", "--target-topic", "orders", *AUDITED, "--confirm", "REPLAY"], "refused.target-mismatch"),
        (["--target-consumer", "billing", "--target-topic", "order", *AUDITED, "--confirm", "REPLAY"], "refused.target-mismatch"),
    ):  # fmt: skip
        result = cli("dlq", "replay", "--ids", letter, *words, "--json")
        assert result.code != 0, words
        assert code in result.text, words
    for missing in ("--target-consumer", "--target-topic", "--reason"):
        words = [*right, "--confirm", "REPLAY"]
        at = words.index(missing)
        del words[at : at + 2]
        assert cli("dlq", "replay", "--ids", letter, *words).code == 2
    assert cli.ok("dlq", "inspect", "--id", letter, "--json").row["replay_count"] == 0


async def test_replay_delivers_again_and_counts(cli):
    ids = await kill(cli, [b"1", b"2", b"3"])
    result = cli(
        "dlq", "replay", "--ids", f"{ids[0]},{ids[1]}", "--ids", "00000000-0000-7000-8000-000000000000@billing",
        "--target-consumer", "billing", "--target-topic", "orders", *AUDITED, "--confirm", "REPLAY", "--json",
    )  # fmt: skip
    assert result.code == 1, "one of them failed"
    row = result.row
    assert (row["requested"], row["done"], row["failed"]) == (3, 2, 1)
    assert [each["result"] for each in row["results"]] == ["replayed", "replayed", "failed"]
    assert row["failures"][0]["code"] == "notfound.dead-letter"
    async with (
        penstock.connect(str(cli.data)) as bus,
        bus.subscribe("orders", group="billing") as subscription,
    ):
        got = []
        for _ in range(2):
            event = await subscription.get(timeout_s=10)
            assert event is not None
            got.append(event.payload)
            await event.reject("again")
        assert sorted(got) == [b"1", b"2"]
        await buried(bus, "billing", 3)
    counts = {row["id"]: row["replay_count"] for row in cli.ok("dlq", "list", "--json").rows}
    assert counts == {ids[0]: 1, ids[1]: 1, ids[2]: 0}


async def test_replay_prints_results_for_people(cli):
    ids = await kill(cli, [b"1"])
    result = cli.ok(
        "dlq", "replay", "--ids", ids[0], "--target-consumer", "billing", "--target-topic", "orders",
        *AUDITED, "--confirm", "REPLAY",
    )  # fmt: skip
    assert "replayed" in result.text
    assert "1 of 1 replayed, 0 failed" in result.text


async def test_purge(cli):
    ids = await kill(cli, [b"1", b"2"])
    assert cli("dlq", "purge", "--ids", ids[0], *AUDITED).code == 4
    assert cli("dlq", "purge", "--ids", ids[0], "--actor", "ann", "--confirm", "PURGE").code == 2
    words = ["--actor", "ann", "--mutation-reason", "spam", "--confirm", "PURGE", "--json"]
    row = cli.ok("dlq", "purge", "--ids", ids[0], *words).row
    assert (row["requested"], row["done"], row["failed"]) == (1, 1, 0)
    assert [row["id"] for row in cli.ok("dlq", "list", "--json").rows] == [ids[1]]
    again = cli("dlq", "purge", "--ids", ",".join(ids), *words)
    assert again.code == 1
    assert (again.row["done"], again.row["failed"]) == (1, 1)
    assert len(cli.values("orders")) == 2, "the log keeps its events"


async def test_dead_letter_by_hand(cli):
    await kill(cli, [b"1"])
    async with penstock.connect(str(cli.data)) as bus:
        await bus.publish("orders", b"2")
        async with bus.subscribe("orders", group="billing") as subscription:
            assert await subscription.get(timeout_s=10) is not None, "delivered, and given back"
    words = ["--consumer", "billing", "--topic", "orders", *AUDITED]
    row = cli.ok("dlq", "dead-letter", "--id", "orders/0/1", *words, "--json").row
    assert (row["requested"], row["done"]) == (1, 1)
    rows = cli.ok("dlq", "list", "--json").rows
    assert [(row["offset"], row["reason"]) for row in rows] == [
        (1, "fixed the bug"),
        (0, "cannot be billed"),
    ]
    assert cli.ok("dlq", "inspect", "--id", row["id"], "--json").row["value"] == "2"
    cli.ok("dlq", "dead-letter", "--id", "mail-7", *words, "--payload", "lost and found")
    assert "lost and found" in cli.ok("dlq", "inspect", "--id", "mail-7@billing").text
    assert cli("dlq", "dead-letter", "--id", "orders/0/99", *words).code == 3
    assert cli("dlq", "dead-letter", "--id", "others/0/1", *words).code == 4
    assert cli("dlq", "dead-letter", "--id", "orders/0/1", *words[:-2]).code == 2
    async with (
        penstock.connect(str(cli.data)) as bus,
        bus.subscribe("orders", group="billing") as subscription,
    ):
        assert await subscription.get(timeout_s=0.5) is None, (
            "the consumer does not get it any more"
        )


async def test_a_dead_letter_is_never_written_over(cli) -> None:
    """T8, T9: what is among the dead stays as it was, and the audit trail knows what was before."""
    (first,) = await kill(cli, [b"1"])
    words = ["--consumer", "billing", "--topic", "orders", "--actor", "ann"]
    cli.ok("dlq", "dead-letter", "--id", "mail-7", *words, "--payload", "one", "--reason", "first")
    for message in (["--id", "mail-7", "--payload", "two"], ["--id", "orders/0/0"]):
        result = cli("dlq", "dead-letter", *message, *words, "--reason", "second", "--json")
        assert result.code == 4
        assert result.row["error"]["code"] == "refused.exists"
    kept = cli.ok("dlq", "inspect", "--id", "mail-7@billing", "--json").row
    assert (kept["value"], kept["reason"]) == ("one", "first")
    assert cli.ok("dlq", "inspect", "--id", first, "--json").row["reason"] == "cannot be billed"
    target = ["--target-consumer", "billing", "--target-topic", "orders", "--confirm", "REPLAY"]
    cli.ok("dlq", "replay", "--ids", first, *target, *AUDITED)
    again = cli("dlq", "dead-letter", "--id", "orders/0/0", *words, "--reason", "third")
    assert again.code == 4
    assert "replayed" in again.stderr
    cli.ok("dlq", "purge", "--ids", first, *AUDITED, "--confirm", "PURGE")
    cli.ok("dlq", "dead-letter", "--id", "orders/0/0", *words, "--reason", "fourth")
    records = cli.ok("audit", "query", "--operation", "dlq.dead-letter", "--json").rows
    told = [(record["reason"], record["prior"]["status"]) for record in records]
    assert told == [("first", None), ("fourth", "unsettled")]


async def test_a_reason_says_something(cli) -> None:
    """T8, T9: white space is no reason, and none of it is kept around one."""
    (letter,) = await kill(cli, [b"1"])
    target = ["--target-consumer", "billing", "--target-topic", "orders"]
    by_hand = ["--id", "x", "--consumer", "billing", "--topic", "orders", "--payload", "p"]
    for words in (
        ["purge", "--ids", letter, "--confirm", "PURGE"],
        ["replay", "--ids", letter, *target, "--confirm", "REPLAY"],
        ["dead-letter", *by_hand],
    ):
        for reason in ("", "   ", " \t\n", "x" * 4_097):
            result = cli("dlq", *words, "--reason", reason)
            assert result.code == 2, result
            assert "reason " in result.stderr
    assert cli.ok("audit", "query", "--json").rows == []
    assert [row["id"] for row in cli.ok("dlq", "list", "--json").rows] == [letter]
    cli.ok("dlq", "purge", "--ids", letter, "--reason", "  spam ", "--confirm", "PURGE")
    assert cli.ok("audit", "query", "--json").row["reason"] == "spam"


@pytest.mark.parametrize(
    ("id", "consumer"),
    [
        ("", "billing"), (" ", "billing"), (" x", "billing"), ("a,b", "billing"), ("a\nb", "billing"),
        ("x" * 301, "billing"), ("x", ""), ("x", "no such group"), ("x", "a,b"), ("x", "_own"),
        ("x", "tab\there"), ("x", "g" * 129),
    ],
)  # fmt: skip
def test_ids_and_consumers_that_nobody_could_name_again_are_refused(cli, id, consumer) -> None:
    """T8: `--ids` separates by commas, so such a dead letter could never be purged."""
    words = ["--topic", "orders", "--payload", "p", *AUDITED, "--json"]
    cli.ok("topic", "create", "orders")
    result = cli("dlq", "dead-letter", "--id", id, "--consumer", consumer, *words)
    assert (result.code, result.row["error"]["code"]) == (2, "invalid"), result
    assert len(result.text) < 1_000
    assert cli.ok("dlq", "list", "--json").rows == []


async def test_a_group_with_a_strange_name_keeps_its_dead_letters(cli) -> None:
    """T8: a group that is there may be named, whatever it is called."""
    await kill(cli, [b"1"], group="late bills")
    words = ["--topic", "orders", "--payload", "p", *AUDITED]
    cli.ok("dlq", "dead-letter", "--id", "x", "--consumer", "late bills", *words)
    ended = cli.ok(
        "dlq", "purge", "--ids", "x@late bills", *AUDITED, "--confirm", "PURGE", "--json"
    )
    assert ended.row["done"] == 1


def test_a_list_that_was_cut_says_so(cli) -> None:
    """T8, T10: as the admin API says `more`; and with replayed ones a column tells which are which."""
    words = ["--consumer", "billing", "--topic", "orders", "--payload", "p", *AUDITED]
    cli.ok("topic", "create", "orders")
    for id in ("a", "b", "c"):
        cli.ok("dlq", "dead-letter", "--id", id, *words)
    for form in ((), ("--json",)):
        cut = cli.ok("dlq", "list", "--limit", "2", *form)
        assert len(cut.text.splitlines()) == (2 if form else 3), "a heading, and two rows"
        assert "there are more: go on with --offset 2" in cut.stderr
        for whole in (["--limit", "3"], ["--limit", "2", "--offset", "2"], []):
            assert cli.ok("dlq", "list", *whole, *form).stderr == ""
    assert "status" not in cli.ok("dlq", "list").text
    heading, *rows = cli.ok("dlq", "list", "--everything").text.splitlines()
    assert heading.endswith("status")
    assert [row.split()[-1] for row in rows] == ["dead"] * 3


async def test_audit_knows_who_did_what(cli):
    """T9: query by message, actor and time; verify; export."""
    ids = await kill(cli, [b"1", b"2"])
    cli.ok(
        "dlq", "purge", "--ids", ids[0], "--actor", "ann", "--reason", "spam", "--confirm", "PURGE"
    )
    cli.ok(
        "dlq", "purge", "--ids", ids[1], "--actor", "bob", "--reason", "spam", "--confirm", "PURGE"
    )
    (row,) = cli.ok("audit", "query", "--actor", "ann", "--json").rows
    assert (row["actor"], row["reason"]) == ("ann", "spam")
    assert ids[0] in str(row["targets"])
    assert cli.ok("audit", "query", "--id", ids[1], "--actor", "bob", "--json").rows
    assert cli.ok("audit", "query", "--actor", "eve", "--json").rows == []
    assert cli.ok("audit", "query", "--operation", row["operation"], "--start", "1h", "--json").rows
    assert cli.ok("audit", "query", "--actor", "ann", "--end", "1h", "--json").rows == []
    assert "spam" in cli.ok("audit", "query").text
    assert cli.ok("audit", "verify", "--json").row["ok"] is True
    assert "the chain is whole" in cli.ok("audit", "verify").text


async def test_export_is_verifiable_and_repeatable(cli):
    ids = await kill(cli, [b"1"])
    cli.ok("dlq", "purge", "--ids", ids[0], *AUDITED, "--confirm", "PURGE")
    row = cli.ok("audit", "export", "copy", "--json").row
    assert row["records"] >= 1
    assert list((cli.folder / "copy" / "audit").glob("manifest-*.json"))
    cli.ok("audit", "export", "copy")
    assert cli.ok("audit", "verify").code == 0


@pytest.mark.parametrize("damage", ["change", "remove"])
async def test_verify_names_the_first_broken_link(cli, damage):
    ids = await kill(cli, [b"1"])
    cli.ok("dlq", "purge", "--ids", ids[0], *AUDITED, "--confirm", "PURGE")
    (path,) = (cli.data / "audit").glob("*.ndjson")
    if damage == "change":
        path.write_text(path.read_text().replace('"ann"', '"eve"'))
    else:
        path.unlink()
    result = cli("audit", "verify")
    assert result.code in (1, 6), result
    named = path.name if damage == "change" else "the chain is gone"
    assert named in result.text + result.stderr
    result = cli("audit", "verify", "--json")
    assert result.code in (1, 6)
    assert named in result.text
    assert cli("doctor").code == 1


async def test_who_names_no_actor_is_named_by_the_system(cli) -> None:
    """T9: by the system's name for the user, whatever the environment claims."""
    (letter,) = await kill(cli, [b"1"])
    cli.env |= {"USER": "mallory", "LOGNAME": "mallory"}
    cli.ok("dlq", "purge", "--ids", letter, "--reason", "spam", "--confirm", "PURGE")
    (row,) = cli.ok("audit", "query", "--json").rows
    assert row["actor"] == f"local:{pwd.getpwuid(os.getuid()).pw_name}"


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert system_user() == str(os.getuid())
