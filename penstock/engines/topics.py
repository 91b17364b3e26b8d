"""Topics of an embedded engine: made on first use, forgotten when deleted, offsets never reused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING

import msgspec

from penstock.core import intervention
from penstock.core.entry import Entry, TopicPut, TopicSpec, as_recovered
from penstock.engines.turnstile import Turnstile
from penstock.model.errors import UnknownTopic
from penstock.model.topic import is_inbox, is_system, tenant_of

if TYPE_CHECKING:
    from penstock.engines.embedded import EmbeddedEngine


class Topics:
    """Makes and forgets topics."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._making: dict[str, Turnstile] = {}
        """Who waits for a topic that is being made; the first of them makes it."""

    def ready(self, topic: str) -> bool:
        """Whether a topic is there, and nobody waits for it: who comes now would overtake them."""
        return topic in self._engine.state.topics and topic not in self._making

    async def ensure(self, topic: str, spec: TopicSpec | None = None) -> None:
        """Make a topic on first use; all who wait for that go on in the order they came."""
        if self.ready(topic):
            return
        absent = topic not in self._engine.state.topics
        if absent and spec is None and is_inbox(topic):
            if not self._engine.groups.readers_of(topic):
                raise UnknownTopic(
                    f"nothing listens at {topic!r} any more: the requester has gone. Drop the reply",
                    topic=topic,
                )
            spec = TopicSpec(ephemeral=True)  # its requester has listened before a restart
        auto = self._engine.settings.topics.auto_create or is_system(topic)
        if absent and spec is None and not auto:
            raise UnknownTopic(
                f"no topic {topic!r}, and topics.auto_create is off; create it first", topic=topic
            )
        chosen = spec or TopicSpec(
            partitions=1 if is_system(topic) else self._engine.settings.topics.partitions
        )
        chosen = as_recovered(TopicPut(topic, chosen)).spec
        turnstile = self._making.setdefault(topic, Turnstile())
        try:
            async with turnstile:
                if topic not in self._engine.state.topics:  # or whoever was to make it gave up
                    await self._engine.intake.submit(
                        [], when_taken=lambda _: self._make(topic, chosen), for_publish=spec is None
                    )
        finally:
            if not turnstile:
                del self._making[topic]

    def _make(self, topic: str, spec: TopicSpec) -> list[Entry]:
        if topic in self._engine.state.topics:
            return []
        ends = self._engine.state.deleted.get(topic, ())
        spec = msgspec.structs.replace(spec, floors=ends)
        self._engine.state.topics[topic] = spec
        self.set_floors(topic, spec)
        return [TopicPut(topic, spec), *self._engine.groups.topic_made(topic, 0, spec.partitions)]

    def set_floors(self, topic: str, spec: TopicSpec) -> None:
        """Never give out the offsets of a deleted topic of the same name."""
        for partition, floor in enumerate(spec.floors):
            log = self._engine.log.partition(topic, partition)
            log.floor = floor
            log.end, log.next = max(log.end, floor), max(log.next, floor)

    def places(self, topic: str) -> Iterator[tuple[str, int]]:
        """A topic with each of its partitions."""
        return zip(repeat(topic), range(self._engine.state.topics[topic].partitions), strict=False)

    def ends(self, topic: str) -> list[int]:
        """The next offset of each partition."""
        count = self._engine.state.topics[topic].partitions
        return [self._engine.log.partition(topic, partition).next for partition in range(count)]

    def forget(self, topic: str) -> None:
        """A topic is being deleted: nobody reads it any more."""
        for partition in range(self._engine.state.topics[topic].partitions):
            for group in self._engine.dispatcher.groups.values():
                lane = group.lanes.get((topic, partition))
                if lane is not None:
                    intervention.reset(group, lane, lane.end)
                    del group.lanes[topic, partition]
                    self._engine.dispatcher.touched(group)  # its members may have room now
        self._engine.log.drop(self.places(topic))
        self._engine.fold.dedup.pop(topic, None)
        self._engine.groups.topic_gone(topic)

    def tenant_for(self, topic: str) -> str:
        """The tenant of an event that no identity speaks for."""
        return tenant_of(topic) or self._engine.settings.identity.tenant
