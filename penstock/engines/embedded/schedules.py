"""Schedules: publishes delayed and recurring events when they are due.

A delayed event is stored at once, in the system topic `_scheduled`, with labels that keep its topic,
partition, time to live, priority and token; when it is due it is published to its topic. A recurring
event is a definition in the state; each time it is due, one event is published.
"""

from __future__ import annotations

import asyncio
import logging
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from penstock.core.entry import Delayed, Entry, Fired, RecurringPut
from penstock.core.schedule import Definition
from penstock.model.column import Headers
from penstock.model.draft import Draft
from penstock.model.errors import BusClosed, OffsetExpired, PenstockError, Rejected, WriterFailed
from penstock.model.event import Event, Receipt
from penstock.model.token import TOKEN_BYTES, parse_token

if TYPE_CHECKING:
    from penstock.engines.embedded.engine import EmbeddedEngine

log = logging.getLogger("penstock.engines")

SCHEDULED = "_scheduled"
"""The topic in which delayed events of all topics wait."""

# The labels: headers of a delayed event.
TARGET = "penstock-topic"
TARGET_PARTITION = "penstock-partition"
TIME_TO_LIVE = "penstock-expires-us"
URGENCY = "penstock-priority"
TOKEN = "penstock-token"  # noqa: S105 - the name of a header
LABELS = (TARGET, TARGET_PARTITION, TIME_TO_LIVE, URGENCY, TOKEN)
# The most a label can hold: its column has no room for more.
MAX_TIME_US, MAX_URGENCY = (1 << 63) - 1, 255
# Delayed events published in one journal entry, and recurring ones.
FIRE_CHUNK = 256
FIRE_BYTES = 1 << 20  # payload bytes of recurring events in one entry; twice, with the definitions
# The wall clock may jump; look at it at least this often.
LOOK_AGAIN_S = 1.0


