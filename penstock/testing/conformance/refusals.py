"""What is refused, with which error, and that a refused call changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock import errors
from penstock.testing.conformance.harness import Contract, Harness, entered, payloads, read

SMALL_BYTES = 1_024

BAD_TOPICS = [
    "",
    ".",
    "orders.",
    ".orders",
    "orders..created",
    "orders.*",
    "orders.#",
    "orders created",
    "orders/created",
    "commandé",
    "x" * 65,
    ".".join(["word"] * 17),
    "orders\n",
    None,
    7,
]

BAD_PATTERNS = ["", "orders..created", "orders.cre*", "orders.#.#", "orders.#x", "a b", None]

BAD_HEADERS: list[Any] = [{"n": 1}, {1: "n"}, {"n": b"bytes"}, {"n": None}, "n=1", [("n", "1")]]


class TestRefusals(Contract):
    """Bad input"""

    @pytest.mark.parametrize("bad", BAD_TOPICS, ids=repr)
    async def test_topic_grammar(self, bus: penstock.Bus, bad: Any) -> None:
        """A topic outside the grammar is refused with InvalidTopic."""
        with pytest.raises(errors.InvalidTopic):
            await bus.publish(bad, b"x")
        with pytest.raises(errors.InvalidTopic):
            await bus.publish_many(bad, [b"x", b"y"])
        with pytest.raises(errors.InvalidTopic):
            await bus.topics.create(bad)

    @pytest.mark.parametrize("system", ["_dlq.default", "_audit", "_anything.else"])
    async def test_system_topics(self, bus: penstock.Bus, system: str) -> None:
        """Topics whose first word starts with an underscore belong to the bus: publishing is refused."""
        with pytest.raises(errors.InvalidTopic):
            await bus.publish(system, b"x")
        with pytest.raises(errors.InvalidTopic):
            await bus.publish_many(system, [b"x"])
        with pytest.raises(errors.InvalidTopic):
            await bus.topics.create(system)

    @pytest.mark.parametrize("bad", BAD_PATTERNS, ids=repr)
    async def test_pattern_grammar(self, bus: penstock.Bus, group: str, bad: Any) -> None:
        """A pattern outside the grammar is refused with InvalidPattern."""
        with pytest.raises(errors.InvalidPattern):
            await entered(bus.subscribe(bad, group=group))
        with pytest.raises(errors.InvalidPattern):
            await read(bus, bad)

    @pytest.mark.parametrize("bad", BAD_HEADERS, ids=repr)
    async def test_headers_are_text(self, bus: penstock.Bus, topic: str, bad: Any) -> None:
        """Headers that do not map text to text are refused with InvalidHeaders."""
        await bus.publish(topic, b"before")
        with pytest.raises(errors.InvalidHeaders):
            await bus.publish(topic, b"x", headers=bad)
        with pytest.raises(errors.InvalidHeaders):
            await bus.publish_many(topic, [b"x", b"y"], headers=[{}, bad])
        assert payloads(await read(bus, topic)) == [b"before"]

    async def test_payload_limit(self, harness: Harness, topic: str) -> None:
        """A payload over the limit is refused with PayloadTooLarge; one at the limit is taken."""
        bus = await harness.connect(limits__max_payload_bytes=SMALL_BYTES)
        fits, over = b"x" * SMALL_BYTES, b"x" * (SMALL_BYTES + 1)
        await bus.publish(topic, fits)
        with pytest.raises(errors.PayloadTooLarge):
            await bus.publish(topic, over)
        with pytest.raises(errors.PayloadTooLarge):
            await bus.publish_many(topic, [fits, over])
        assert payloads(await read(bus, topic)) == [fits]
        await bus.close()

    async def test_unknown_codec(self, bus: penstock.Bus, topic: str) -> None:
        """A codec that is not installed is refused with UnknownCodec."""
        await bus.publish(topic, b"before")
        with pytest.raises(errors.UnknownCodec):
            await bus.publish(topic, {"id": 1}, codec="morse")
        with pytest.raises(errors.UnknownCodec):
            await bus.publish_many(topic, [{"id": 1}], codec="morse")
        assert payloads(await read(bus, topic)) == [b"before"]

    @pytest.mark.parametrize(("value", "codec"), [(object(), None), ("text", "raw"), (7, "raw")])
    async def test_values_that_do_not_encode(
        self, bus: penstock.Bus, topic: str, value: Any, codec: str | None
    ) -> None:
        """A value its codec cannot encode is refused with EncodeFailed, and so is its batch."""
        await bus.publish(topic, b"before")
        with pytest.raises(errors.EncodeFailed):
            await bus.publish(topic, value, codec=codec)
        with pytest.raises(errors.EncodeFailed):
            await bus.publish_many(topic, [value, value], codec=codec)
        assert payloads(await read(bus, topic)) == [b"before"]

    @pytest.mark.parametrize("column", ["keys", "headers"])
    async def test_columns_of_different_length(
        self, bus: penstock.Bus, topic: str, column: str
    ) -> None:
        """Columns of different length are refused with InvalidBatch and nothing is stored."""
        short: Any = {"keys": [b"k"], "headers": [{}]}[column]
        await bus.publish(topic, b"before")
        with pytest.raises(errors.InvalidBatch):
            await bus.publish_many(topic, [b"x", b"y"], **{column: short})
        assert payloads(await read(bus, topic)) == [b"before"]

    async def test_empty_batch(self, bus: penstock.Bus, topic: str) -> None:
        """A batch without events is refused with InvalidBatch."""
        with pytest.raises(errors.InvalidBatch):
            await bus.publish_many(topic, [])

    @pytest.mark.parametrize("key", [7, 1.5, ["k"]], ids=repr)
    async def test_keys_are_bytes_or_text(self, bus: penstock.Bus, topic: str, key: Any) -> None:
        """A key that is neither bytes nor text is refused and nothing is stored."""
        await bus.publish(topic, b"before")
        with pytest.raises(errors.InvalidInput):
            await bus.publish(topic, b"x", key=key)
        assert payloads(await read(bus, topic)) == [b"before"]

    async def test_partition_that_is_not_there(self, bus: penstock.Bus, topic: str) -> None:
        """A publish to a partition the topic does not have is refused and nothing is stored."""
        await bus.topics.create(topic, partitions=2)
        for partition, refusal in ((2, errors.NotFound), (-1, errors.InvalidInput)):
            with pytest.raises(refusal):
                await bus.publish(topic, b"x", partition=partition)
            with pytest.raises(refusal):
                await bus.publish_many(topic, [b"x", b"y"], partition=partition)
        assert await read(bus, topic) == []

    @pytest.mark.parametrize(
        "wrong",
        [
            {"mode": "stack"},
            {"order": "backwards"},
            {"start": "yesterday"},
            {"max_inflight": 0},
            {"lease_s": -1.0},
        ],
        ids=repr,
    )
    async def test_subscription_options(
        self, bus: penstock.Bus, topic: str, group: str, wrong: dict[str, Any]
    ) -> None:
        """A subscription option that means nothing is refused, and no group is left behind."""
        with pytest.raises(errors.InvalidInput):
            await entered(bus.subscribe(topic, group=group, **wrong))
        assert group not in [each.name for each in await bus.groups.list()]

    async def test_topics_made_by_hand_only(self, harness: Harness, topic: str) -> None:
        """Where topics are not created on first use, publishing to a new one raises UnknownTopic."""
        bus = await harness.connect(topics__auto_create=False)
        with pytest.raises(errors.UnknownTopic):
            await bus.publish(topic, b"x")
        await bus.topics.create(topic)
        await bus.publish(topic, b"x")
        await bus.close()
