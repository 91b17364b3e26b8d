"""`penstock topic | group | route | schedule`."""

from __future__ import annotations

import hashlib

import penstock


def test_topic_life(cli):
    cli.ok(
        "topic",
        "create",
        "orders",
        "--partitions",
        "3",
        "--retention-age",
        "7d",
        "--retention-bytes",
        "10MiB",
    )
    info = cli.ok("topic", "info", "orders", "--json").row
    assert (info["name"], len(info["partitions"]), info["events"]) == ("orders", 3, 0)
    assert "604800" in str(info)
    assert str(10 * 2**20) in str(info)
    cli.ok("topic", "grow", "orders", "5")
    cli.ok("topic", "configure", "orders", "--retention-age", "1h")
    info = cli.ok("topic", "info", "orders", "--json").row
    assert len(info["partitions"]) == 5
    assert "3600" in str(info)
    assert str(10 * 2**20) in str(info), "what is not named stays"
    cli.ok("publish", "orders", "x")
    assert cli.ok("topic", "list", "--json").row["events"] == 1
    refused = cli("topic", "delete", "orders", "--confirm", "delete")
    assert refused.code == 4
    assert cli.count("orders") == 1
    cli.ok("topic", "delete", "orders", "--confirm", "DELETE")
    assert cli.ok("topic", "list", "--json").rows == []
    assert cli("topic", "info", "orders").code == 3


def test_topic_text_output(cli):
    cli.ok("topic", "create", "orders", "--partitions", "2")
    text = cli.ok("topic", "info", "orders").text
    assert "name" in text
    assert "end offset" in text


def test_write_once_refuses_delete(cli):
    """X5: the attempt is refused and audited."""
    cli.ok("topic", "create", "ledger", "--write-once", "--retention-age", "30d")
    cli.ok("publish", "ledger", "entry")
    result = cli("topic", "delete", "ledger", "--confirm", "DELETE", "--json")
    assert (result.code, result.row["error"]["code"]) == (4, "refused.write-once")
    assert cli.values("ledger") == [b"entry"]
    assert any("ledger" in str(row) for row in cli.ok("audit", "query", "--json").rows)


def test_configure_wants_something(cli):
    cli.ok("topic", "create", "t")
    assert cli("topic", "configure", "t").code == 2
    assert cli("topic", "configure", "t", "--retention-bytes", "many").code == 2
    assert cli("topic", "grow", "t", "0").code == 2
    assert cli("topic", "configure", "nosuch", "--retention-age", "1h").code == 3


async def consume(cli, count: int) -> None:
    async with (
        penstock.connect(str(cli.data)) as bus,
        bus.subscribe("t", group="g") as subscription,
    ):
        for _ in range(count):
            event = await subscription.get(timeout_s=10)
            assert event is not None
            await event.ack()
        await bus.flush()


async def test_group_life(cli):
    """Y7: a group is reset to an offset or a time."""
    cli.ok("publish", "t", "--lines", input=b"a\nb\nc\nd\n")
    await consume(cli, 3)
    row = cli.ok("group", "list", "--json").row
    assert (row["name"], row["lag"]) == ("g", 1)
    assert cli.ok("group", "info", "g", "--json").row["lanes"][0]["topic"] == "t"
    for position, lag in (("earliest", 4), ("latest", 0), ("offset:2", 2), ("1h", 4)):
        cli.ok("group", "reset", "g", "--to", position, "--confirm", "RESET")
        assert cli.ok("group", "info", "g", "--json").row["lag"] == lag, position
    assert "lag" in cli.ok("group", "info", "g").text
    assert cli("group", "reset", "g", "--to", "whenever").code == 2
    refused = cli("group", "reset", "g", "--to", "2")
    assert (refused.code, "offset:42" in refused.stderr) == (2, True)  # A7: it could be a time
    assert cli("group", "reset", "nosuch", "--to", "latest", "--confirm", "RESET").code == 3
    assert cli("group", "delete", "g").code == 4
    cli.ok("group", "delete", "g", "--confirm", "DELETE")
    assert cli.ok("group", "list", "--json").rows == []


def test_route_life(cli):
    """T2: pattern, destination, type, priority, enabled, tenant; kept on disk."""
    cli.ok("route", "add", "orders.#", "archive", "--priority", "1")
    cli.ok("route", "add", "orders.*.v1", "billing", "--type", "group", "--tenant", "default")
    rows = cli.ok("route", "list", "--json").rows
    assert {(row["pattern"], row["destination"]) for row in rows} == {
        ("orders.#", "archive"),
        ("orders.*.v1", "billing"),
    }
    resolved = cli.ok("route", "resolve", "orders.created.v1", "--tenant", "default", "--json").rows
    assert {row["destination"] for row in resolved} == {"archive", "billing"}
    cli.ok("route", "disable", "orders.#", "archive")
    assert [
        row["destination"] for row in cli.ok("route", "resolve", "orders.created.v1", "--json").rows
    ] == ["billing"]
    cli.ok("route", "enable", "orders.#", "archive")
    cli.ok("route", "remove", "orders.*.v1", "billing", "--confirm", "REMOVE")
    assert [
        row["destination"] for row in cli.ok("route", "resolve", "orders.created.v1", "--json").rows
    ] == ["archive"]
    assert cli("route", "remove", "orders.*.v1", "billing", "--confirm", "REMOVE").code == 3
    assert cli("route", "add", "orders.#x", "d").code == 2
    assert cli("route", "add", "orders.#", "d", "--type", "carrier-pigeon").code == 2