class Scheduler:
    """Publishes scheduled events when the clock reaches their times."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Something was scheduled."""
        self._changed.set()

    async def run(self) -> None:
        """Publish events that are due, as long as the engine is open."""
        schedule = self._engine.state.schedule
        while True:
            try:
                await self._publish_delayed()
                await self._publish_recurring()
            except Rejected as error:  # the disk is full: events that are due wait for room
                await asyncio.sleep(error.retry_after_s)
                continue
            due_us = schedule.next_due_us()
            wait_s = LOOK_AGAIN_S
            if due_us is not None:
                wait_s = min(wait_s, max(0.0, (due_us - self._engine.runtime.wall_us()) / 1e6))
            try:
                async with asyncio.timeout(wait_s if due_us is not None else None):
                    await self._changed.wait()
            except TimeoutError:
                continue
            self._changed.clear()

    # -- delayed events ------------------------------------------------------------------------

    def as_delayed(self, draft: Draft) -> tuple[Draft, int]:
        """A draft as it is stored until it is due, and when that is."""
        if draft.batch is not None:  # each event gets headers of its own below
            draft = draft.subset(range(draft.count))
        assert draft.deliver_at_us is not None
        stored = Draft(SCHEDULED, draft.payloads, tenant=draft.tenant, codec=draft.codec)
        stored.keys, stored.times_us = draft.keys, draft.times_us
        if draft.tokens is not None:  # a token belongs to its topic, and here all topics share one
            stored.tokens = [_scoped(draft.topic, token) for token in draft.tokens]
        stored.headers = [
            self._labelled(draft, index, (draft.headers or [None] * draft.count)[index])
            for index in range(draft.count)
        ]
        return stored, draft.deliver_at_us

    @staticmethod
    def _labelled(draft: Draft, index: int, headers: Headers | None) -> dict[str, str]:
        # A client's header with the name of a label would be read as the label.
        labelled = {name: text for name, text in (headers or {}).items() if name not in LABELS}
        labelled[TARGET] = draft.topic
        if draft.partition is not None:
            labelled[TARGET_PARTITION] = str(draft.partition)
        if draft.expires_us is not None:
            labelled[TIME_TO_LIVE] = str(draft.expires_us[index])
        if draft.priority is not None:
            labelled[URGENCY] = str(draft.priority[index])
        if draft.tokens is not None:
            labelled[TOKEN] = bytes(draft.tokens[index]).hex()
        return labelled

    @staticmethod
    def first_token(stored: Draft, given: bytes) -> bytes:
        """The token of the first event: the publisher's, or `given` when it chose none."""
        return _token((stored.headers or [None])[0], given)

    @staticmethod
    def entries(receipts: list[Receipt], due_us: int) -> list[Entry]:
        """The entries that say when stored drafts are due."""
        pairs: list[int] = []
        for receipt in receipts:
            for each in receipt.parts or (receipt,):
                if not each.duplicate:
                    for offset in range(each.offset, each.offset + each.count):
                        pairs += (offset, due_us)
        return [Delayed(pairs)] if pairs else []

    async def _publish_delayed(self) -> None:
        delayed = self._engine.state.schedule.delayed
        while offsets := delayed.due(self._engine.runtime.wall_us(), FIRE_CHUNK):
            try:
                await self._publish_due(offsets)
            except Rejected:
                delayed.put_back(offsets)
                raise

    async def _publish_due(self, offsets: list[int]) -> None:
        """Publish these together; when one cannot be published, publish each by itself."""
        try:
            drafts = [draft for at in offsets if (draft := await self._stored(at)) is not None]
            await self._engine.publisher.submit(drafts, entries=[Fired(offsets)])
        except (Rejected, BusClosed, WriterFailed):
            raise
        except PenstockError as error:
            if len(offsets) == 1:  # it stays in the schedule and is tried again at the next start
                log.error("a delayed event cannot be published: %s", error)
                return
            for at in offsets:
                await self._publish_due([at])

    async def _stored(self, offset: int) -> Draft | None:
        """A delayed event as it is to be published, or None when its file is gone."""
        engine = self._engine
        if offset >= engine.log.partition(SCHEDULED, 0).end:
            await engine.flush()  # due at once: wait until the event itself is committed
        try:
            draft = self._as_published(await engine.event_at(SCHEDULED, 0, offset))
        except OffsetExpired as error:  # retention keeps delayed events: a file was removed by hand
            log.error("a delayed event is gone: %s", error)
            return None
        await engine.topics.ensure(draft.topic)
        partitions = engine.state.topics[draft.topic].partitions
        if draft.partition is not None and draft.partition >= partitions:
            # Its topic was deleted meanwhile and now has fewer partitions: its key decides.
            draft.partition = None
        return draft

    @staticmethod
    def _as_published(event: Event) -> Draft:
        headers = dict(event.headers)
        draft = Draft(headers.pop(TARGET), [event.payload], tenant=event.tenant, codec=event.codec)
        draft.partition = _number(headers.pop(TARGET_PARTITION, None), MAX_TIME_US)
        expires = _number(headers.pop(TIME_TO_LIVE, None), MAX_TIME_US)
        urgency = _number(headers.pop(URGENCY, None), MAX_URGENCY)
        draft.expires_us = None if expires is None else [expires]
        draft.priority = None if urgency is None else [urgency]
        draft.keys, draft.headers = [event.key], [headers]
        # An earlier release stored the token itself, and no label.
        draft.tokens = [_token(headers, parse_token(event.token))]
        headers.pop(TOKEN, None)
        draft.times_us = [event.time_us]
        return draft

    # -- recurring events ----------------------------------------------------------------------

    async def _publish_recurring(self) -> None:
        recurring, now_us = self._engine.state.schedule.recurring, self._engine.runtime.wall_us()
        while due := recurring.due(now_us, FIRE_CHUNK):
            await self._publish_ticks(due, now_us)

    async def _publish_ticks(self, due: list[tuple[Definition, int]], now_us: int) -> None:
        """Publish these together; when one cannot be published, publish each by itself."""
        alone = False
        while due:
            ticks = due[:1] if alone else _in_one_entry(due)
            try:
                await self._submit_ticks(ticks)
            except Rejected:
                for definition, due_us in due:
                    self._engine.state.schedule.recurring.put_back(definition, due_us, now_us)
                raise
            except (BusClosed, WriterFailed):
                raise
            except PenstockError as error:
                if len(ticks) > 1:
                    alone = True
                    continue
                log.error("recurring event %r cannot be published: %s", ticks[0][0].id, error)
            del due[: len(ticks)]

    async def _submit_ticks(self, ticks: list[tuple[Definition, int]]) -> None:
        engine = self._engine
        recurring = engine.state.schedule.recurring
        drafts: list[Draft] = []
        for definition, due_us in ticks:
            tenant = engine.topics.tenant_for(definition.topic)
            draft = Draft(
                definition.topic, [definition.payload], tenant=tenant, codec=definition.codec
            )
            draft.headers = [{**definition.headers, "penstock-schedule": definition.id}]
            draft.times_us = [due_us]
            drafts.append(draft)

        def entries(_: list[Receipt]) -> list[Entry]:
            # A definition that was removed or replaced meanwhile stays removed or replaced.
            return [
                RecurringPut(definition.id, msgspec.msgpack.encode(definition))
                for definition, _ in ticks
                if recurring.holds(definition)
            ]

        await engine.publisher.submit(drafts, when_taken=entries)


def _in_one_entry(due: list[tuple[Definition, int]]) -> list[tuple[Definition, int]]:
    """The first events that are due, as many as one journal entry should hold."""
    size = 0
    for number, (definition, _) in enumerate(due):
        size += len(definition.payload)
        if size > FIRE_BYTES:
            return due[: max(1, number)]
    return due[:]


def _number(label: str | None, most: int) -> int | None:
    """The number in a label; None for a label that an older broker copied from a client's headers.

    >>> _number("7", 255), _number("9999", 255), _number("soon", 255), _number(None, 255)
    (7, None, None, None)
    """
    if label is None or not label.isascii() or not label.isdigit() or len(label) > len(str(most)):
        return None
    return int(label) if int(label) <= most else None


def _scoped(topic: str, token: bytes) -> bytes:
    """A token that stands for a topic's token among the delayed events of all topics."""
    return blake2b(bytes(token), key=blake2b(topic.encode()).digest()[:32], digest_size=16).digest()


def _token(headers: Headers | None, given: bytes) -> bytes:
    """The token in a label; `given` when there is none, or the label was not written here."""
    try:
        token = bytes.fromhex((headers or {}).get(TOKEN, ""))
    except ValueError:
        return given
    return token if len(token) == TOKEN_BYTES else given
