"""Clients of the old protocol, which never negotiate; the same broker serves them.

`OldClient` turns old commands into frames, and frames into old replies, so that identity, quotas, leases
and durability work as for every client. It sends on the client's behalf what old commands lack, such as
heartbeats and confirmations of answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from penstock.core.entry import GroupSpec
from penstock.core.retry import Retry
from penstock.model.batch import EventBatch
from penstock.model.errors import NotLeased, PayloadTooLarge, PenstockError, ProtocolViolation
from penstock.model.settings import Settings
from penstock.server.transports.link import UNANSWERED_BYTES, Connection, Link
from penstock.wire import legacy as old
from penstock.wire import message as say
from penstock.wire.frame import Frame, Kind
from penstock.wire.message import to_fault

# A tag is delivery and index in one number. No batch has more events than 2^24.
INDEX_BITS = 24
# Commands without an answer; reading pauses at this number.
MAX_WAITING = 1_024
MAX_SUBSCRIPTIONS = 64
# Deliveries whose tags are accepted: the lease of an older one has ended long ago.
MAX_DELIVERIES = 65_536
MEMBER = "old-client"

Answer = Callable[[Frame], old.AnyReply]


class Wire(Protocol):
    """The connection of an old client."""

    peer: str
    loopback: bool

    def write(self, *data: bytes) -> None:
        """Queue bytes; all of one call count as one frame."""
        ...

    def pending_bytes(self) -> int:
        """Bytes queued."""
        ...

    def close(self) -> None:
        """Send what is queued, then end the connection."""
        ...

    def welcomed(self) -> None:
        """The client has its Welcome: large messages are accepted from now on."""
        ...

    def hold(self, stop: bool) -> None:
        """Stop or go on reading from the client."""
        ...

    def rest(self, seconds: float) -> None:
        """Read nothing from the client for a while."""
        ...


class OldClient:
    """One old client; for the broker it is a Link."""

    def __init__(self, wire: Wire, settings: Settings) -> None:
        self.peer = wire.peer
        self.loopback = wire.loopback
        self._wire = wire
        self._settings = settings
        self._connection: Connection | None = None
        self._greeted = False
        self._welcome = False
        self._unsent: list[Frame] = []
        self._request = 0
        self._sequence = 0
        self._settle_sequence = 0
        self._answers: dict[int, tuple[_Slot, Answer]] = {}
        self._slots: deque[_Slot] = deque()
        self.waiting_bytes = 0
        """Bytes of its commands without an answer."""
        self._waiting: deque[old.AnyCommand] = deque()
        self._catching_up = False
        self._leased: dict[int, set[int]] = {}
        self._feeds = 0
        self._settlements: dict[int, _Report] = {}
        self._loop = asyncio.get_running_loop()
        self._heartbeat: asyncio.TimerHandle | None = None

    def start(self, connect: Callable[[Link], Connection]) -> Connection:
        """Connect to the broker; raises when it accepts no more clients."""
        self._connection = connect(self)
        self._schedule_heartbeat()
        return self._connection

    def stop(self) -> None:
        """The connection is gone."""
        self._connection = None
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    # -- commands ------------------------------------------------------------------------------

    def command(self, command: int, body: bytes | bytearray | memoryview) -> None:
        """Carry out a command; raises ProtocolViolation when it is not a valid one."""
        taken = old.parse_command(command, body)
        if self.full:  # it arrived in the same read as the commands before it
            self._waiting.append(taken)
        else:
            self._take(taken)
        if self.full:
            self._wire.hold(True)

    @property
    def full(self) -> bool:
        """Whether reading should pause until some of its commands are answered."""
        return self._busy or bool(self._waiting)

    @property
    def _busy(self) -> bool:
        return len(self._slots) >= MAX_WAITING or self.waiting_bytes > UNANSWERED_BYTES

    def _catch_up(self) -> None:
        self._catching_up = False
        try:
            while self._waiting and not self._busy:
                self._take(self._waiting.popleft())
        except PenstockError as error:
            self._wire.write(_error(to_fault(error)).message())
            self._wire.close()
        self._wire.hold(self.full)

    def _take(self, command: old.AnyCommand) -> None:
        if isinstance(command, old.LegacyAuth):
            self._hello(command.token, command.tenant, command.client, _Slot())
            return
        if not self._greeted:
            self._hello("", "", "", None)
        if isinstance(command, old.LegacyPublish):
            self._publish(command)
        elif isinstance(command, old.Ack):
            self._settle(command.tag, lambda report, index: report.acks.append(index))
        elif isinstance(command, old.Nack):
            ladder = command.delay_ms == old.LADDER_DELAY
            delay_s = None if ladder else command.delay_ms / 1_000
            reason = command.reason or "nacked"
            self._settle(
                command.tag, lambda report, index: report.nacks.append((index, delay_s, reason))
            )
        elif isinstance(command, old.LegacySubscribe):
            self._subscribe(command)
        elif isinstance(command, old.Create):
            fields = {"topic": command.topic, "spec": {"partitions": command.partitions}}
            self._ask(Kind.ASK, say.Ask("CreateTopic", fields), lambda _: old.Ok())
        else:
            self._reply(self._slot(), old.Ok(command.data))

    def _hello(self, token: str, tenant: str, client: str, slot: _Slot | None) -> None:
        if self._greeted:
            raise ProtocolViolation("AUTH is the first command, and comes once")
        self._greeted = True
        hello = say.Hello(
            client or f"{MEMBER}-{self.peer}",
            token=token,
            tenant=tenant,
            agent=MEMBER,
            resumable=False,
            heartbeat_s=self._settings.server.heartbeat_s,
        )
        if slot is not None:
            self._slots.append(slot)
            self._answers[0] = (slot, lambda _: old.Ok())
        self._send(Frame(Kind.HELLO, 0, say.encode(hello)))

    def _publish(self, command: old.LegacyPublish) -> None:
        size_bytes, limit_bytes = len(command.payload), self._settings.limits.max_payload_bytes
        if size_bytes > limit_bytes:  # refused before it is copied on its way to the engine
            words = (
                f"a payload of {size_bytes} bytes is over limits.max_payload_bytes of {limit_bytes}"
            )
            self._reply(
                self._slot(), old.Error(PayloadTooLarge.code, f"{words}; send less at once")
            )
            return
        self._sequence += 1
        draft = say.DraftMeta(command.topic, payloads=[command.payload])
        self._ask(Kind.PUBLISH, say.Publish(self._sequence, [draft]), _stored, size_bytes)

    def _subscribe(self, command: old.LegacySubscribe) -> None:
        if self._feeds >= MAX_SUBSCRIPTIONS:
            raise ProtocolViolation(f"more than {MAX_SUBSCRIPTIONS} subscriptions")
        self._feeds += 1
        number, delivery = self._feeds, self._settings.delivery
        spec = GroupSpec(
            (command.pattern,),
            retry=Retry(delivery.ladder_ms, delivery.max_attempts),
            lease_s=delivery.lease_s,
        )
        outstanding = command.max_outstanding or old.DEFAULT_OUTSTANDING
        member = f"{MEMBER}-{self.peer}-{number}"
        message = say.Subscribe(number, command.group, spec, member, outstanding)
        self._ask(Kind.SUBSCRIBE, message, lambda _: old.Ok.subscribed(number))

    def _settle(self, tag: int, note: Callable[[_Report, int], None]) -> None:
        delivery, index = tag >> INDEX_BITS, tag & ((1 << INDEX_BITS) - 1)
        held = self._leased.get(delivery)
        slot = self._slot()
        if held is None or index not in held:
            words = f"tag {tag} is not held by this client: settled before, or never sent to it"
            self._reply(slot, old.Error(NotLeased.code, words))
            return
        held.discard(index)
        if not held:
            del self._leased[delivery]
        note(self._report(delivery), index)
        self._reply(slot, old.Ok())

    # -- what the broker calls -----------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        """Turn a frame into replies."""
        if frame.kind == Kind.DELIVER:
            self._deliver(frame)
        elif frame.kind in (Kind.RESULT, Kind.FAULT) and frame.request in self._answers:
            slot, answer = self._answers.pop(frame.request)
            if frame.kind == Kind.FAULT:
                self._reply(slot, _error(say.decode(frame.meta, say.Fault)))
            else:
                self._reply(slot, answer(frame))
        elif frame.kind == Kind.WELCOME:
            self._welcomed(frame)
        elif frame.kind == Kind.FAULT:
            self._wire.write(_error(say.decode(frame.meta, say.Fault)).message())
        elif frame.kind == Kind.REFUSED:
            refused: say.Refused = say.decode(frame.meta, say.Refused)
            tag = refused.delivery << INDEX_BITS | refused.index
            self._notice(tag, refused.fault)
        elif frame.kind == Kind.STOPPED:
            stopped: say.Feed = say.decode(frame.meta, say.Feed)
            self._notice(0, stopped.fault or say.Fault("closed", "the subscription has ended"))

    def rest(self, seconds: float) -> None:
        """Read nothing from the client for a while."""
        self._wire.rest(seconds)

    def pending_bytes(self) -> int:
        """Bytes queued and not yet taken by the operating system."""
        return self._wire.pending_bytes()

    def close(self) -> None:
        """Send what is queued, then end the connection."""
        self._wire.close()

    def _welcomed(self, frame: Frame) -> None:
        self._welcome = True
        self._wire.welcomed()
        waiting = self._answers.pop(0, None)
        if waiting is not None:
            self._reply(waiting[0], waiting[1](frame))
        early, self._unsent = self._unsent, []
        for each in early:
            self._send(each)

    def _deliver(self, frame: Frame) -> None:
        meta: say.Deliver = say.decode(frame.meta, say.Deliver)
        batch = EventBatch.decode(frame.parts[0])
        skip = set(meta.skip)
        held = set()
        messages = []
        for event in batch:
            if event.index not in skip:
                held.add(event.index)
                tag = meta.delivery << INDEX_BITS | event.index
                leased = old.LegacyLeased(
                    meta.feed, tag, meta.attempt, event.partition, event.offset, event.time_us,
                    event.topic, event.key, event.payload,
                )  # fmt: skip
                messages.append(leased.message())
        # In one call: a single delivery, however large, does not disconnect a client.
        self._wire.write(*messages)
        self._leased[meta.delivery] = held
        if len(self._leased) > MAX_DELIVERIES:
            del self._leased[next(iter(self._leased))]
        self._report(meta.delivery).handed = batch.count

    # -- requests, replies and reports ---------------------------------------------------------

    def _ask(self, kind: Kind, message: say.Message, answer: Answer, size_bytes: int = 0) -> None:
        self._request += 1
        self._answers[self._request] = (self._slot(size_bytes), answer)
        self._send(Frame(kind, self._request, say.encode(message)))

    def _send(self, frame: Frame) -> None:
        if not self._welcome and frame.kind != Kind.HELLO:
            self._unsent.append(frame)
        elif self._connection is not None:
            self._connection.received(frame)

    def _slot(self, size_bytes: int = 0) -> _Slot:
        slot = _Slot(size_bytes)
        self._slots.append(slot)
        self.waiting_bytes += size_bytes
        return slot

    def _reply(self, slot: _Slot, reply: old.AnyReply) -> None:
        """Replies leave in the order of their commands, whichever was ready first."""
        slot.reply = reply.message()
        while self._slots and self._slots[0].reply is not None:
            first = self._slots.popleft()
            self.waiting_bytes -= first.size_bytes
            self._wire.write(first.reply or b"")
        if self._waiting and not self._catching_up:
            self._catching_up = True
            self._loop.call_soon(self._catch_up)
        if not self.full:
            self._wire.hold(False)

    def _notice(self, tag: int, fault: say.Fault) -> None:
        self._wire.write(old.Notice(tag, fault.code, fault.message).message())

    def _report(self, delivery: int) -> _Report:
        if not self._settlements:
            self._loop.call_soon(self._send_report)
        return self._settlements.setdefault(delivery, _Report())

    def _send_report(self) -> None:
        settlements, self._settlements = self._settlements, {}
        self._settle_sequence += 1
        message = say.Settle(
            self._settle_sequence,
            [
                say.Settlement(number, report.handed, _runs(report.acks), report.nacks)
                for number, report in settlements.items()
            ],
        )
        self._send(Frame(Kind.SETTLE, 0, say.encode(message)))

    def _schedule_heartbeat(self) -> None:
        self._heartbeat = self._loop.call_later(
            self._settings.server.heartbeat_s, self._send_heartbeat
        )

    def _send_heartbeat(self) -> None:
        """Old clients send no heartbeats: TCP notices a client that is gone."""
        if self._welcome:
            answered = min(self._answers, default=self._request + 1)
            self._send(Frame(Kind.HEARTBEAT, 0, say.encode(say.Beat(answered))))
        self._schedule_heartbeat()


class _Slot:
    """The place of a reply in the order of replies."""

    __slots__ = ("reply", "size_bytes")

    def __init__(self, size_bytes: int = 0) -> None:
        self.size_bytes = size_bytes
        """Bytes of the command, held until the reply."""
        self.reply: bytes | None = None


class _Report:
    """The settlements of a delivery in this turn of the loop."""

    __slots__ = ("acks", "handed", "nacks")

    def __init__(self) -> None:
        self.handed = 0
        self.acks: list[int] = []
        self.nacks: list[tuple[int, float | None, str]] = []


def _runs(indices: list[int]) -> list[int]:
    return [number for index in sorted(indices) for number in (index, 1)]


def _stored(frame: Frame) -> old.AnyReply:
    published: say.Published = say.decode(frame.meta, say.Published)
    receipt = published.receipts[0]
    if receipt is None:
        return _error(published.faults[0])
    return old.Ok.stored(receipt.partition, receipt.offset)


def _error(fault: say.Fault) -> old.Error:
    return old.Error(fault.code, fault.message)
