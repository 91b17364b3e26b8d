"""Capabilities of operators: group-reset, grow-partitions, write-once, routes, audit."""

from __future__ import annotations

import pytest

import penstock
from penstock import errors
from penstock.testing.conformance.declared import Declared
from penstock.testing.conformance.harness import (
    Harness,
    eventually,
    nothing,
    numbers,
    payloads,
    read,
    take,
)


class TestGroupReset(Declared):
    """Moving a group"""

    capability = "group-reset"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Reset a group that is there."""
        await bus.publish(topic, b"x")
        async with bus.subscribe(topic, group=group) as sub:
            await take(sub, 1)
        await bus.groups.reset(group, "earliest", confirm="RESET")

    @pytest.mark.parametrize("mode", ["queue", "log"])
    async def test_positions(self, bus: penstock.Bus, topic: str, group: str, mode: str) -> None:
        """A group is moved to the first event, to the end or to an offset, forwards and backwards."""
        receipt = await bus.publish_many(topic, numbers(6))
        offsets = [f"offset:{each.offset}" for each in receipt.ids()]
        async with bus.subscribe(topic, group=group, mode=mode) as sub:
            await take(sub, 6)
            if mode == "log":
                await sub.commit()
        for to, rest in (("earliest", 6), (offsets[4], 2), ("latest", 0), (offsets[1], 5)):
            await bus.groups.reset(group, to, confirm="RESET")
            async with bus.subscribe(topic, group=group, mode=mode) as sub:
                events = await take(sub, rest)
                await nothing(sub, 0.1)
            assert payloads(events) == numbers(6)[6 - rest :]

    async def test_commits(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A commit of what was read before a reset does not undo it."""
        receipt = await bus.publish_many(topic, numbers(6))
        offsets = [f"offset:{each.offset}" for each in receipt.ids()]
        for to, rest in (("earliest", 6), (offsets[1], 5), ("latest", 0)):
            async with bus.subscribe(topic, group=group, mode="log") as sub:
                await take(sub, 4)
                await bus.groups.reset(group, to, confirm="RESET")
                await sub.commit()
            assert (await bus.groups.info(group)).lag == rest
            async with bus.subscribe(topic, group=group, mode="log") as sub:
                assert payloads(await take(sub, rest)) == numbers(6)[6 - rest :]

    async def test_commits_go_on(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Who was reset while it read goes on from there, and its commits count again."""
        await bus.publish_many(topic, numbers(4))
        async with bus.subscribe(topic, group=group, mode="log") as sub:
            await take(sub, 4)
            await bus.groups.reset(group, "earliest", confirm="RESET")
            await sub.commit()
            assert payloads(await take(sub, 3)) == numbers(3)
            await sub.commit()
            assert (await bus.groups.info(group)).lag == 1

    async def test_unsettled(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A reset to the end forgets what waited for a retry."""
        await bus.publish_many(topic, numbers(3))
        async with bus.subscribe(topic, group=group) as sub:
            for event in await take(sub, 3, ack=False):
                await event.nack(delay_s=0.2)
        await bus.groups.reset(group, "latest", confirm="RESET")
        async with bus.subscribe(topic, group=group) as sub:
            await nothing(sub, 0.6)
            await bus.publish(topic, b"new")
            assert payloads(await take(sub, 1)) == [b"new"]

    async def test_one_topic(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A reset that names a topic leaves the group's other topics where they are."""
        left, right = f"{topic}.left", f"{topic}.right"
        for name in (left, right):
            await bus.publish_many(name, numbers(2))
        async with bus.subscribe(f"{topic}.*", group=group) as sub:
            await take(sub, 4)
        await bus.groups.reset(group, "earliest", topic=left, confirm="RESET")
        async with bus.subscribe(f"{topic}.*", group=group) as sub:
            events = await take(sub, 2)
            await nothing(sub)
        assert [event.topic for event in events] == [left, left]

    async def test_unknown(self, bus: penstock.Bus, group: str) -> None:
        """Resetting a group that is not there raises UnknownGroup."""
        with pytest.raises(errors.UnknownGroup):
            await bus.groups.reset(group, "earliest", confirm="RESET")


class TestGrowPartitions(Declared):
    """More partitions"""

    capability = "grow-partitions"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Grow a topic."""
        await bus.topics.create(topic, partitions=1)
        await bus.topics.grow(topic, 2)

    async def test_grow(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A topic grows while it is in use: nothing is lost, and its members receive the new partitions too."""
        await bus.topics.create(topic, partitions=1)
        await bus.publish_many(topic, numbers(10))
        async with bus.subscribe(topic, group=group) as sub:
            assert payloads(await take(sub, 5)) == numbers(5)
            await bus.topics.grow(topic, 4)
            keys = [f"k{number}".encode() for number in range(40)]
            await bus.publish_many(topic, numbers(40, first=10), keys=keys)
            events = await take(sub, 45)
        assert len((await bus.topics.info(topic)).partitions) == 4
        assert sorted(payloads(events)) == sorted(numbers(45, first=5))
        assert len({event.partition for event in events}) == 4
        assert payloads(await read(bus, topic, partition=0))[:10] == numbers(10)

    async def test_never_shrink(self, bus: penstock.Bus, topic: str) -> None:
        """A topic never gets fewer partitions."""
        await bus.topics.create(topic, partitions=3)
        with pytest.raises(errors.InvalidInput):
            await bus.topics.grow(topic, 2)
        assert len((await bus.topics.info(topic)).partitions) == 3

    async def test_unknown(self, bus: penstock.Bus, topic: str) -> None:
        """Growing a topic that is not there raises UnknownTopic."""
        with pytest.raises(errors.UnknownTopic):
            await bus.topics.grow(topic, 2)


class TestWriteOnce(Declared):
    """Write once"""

    capability = "write-once"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Make a write-once topic."""
        await bus.topics.create(topic, write_once=True, retention_age_s=3_600.0)

    async def test_delete(self, harness: Harness, bus: penstock.Bus, topic: str) -> None:
        """Deleting a write-once topic raises WriteOnce, keeps every event, and is audited where audit is declared."""
        await bus.topics.create(topic, write_once=True, retention_age_s=3_600.0)
        await bus.publish_many(topic, numbers(3))
        with pytest.raises(errors.WriteOnce):
            await bus.topics.delete(topic, confirm="DELETE")
        assert payloads(await read(bus, topic)) == numbers(3)
        assert (await bus.topics.info(topic)).write_once
        if "audit" in harness.capabilities:

            async def noted() -> bool:
                records = await bus.audit.query()
                return any(topic in target for each in records for target in each.targets)

            await eventually(noted, "an audit record of the attempt")

    async def test_retention(self, bus: penstock.Bus, topic: str) -> None:
        """The retention of a write-once topic can be made longer, never shorter, nor can it be lifted."""
        await bus.topics.create(topic, write_once=True, retention_age_s=3_600.0)
        await bus.topics.configure(topic, retention_age_s=7_200.0)
        with pytest.raises(errors.WriteOnce):
            await bus.topics.configure(topic, retention_age_s=60.0)
        with pytest.raises(errors.WriteOnce):
            await bus.topics.configure(topic, write_once=False)
        assert (await bus.topics.info(topic)).write_once


class TestRoutes(Declared):
    """Routes"""

    capability = "routes"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Put a route."""
        await bus.routes.put(penstock.Route(pattern=topic, destination=group, type="group"))

    async def test_resolve(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """The catalogue says where a topic goes: enabled routes that match, the highest priority first."""
        low = penstock.Route(pattern=f"{topic}.#", destination=f"{group}-low", type="fanout")
        high = penstock.Route(
            pattern=f"{topic}.*", destination=f"{group}-high", type="group", priority=5
        )
        for route in (low, high):
            await bus.routes.put(route)
        assert {route.destination for route in await bus.routes.list()} >= {
            low.destination,
            high.destination,
        }
        found = await bus.routes.resolve(f"{topic}.a")
        assert [route.destination for route in found] == [high.destination, low.destination]
        await bus.routes.disable(high.pattern, high.destination)
        found = await bus.routes.resolve(f"{topic}.a")
        assert [route.destination for route in found] == [low.destination]
        await bus.routes.enable(high.pattern, high.destination)
        assert len(await bus.routes.resolve(f"{topic}.a")) == 2
        await bus.routes.remove(low.pattern, low.destination, confirm="REMOVE")
        found = await bus.routes.resolve(f"{topic}.a.b")
        assert found == []

    async def test_tenant(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """A route of one tenant is not another tenant's."""
        await bus.routes.put(
            penstock.Route(pattern=topic, destination=group, type="direct", tenant="acme")
        )
        assert len(await bus.routes.resolve(topic, tenant="acme")) == 1
        assert await bus.routes.resolve(topic, tenant="other") == []

    async def test_unknown(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Changing a route that is not there raises UnknownRoute."""
        for call in (bus.routes.remove, bus.routes.enable, bus.routes.disable):
            with pytest.raises(errors.UnknownRoute):
                await call(topic, group)


class TestAudit(Declared):
    """Audit"""

    capability = "audit"

    async def call(self, bus: penstock.Bus, topic: str, group: str) -> None:
        """Query the audit trail."""
        await bus.audit.query()

    async def test_operations(self, bus: penstock.Bus, topic: str) -> None:
        """What an operator changed is on record, in order, and the chain verifies."""
        await bus.topics.create(topic)
        await bus.topics.configure(topic, retention_age_s=3_600.0)
        await bus.topics.delete(topic, confirm="DELETE")

        async def both() -> list[str]:
            records = await bus.audit.query(actor=bus.identity.subject)
            own = [each for each in records if any(topic in target for target in each.targets)]
            assert [each.sequence for each in own] == sorted(each.sequence for each in own)
            return [each.operation for each in own] if len(own) >= 2 else []

        operations = await eventually(both, "two audit records")
        assert len(set(operations)) == 2
        found = await bus.audit.query(operation=operations[-1])
        assert any(topic in target for each in found for target in each.targets)
        assert (await bus.audit.verify()).ok

    async def test_nobody(self, bus: penstock.Bus, group: str) -> None:
        """A query for an actor who did nothing finds nothing."""
        assert list(await bus.audit.query(actor=f"nobody-{group}")) == []