def test_routes_and_schedules_are_audited_with_what_was_before(cli) -> None:
    """T9: who changed what, from what, to what."""
    cli.ok("route", "add", "orders.#", "archive", "--priority", "1")
    cli.ok("route", "add", "orders.#", "archive", "--priority", "2")
    cli.ok("route", "disable", "orders.#", "archive")
    cli.ok("route", "remove", "orders.#", "archive", "--confirm", "REMOVE")
    cli.ok("schedule", "add", "tick", "clock.tick", "x", "--every", "5m")
    cli.ok("schedule", "add", "tick", "clock.tock", "xy", "--cron", "0 9 * * *", "--header", "a=b")
    cli.ok("schedule", "remove", "tick", "--confirm", "REMOVE")
    assert cli("schedule", "remove", "tick", "--confirm", "REMOVE").code == 3
    records = cli.ok("audit", "query", "--json").rows
    assert all(each["actor"] == "local" for each in records)
    routes = [each for each in records if each["operation"].startswith("route.")]
    assert [each["operation"] for each in routes] == [
        "route.put", "route.put", "route.disable", "route.remove",
    ]  # fmt: skip
    route = {"type": "fanout", "priority": 1, "enabled": True, "tenant": None}
    states = [{"status": None}, route, route | {"priority": 2}]
    states += [route | {"priority": 2, "enabled": False}, {"status": "removed"}]
    assert [each["prior"] for each in routes] == states[:-1]
    afters = [state | {"version": at} for at, state in enumerate(states)]
    assert [each["result"] for each in routes] == afters[1:]
    schedules = [each for each in records if each["operation"].startswith("schedule.")]
    assert [each["operation"] for each in schedules] == ["schedule.put"] * 2 + ["schedule.remove"]
    assert all(each["targets"] == ["tick"] for each in schedules)
    made, changed, removed = schedules
    assert made["prior"] == {"status": None}
    assert (made["result"]["topic"], made["result"]["every_us"]) == ("clock.tick", 300_000_000)
    assert made["result"]["payload_sha256"] == hashlib.sha256(b"x").hexdigest()
    assert changed["prior"] == made["result"]
    assert (changed["result"]["cron"], changed["result"]["headers"]) == ("0 9 * * *", '{"a":"b"}')
    assert (removed["prior"], removed["result"]) == (changed["result"], {"status": "removed"})
    assert cli.ok("audit", "verify", "--json").row["ok"] is True


def test_a_schedule_that_no_audit_record_could_hold_is_refused(cli) -> None:
    """T9: an id has a bound, because it stands in the chain."""
    result = cli("schedule", "add", "x" * 301, "clock.tick", "x", "--every", "5m", "--json")
    assert (result.code, result.row["error"]["code"]) == (2, "invalid")


def test_a_refused_operation_does_not_look_like_a_success(cli) -> None:
    """T9, X5: the text of the audit trail has a column for how it ended."""
    cli.ok("topic", "create", "ledger", "--write-once")
    cli.ok("topic", "create", "scrap")
    cli.ok("topic", "delete", "scrap", "--confirm", "DELETE")
    assert cli("topic", "delete", "ledger", "--confirm", "DELETE").code == 4
    heading, done, refused = cli.ok("audit", "query").text.splitlines()
    assert "result" in heading.split()
    assert "deleted" in done
    assert "refused refused.write-once" in refused


def test_schedule_life(cli):
    """T7: cron and every, kept on disk."""
    cli.ok(
        "schedule",
        "add",
        "morning",
        "reports.due",
        '{"kind": "daily"}',
        "--cron",
        "0 9 * * *",
        "--header",
        "a=b",
    )
    cli.ok("schedule", "add", "tick", "clock.tick", "x", "--every", "5m")
    rows = {row["id"]: row for row in cli.ok("schedule", "list", "--json").rows}
    assert set(rows) == {"morning", "tick"}
    assert rows["morning"]["cron"] == "0 9 * * *"
    assert "300 s" in cli.ok("schedule", "list").text
    assert cli("schedule", "add", "x", "t", "v").code == 2
    assert cli("schedule", "add", "x", "t", "v", "--cron", "* * *").code == 2
    assert cli("schedule", "add", "x", "t", "v", "--every", "often").code == 2
    cli.ok("schedule", "remove", "tick", "--confirm", "REMOVE")
    assert [row["id"] for row in cli.ok("schedule", "list", "--json").rows] == ["morning"]
