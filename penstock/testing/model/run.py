"""One sequence against one engine: each step is called, looked at, and compared with the model.

What is executed is text: `await bus.publish(...)`. The same lines are the script that is printed when
the bus contradicts the model.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import penstock
from penstock.testing.model.found import Found
from penstock.testing.model.groups import (
    Contradiction,
    Group,
    GroupOptions,
    Hand,
    Letter,
    NotYet,
    Sent,
    Window,
    selects,
)
from penstock.testing.model.harness import Harness
from penstock.testing.model.known import excused_on
from penstock.testing.model.reference import Model, Publish, Recurring, expect
from penstock.testing.model.sequence import Sequence, Step, shrink

PATIENCE_S = 15.0
"""How long something that must happen may take on an engine whose time is real."""
REMEMBERED = 24
"""Deliveries that later steps may settle, settled ones included."""


@dataclass
class Seat:
    """One member as the script knows it."""

    variable: str
    group: str
    name: str
    client: str
    log: bool = False


class Driver:
    """Runs one sequence."""

    def __init__(self, harness: Harness, sequence: Sequence) -> None:
        self.harness = harness
        self.sequence = sequence
        self.model = Model(harness.slack_s, wire=harness.outlived, excused=excused_on(harness.name))
        self.names: dict[str, Any] = {"penstock": penstock, "asyncio": asyncio, "harness": harness,
                                      "uuid": uuid, "datetime": datetime, "UTC": UTC}  # fmt: skip
        self.lines: list[str] = []
        self.seats: list[Seat] = []
        self.hands: list[tuple[str, Hand]] = []
        self.clients: dict[str, str] = {}
        """By which client the event of a variable was received."""
        self.seat_of: dict[str, str] = {}
        """And by which subscription."""
        self.error: str | None = None
        self._numbers = 0
        self._open: set[str] = set()
        self.doubts = False
        """Whether something was settled that a broker may refuse, or not hear of."""
        self.step = Step("start")

    # -- calls -------------------------------------------------------------------------------------

    async def call(self, source: str) -> str | None:
        """Execute a line; the name of the error that it raised, or None."""
        code = compile(source, "<step>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        self.lines.append(source)
        self.began = self.harness.now()
        error: str | None = None
        try:
            running = eval(code, self.names)  # noqa: S307 - it is ours
            if inspect.iscoroutine(running):
                await running
        except penstock.errors.PenstockError as caught:
            error = type(caught).__name__
            inner = source.replace("\n", "\n    ")
            self.lines[-1] = f"with contextlib.suppress(penstock.{error}):\n    {inner}"
            self.names["error"] = caught
        self.ended, self.error = self.harness.now(), error
        return error

    def _new(self, kind: str) -> str:
        self._numbers += 1
        return f"{kind}{self._numbers}"

    async def run(self) -> None:
        """All steps; raises the first contradiction."""
        await self._connect("bus")
        for step in self.sequence.steps:
            self.step = step
            self.model.pass_time(self.harness.now())
            await getattr(self, f"do_{step.kind}")(**step.args)
            await self.harness_pause()
            await self._look()
        self.step = Step("drain")
        await self._drain()

    async def harness_pause(self) -> None:
        """What lies between two steps."""
        await asyncio.sleep(self.harness.pause_s)

    async def _connect(self, client: str) -> None:
        await self.call(f"{client} = await harness.open({client!r})")
        self._open.add(client)

    async def _client(self, client: str) -> str:
        """The client asked for, where an engine has several."""
        if not self.harness.outlived:
            return "bus"
        if client not in self._open:
            await self._connect(client)
        return client

    # -- looking -----------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Compare everything that operators see; an engine whose time is real may take a moment."""
        end = self.harness.now() + (PATIENCE_S if self.harness.outlived else 0.5)
        while True:
            try:
                return await self._look_once()
            except NotYet:
                if self.harness.now() >= end:
                    raise
            await asyncio.sleep(0.1)

    async def _look_once(self) -> None:
        model, prefix, bus = self.model, f"{self.sequence.prefix}.", self.names["bus"]
        began = self.harness.now()
        infos = [info for info in await bus.topics.list() if info.name.startswith(prefix)]
        model.topic_list(infos)
        for info in infos:
            for each in info.partitions:
                await self._read_on(info.name, each.partition, each.end_offset)
        model.looked(began)
        for name, group in list(model.groups.items()):
            if not name.startswith("_"):
                letters = await bus.dead_letters.list(consumer=name, limit=1000)
                group.pass_time(began)
                group.listed(letters, self.harness.now())
        t0 = self.harness.now()
        model.pass_time(t0)
        groups = await bus.groups.list()
        ours = [info for info in groups if info.name.startswith(f"{self.sequence.prefix}-")]
        model.group_list(ours, t0, self.harness.now())

    async def _read_on(self, topic: str, partition: int, end: int) -> None:
        start = self.model.topics[topic].ends.get(partition, 0)
        if start >= end:
            return
        replay = self.names["bus"].replay(
            topic, partition=partition, from_offset=start, to_offset=end
        )
        events = [event async for event in replay]
        for event in events:
            self.model.stored(event, self.harness.now())
        found = self.model.topics[topic].ends.get(partition, 0)
        if found != end:
            raise Contradiction(
                "replay.md: up to what is committed", f"{topic}/{partition} to {end}", found
            )

    # -- publishing --------------------------------------------------------------------------------

    def _sent(self, topic: str, event: dict[str, Any]) -> tuple[Sent, str, dict[str, str]]:
        """An event as the model has it, its value as text, and its options as text."""
        number, json = event["number"], event.get("codec") == "json"
        sent = Sent(topic, f'{{"n":{number}}}'.encode() if json else str(number).encode())
        options: dict[str, str] = {}
        if json:
            sent.codec, options["codec"] = "json", "'json'"
        else:
            options["codec"] = "'raw'"
        if "key" in event:
            sent.key, options["key"] = event["key"].encode(), repr(event["key"])
        if "headers" in event:
            sent.headers, options["headers"] = event["headers"], repr(event["headers"])
        if "priority" in event:
            sent.priority, options["priority"] = event["priority"], repr(event["priority"])
        if "name" in event:
            sent.name, options["idempotency_key"] = event["name"], repr(event["name"])
        if "token" in event:
            sent.token = uuid.UUID(int=(self.sequence.seed << 64) + event["token"])
            options["token"] = f"uuid.UUID(int={sent.token.int})"
        if "event_time" in event:
            sent.time_us = event["event_time"] * 1_000_000
            options["event_time"] = f"datetime.fromtimestamp({event['event_time']}, UTC)"
        return sent, f"{{'n': {number}}}" if json else repr(sent.payload), options

    async def do_publish(self, topic: str, event: dict[str, Any]) -> None:
        """One event."""
        sent, value, options = self._sent(topic, event)
        there = self.model.topics.get(topic)
        if "partition" in event:
            partition = event["partition"] if there is not None else 0
            sent.partition, options["partition"] = partition, repr(partition)
            sent.key = None
        if "ttl_s" in event:
            options["ttl_s"] = repr(event["ttl_s"])
        if "delay_s" in event:
            sent.delayed, options["delay_s"] = True, repr(event["delay_s"])
        if "deliver_in_s" in event:
            sent.delayed = True
            options["deliver_at"] = (
                f"datetime.fromtimestamp(bus.wall_us() / 1e6 + {event['deliver_in_s']}, UTC)"
            )
        if sent.delayed and "M2" in self.model.excused:
            sent.name = sent.token = None
            options.pop("idempotency_key", None)
            options.pop("token", None)
        receipt = self._new("r")
        error = await self.call(
            f"{receipt} = await bus.publish({topic!r}, {value}, {_options(options)})"
        )
        t0, t1 = self.began, self.ended
        if sent.partition is not None and there is not None and sent.partition >= there.partitions:
            expect("publish to a partition that the topic does not have",
                   {"InvalidInput", "UnknownTopic"}, error)  # fmt: skip
            return
        expect("publishing.md: publish", {None}, error)
        if sent.delayed:
            later = max(0.0, event.get("delay_s", event.get("deliver_in_s", 0.0)))
            sent.due = Window(t0, t1).later(later, self.harness.slack_s)
        if "ttl_s" in event:
            sent.expires = Window(t0, t1).later(event["ttl_s"])
        await self._published([sent], receipt, t0, t1)

    async def _published(self, sents: list[Sent], receipt: str, t0: float, t1: float) -> Publish:
        publish = self.model.publishing(sents, t0, t1)
        await self._look()
        if receipt:
            self.model.receipt(publish, self.names[receipt])
        return publish

    async def do_publish_many(
        self,
        topic: str,
        events: list[dict[str, Any]],
        ttl_s: float | None,
        delay_s: float | None,
        partition: int | None,
    ) -> None:
        """Several events in one call."""
        made = [self._sent(topic, event) for event in events]
        columns = {"codec": "'raw'"}
        for name, option, missing in (
            ("keys", "key", "None"), ("headers", "headers", "None"), ("priorities", "priority", "0"),
            ("idempotency_keys", "idempotency_key", ""), ("event_times", "event_time", "None"),
        ):  # fmt: skip
            column = [options.get(option, missing) for _, _, options in made]
            if any(value != missing for value in column):
                columns[name] = f"[{', '.join(column)}]"
        there = self.model.topics.get(topic)
        if ttl_s is not None:
            columns["ttl_s"] = repr(ttl_s)
        if delay_s is not None:
            columns["delay_s"] = repr(delay_s)
        if partition is not None and there is not None and partition < there.partitions:
            columns["partition"] = repr(partition)
            columns.pop("keys", None)
            for sent, _, _ in made:
                sent.partition, sent.key = partition, None
        receipt = self._new("r")
        values = ", ".join(value for _, value, _ in made)
        error = await self.call(
            f"{receipt} = await bus.publish_many({topic!r}, [{values}], {_options(columns)})"
        )
        expect("publishing.md: publish_many", {None}, error)
        t0, t1 = self.began, self.ended
        for sent, _, _ in made:
            if ttl_s is not None:
                sent.expires = Window(t0, t1).later(ttl_s)
            if delay_s is not None:
                sent.delayed = True
                sent.due = Window(t0, t1).later(delay_s, self.harness.slack_s)
        await self._published([sent for sent, _, _ in made], receipt, t0, t1)

    async def do_transaction(
        self,
        events: list[tuple[str, dict[str, Any]]],
        acks: list[int],
        key: str | None,
        fails: bool,
    ) -> None:
        """Publishes and acks that happen together, or not at all."""
        made = [self._sent(topic, event) for topic, event in events]
        picked = [
            (variable, hand) for variable, hand in map(self._hand, dict.fromkeys(acks)) if hand
        ]
        client = self.clients[picked[0][0]] if picked else "bus"
        picked = [each for each in dict.fromkeys(picked) if self.clients[each[0]] == client]
        lines = [
            f"tx.publish({sent.topic!r}, {value}, {_options(options)})"
            for sent, value, options in made
        ]
        lines += [f"tx.ack({variable})" for variable, _ in picked]
        if fails:
            lines.append("raise penstock.Rejected('the caller gives up')")
        named = f"idempotency_key={key!r}" if key else ""
        repeated = key in self.model.done_keys
        error = await self.call(
            f"async with {client}.transaction({named}) as tx:\n    " + "\n    ".join(lines)
        )
        t0, t1 = self.began, self.ended
        if fails:
            return expect(
                "transactions.md: an exception inside, and nothing has happened",
                {"Rejected"},
                error,
            )
        permitted = [hand.answers(t0, t1) for _, hand in picked]
        bad = {each for answers in permitted for each in answers if each is not None}
        if error is not None:
            if error not in bad and not repeated:
                raise Contradiction(
                    "transactions.md: it happens when all of it can", "it happens", error
                )
            return None
        tx = self.names["tx"]
        if tx.repeated != repeated:
            raise Contradiction(
                "transactions.md: at most once under a key", f"repeated={repeated}", tx.repeated
            )
        if repeated:
            return None
        if any(None not in answers for answers in permitted):
            raise Contradiction(
                "transactions.md: nothing happens when a lease ran out", bad, "it happened"
            )
        if key is not None:
            self.model.done_keys.add(key)
        for _, hand in picked:
            self._group_of(hand).settled(hand, "ack", None, t0, t1)
            hand.owed.settled_at = 0.0
        await self._published([sent for sent, _, _ in made], "", t0, t1)
        for (sent, _, _), receipt in zip(made, tx.receipts, strict=True):
            ids = [tuple(each) for each in receipt.ids()]
            if ids != [sent.place]:
                raise Contradiction(
                    "transactions.md: one receipt for each publish", [sent.place], ids
                )
        return None

    # -- members -----------------------------------------------------------------------------------

    async def do_join(self, group: str, member: str, max_inflight: int, client: str) -> None:
        """A member joins."""
        client, options = await self._client(client), self.sequence.groups[group]
        if any((seat.group, seat.name) == (group, member) for seat in self.seats):
            return
        there = self.model.groups.get(group)
        if there is not None and member in there.members:
            return  # dropped: its name is still taken
        variable = self._new("m")
        text = {"group": repr(group), "member": repr(member), "start": _place(options.start)}
        if options.mode == "log":
            text["mode"] = "'log'"
        else:
            ladder = tuple(round(step * 1000) for step in options.ladder_s)
            text |= {
                "order": repr(options.order), "max_inflight": repr(max_inflight),
                "lease_s": repr(options.lease_s),
                "retry": f"penstock.Retry({ladder}, {options.max_attempts})",
            }  # fmt: skip
            if options.filter:
                text["filter"] = repr(options.filter)
        error = await self.call(
            f"{variable} = await {client}.subscribe({options.pattern!r}, {_options(text)}).open()"
        )
        permitted: set[str | None] = {None}
        if group not in self.model.groups and group not in self.model.logs:
            permitted = self.model.place_answers(self.model.lanes(options.pattern), options.start)
        expect("consuming.md: subscribe", permitted, error)
        if error is not None:
            return
        self.model.joined(group, options, member, max_inflight, self.began, self.ended)
        self.seats.append(Seat(variable, group, member, client, options.mode == "log"))

    async def do_listen(self, pattern: str, max_inflight: int) -> None:
        """A subscription without a group."""
        if sum(seat.group.startswith("_") for seat in self.seats) > 1:
            return
        variable = self._new("m")
        error = await self.call(
            f"{variable} = await bus.subscribe({pattern!r}, max_inflight={max_inflight}).open()"
        )
        expect("consuming.md: subscribe", {None}, error)
        options = GroupOptions(pattern, start="latest")
        self.model.joined(f"_{variable}", options, variable, max_inflight, self.began, self.ended)
        self.seats.append(Seat(variable, f"_{variable}", variable, "bus"))

    def _seat(self, pick: int, *, log: bool = False) -> Seat | None:
        seats = [seat for seat in self.seats if seat.log == log]
        return seats[pick % len(seats)] if seats else None

    async def do_leave(self, pick: int) -> None:
        """A member closes its subscription."""
        seat = self._seat(pick, log=pick % 5 == 0)
        if seat is None:
            return None
        error = await self.call(f"await {seat.variable}.close()")
        expect("consuming.md: close", {None}, error)
        self.seats.remove(seat)
        if seat.log:
            return self.model.logs[seat.group].leave(seat.name)
        self.model.groups[seat.group].leave(seat.name, self.began, self.ended)
        if seat.group.startswith("_"):
            del self.model.groups[seat.group]
        return None

    async def do_drop(self, pick: int) -> None:
        """A member is not asked any more, and never closed."""
        seat = self._seat(pick)
        if seat is not None and not seat.group.startswith("_"):
            self.lines.append(f"# {seat.variable} is dropped without closing")
            self.seats.remove(seat)
            self.model.groups[seat.group].members[seat.name].gone_until = float("inf")

    async def do_get(self, pick: int, count: int) -> None:
        """A member asks for events, one by one."""
        seat = self._seat(pick)
        for _ in range(count if seat is not None else 0):
            assert seat is not None
            if not await self._get(seat):
                return

    async def _get(self, seat: Seat) -> bool:
        group, now = self.model.groups[seat.group], self.harness.now()
        self.model.pass_time(now)
        due = group.must_hand(seat.name, now, PATIENCE_S if self.harness.outlived else 1.0)
        timeout_s = self.harness.quiet_s
        if due is not None:
            timeout_s = PATIENCE_S if self.harness.outlived else 1.0
        variable = self._new("e")
        error = await self.call(f"{variable} = await {seat.variable}.get(timeout_s={timeout_s})")
        t0, t1 = self.began, self.ended
        expect("consuming.md: get gives an event or None", {None}, error)
        event = self.names[variable]
        if event is None:
            self.lines[-1] += "  # None"
            if due is not None:
                raise Contradiction(
                    "delivery.md: every event is delivered until it is acked or dead",
                    f"{due.event.place} for {seat.name} of {seat.group}, due since "
                    f"{t0 - due.due.last:.3f} s", f"nothing within {timeout_s} s",
                )  # fmt: skip
            return False
        self.lines[-1] += f"  # {event.id} attempt {event.attempt} priority {event.priority}"
        await self._look_for(event)
        hand = group.handed(seat.name, event, t0, t1)
        self.hands = [*self.hands, (variable, hand)][-REMEMBERED:]
        self.clients[variable], self.seat_of[variable] = seat.client, seat.variable
        return True

    async def _look_for(self, event: Any) -> None:
        """What was handed out was stored before: see it there first."""
        topic = self.model.topics.get(event.topic)
        if topic is None:
            infos = await self.names["bus"].topics.list()
            self.model.topic_list(
                [i for i in infos if i.name.startswith(f"{self.sequence.prefix}.")]
            )
            topic = self.model.topics.get(event.topic)
        if topic is not None and event.offset >= topic.ends.get(event.partition, 0):
            await self._read_on(event.topic, event.partition, event.offset + 1)

    # -- settling ----------------------------------------------------------------------------------

    def _hand(self, pick: int, *, late: bool = False) -> tuple[str, Hand | None]:
        hands = [each for each in self.hands if late or each[1].state == "live"]
        return hands[pick % len(hands)] if hands else ("", None)

    def _group_of(self, hand: Hand) -> Group:
        for group in self.model.groups.values():
            if group.owed.get(hand.owed.event.place) is hand.owed:
                return group
        return Group("_gone", GroupOptions("#"), 0.0)

    async def do_settle(
        self, pick: int, how: str, late: bool, delay_s: float | None = None
    ) -> None:
        """A delivery is settled, in time or not."""
        variable, hand = self._hand(pick, late=late)
        if hand is None:
            return
        call, reason = how.removesuffix("_later"), None
        arguments = ""
        if call in ("nack", "reject"):
            reason = f"because {len(self.lines)}"
            arguments = f"reason={reason!r}"
        if delay_s is not None:
            arguments = ", ".join(filter(None, (repr(delay_s), arguments)))
        group = self._group_of(hand)
        error = await self.call(f"await {variable}.{call}({arguments})")
        if (
            self.harness.outlived
            and error is None
            and hand.answers(self.began, self.ended) != {None}
        ):
            self.doubts = True  # what a broker says to it is heard with the next flush
        group.settled(hand, call, error, self.began, self.ended, delay_s=delay_s, reason=reason)

    async def do_settle_many(self, pick: int, how: str, delay_s: float | None) -> None:
        """Deliveries of one member that are surely its own are settled in one call."""
        variable, _ = self._hand(pick)
        seat = self.seat_of.get(variable, "")
        if seat not in [each.variable for each in self.seats]:
            return
        sure = self.harness.now() + self.harness.slack_s + 1.0
        hands = [
            (name, hand) for name, hand in self.hands
            if self.seat_of[name] == seat and hand.state == "live" and hand.deadline.first > sure
            and not hand.doubtful
        ]  # fmt: skip
        if not hands:
            return
        events = ", ".join(name for name, _ in hands)
        argument = "" if delay_s is None else f", {delay_s}"
        error = await self.call(f"await {seat}.{how}([{events}]{argument})")
        for _, hand in hands:
            self._group_of(hand).settled(hand, how, error, self.began, self.ended, delay_s=delay_s)

    async def do_seal(self) -> None:
        """What is stored goes from the journal into segments; nothing else changes."""
        expect("topics.seal", {None}, await self.call("await bus.topics.seal()"))

    async def do_flush(self, client: str) -> None:
        """Every ack so far is durable."""
        client = await self._client(client)
        error = await self.call(f"await {client}.flush()")
        permitted: set[str | None] = {None}
        if self.doubts:
            permitted |= {"LeaseExpired", "Fenced", "AlreadySettled", "ConnectionLost"}
        expect("consuming.md: flush waits until every ack so far is on disk", permitted, error)
        if error is not None:
            self.doubts = False
            return
        mine = {seat.group for seat in self.seats if seat.client != client}
        for name, group in self.model.groups.items():
            if name not in mine:
                group.flushed_at = self.began

    # -- log groups --------------------------------------------------------------------------------

    async def do_read(self, pick: int, count: int) -> None:
        """A member of the log group reads."""
        seat = self._seat(pick, log=True)
        for _ in range(count if seat is not None else 0):
            assert seat is not None
            log = self.model.logs[seat.group]
            places, alone = log.members[seat.name], len(log.members) == 1 and not log.shifted
            must = alone and any(
                places.get(lane, max(log.committed.get(lane, {0})))
                < self.model.topics[lane[0]].ends.get(lane[1], 0)
                for lane in self.model.lanes(log.pattern)
            )
            variable = self._new("e")
            timeout_s = (
                (PATIENCE_S if self.harness.outlived else 1.0) if must else self.harness.quiet_s
            )
            error = await self.call(
                f"{variable} = await {seat.variable}.get(timeout_s={timeout_s})"
            )
            expect("consuming.md: get gives an event or None", {None}, error)
            event = self.names[variable]
            if event is None:
                if must:
                    raise Contradiction(
                        "consuming.md: a log is read to its end", "an event", "none"
                    )
                return
            self.lines[-1] += f"  # {event.id}"
            await self._look_for(event)
            topic = self.model.topics.get(event.topic)
            if topic is None or event.offset < topic.firsts.get(event.partition, 0):
                continue  # its topic was deleted while its batch was in the reader's hands
            sent = topic.events.get(event.partition, {}).get(event.offset)
            log.read(seat.name, event, sent, topic.firsts.get(event.partition, 0))

    async def do_commit(self, pick: int, transaction: bool) -> None:
        """A member of the log group makes what it read the group's place."""
        seat = self._seat(pick, log=True)
        if seat is None:
            return
        source = f"await {seat.variable}.commit()"
        if transaction:
            source = (
                f"async with {seat.client}.transaction() as tx:\n    tx.commit({seat.variable})"
            )
        error = await self.call(source)
        self.model.logs[seat.group].commit(seat.name, error)

    # -- time and lives ----------------------------------------------------------------------------

    async def do_wait(self, seconds: float) -> None:
        """Time passes."""
        await self.call(f"await asyncio.sleep({seconds})")

    async def do_close(self, client: str) -> None:
        """A bus is closed, with its members, and opened again."""
        client = await self._client(client)
        t0 = self.harness.now()
        error = await self.call(f"await {client}.close()")
        expect("close", {None}, error)
        await self._connect(client)
        t1 = self.ended
        if self.harness.outlived:
            for seat in [seat for seat in self.seats if seat.client == client]:
                self._lost(seat, t0, t1)
            return None
        self.seats.clear()
        if self.harness.keeps:
            return self.model.closed(t0, t1)
        self.hands.clear()
        self.model = self.model.forgets()
        return None

    def _lost(self, seat: Seat, t0: float, t1: float) -> None:
        self.seats.remove(seat)
        if seat.log:
            return self.model.logs[seat.group].leave(seat.name)
        group = self.model.groups[seat.group]
        hands = group.members[seat.name].hands
        group.leave(seat.name, t0, t1)
        for hand in hands:
            hand.state = "closed"
        if seat.group.startswith("_"):
            del self.model.groups[seat.group]
        return None

    async def do_kill(self, flush: bool) -> None:
        """The engine's process is killed; another one goes on from its folder."""
        if flush:
            await self.do_flush("bus")
        t0 = self.harness.now()
        await self.call("await harness.kill()")
        self.doubts = True
        if self.harness.outlived:
            return self.model.engine_restarted(t0, self.ended, self.harness.unwritten_s)
        await self._connect("bus")
        self.seats.clear()
        self.model.killed(t0, self.ended, self.harness.unwritten_s)
        return None

    async def do_restart(self, flush: bool) -> None:
        """The engine stops politely and starts again."""
        if flush:
            await self.do_flush("bus")
        t0 = self.harness.now()
        await self.call("await harness.restart()")
        self.doubts = True
        self.model.engine_restarted(t0, self.ended, 0.0)

    async def do_cut(self, client: str) -> None:
        """A connection breaks, and the client connects again."""
        client = await self._client(client)
        await self.call(f"await harness.cut({client!r})")
        self.doubts = True
        for log in self.model.logs.values():
            log.shifted = {*log.members}

    async def do_die(self, client: str) -> None:
        """A client vanishes, with all its members."""
        if client not in self._open:
            return
        t0 = self.harness.now()
        await self.call(f"await harness.die({client!r})")
        self._open.remove(client)
        until = self.ended + self.harness.session_s + self.harness.slack_s
        for seat in [seat for seat in self.seats if seat.client == client]:
            self.seats.remove(seat)
            if seat.log:
                self.model.logs[seat.group].leave(seat.name)
            else:
                self.model.groups[seat.group].vanish(seat.name, t0, until)

    # -- operators ---------------------------------------------------------------------------------

    def _busy(self, topic: str) -> bool:
        """Whether the bus may make this topic by itself at any moment."""
        return any(s.topic == topic for s in self.model.waiting) or any(
            each.topic == topic for each in self.model.recurring.values()
        )

    async def do_create(self, topic: str, partitions: int) -> None:
        """A topic is made."""
        if not self._busy(topic):
            error = await self.call(f"await bus.topics.create({topic!r}, partitions={partitions})")
            self.model.topic_created(topic, partitions, error)

    async def do_grow(self, topic: str, partitions: int) -> None:
        """A topic gets more partitions."""
        if not self._busy(topic):
            error = await self.call(f"await bus.topics.grow({topic!r}, {partitions})")
            self.model.topic_grown(topic, partitions, error)

    async def _confirmed(self, call: str, word: str, how: str, *, there: bool) -> bool:
        """Make a call that wants to be confirmed; whether it was meant to change anything."""
        option = {"yes": f", confirm={word!r}", "no": ", confirm='no'", "dry": ", dry_run=True"}[
            how
        ]
        error = await self.call(f"{call}{option})")
        if how == "yes":
            return True
        if there:
            wanted: set[str | None] = {"ConfirmationNeeded"} if how == "no" else {None}
            expect("cli.md: what destroys asks for its word first, and a dry run changes nothing",
                   wanted, error)  # fmt: skip
        elif error is None:
            raise Contradiction("errors.md: what is not there is told", "an error", "it succeeded")
        return False

    async def do_delete_topic(self, topic: str, how: str) -> None:
        """A topic is deleted."""
        there = topic in self.model.topics
        call = f"await bus.topics.delete({topic!r}"
        if not self._busy(topic) and await self._confirmed(call, "DELETE", how, there=there):
            self.model.topic_deleted(topic, self.error)

    async def do_configure(self, topic: str, retention_age_s: float) -> None:
        """The retention of a topic is set, and told again."""
        error = await self.call(
            f"await bus.topics.configure({topic!r}, retention_age_s={retention_age_s})"
        )
        if topic in self.model.topics or not self._busy(topic):
            expect(
                "topics.configure",
                {None} if topic in self.model.topics else {"UnknownTopic"},
                error,
            )
        if error is None:
            info = await self.names["bus"].topics.info(topic)
            if info.retention_age_s != retention_age_s:
                raise Contradiction("conformance.md: a topic's settings can be changed and stay with it",
                                    retention_age_s, info.retention_age_s)  # fmt: skip

    async def do_reset(self, group: str, to: str | int, topic: str | None, how: str) -> None:
        """A group is sent to a place."""
        call = f"await bus.groups.reset({group!r}, {_place(to)}" + (
            f", topic={topic!r}" if topic else ""
        )
        there = self.model.reset_answers(group, to, topic) == {None}
        if await self._confirmed(call, "RESET", how, there=there):
            self.model.group_reset(group, to, topic, self.error, self.began, self.ended)

    async def do_delete_group(self, group: str, how: str) -> None:
        """A group is deleted, and what is left of its members is closed."""
        there = group in self.model.groups or group in self.model.logs
        call = f"await bus.groups.delete({group!r}"
        if not await self._confirmed(call, "DELETE", how, there=there):
            return
        self.model.group_deleted(group, self.error)
        for seat in [seat for seat in self.seats if seat.group == group]:
            await self.call(f"await {seat.variable}.close()")
            self.seats.remove(seat)

    def _letter(self, pick: int) -> tuple[Group, Letter] | None:
        letters = [
            (group, letter)
            for group in self.model.groups.values()
            for letter in group.letters.values()
            if letter.certain and letter.status == "dead" and not group.name.startswith("_")
        ]
        return letters[pick % len(letters)] if letters else None

    async def do_replay_letter(self, pick: int, wrong: bool) -> None:
        """A dead letter goes back to its group, or to another one, which is refused."""
        found = self._letter(pick)
        if found is None:
            return
        group, letter = found
        target = "another" if wrong else group.name
        outcome = self._new("o")
        await self.call(
            f"{outcome} = await bus.dead_letters.replay([{letter.id!r}], target_consumer={target!r}, "
            f"target_topic={letter.event.topic!r}, actor='ann', reason='again', confirm='REPLAY')"
        )
        got = self.names[outcome]
        codes = [failure["code"] for failure in got.failures]
        if (got.done, codes) != ((0, ["refused.target-mismatch"]) if wrong else (1, [])):
            raise Contradiction("dead-letters.md: replay gives a letter back to its own group",
                                "a mismatch" if wrong else "done", (got.done, codes))  # fmt: skip
        if not wrong:
            group.revive(letter, self.began, self.ended)

    async def do_purge(self, pick: int) -> None:
        """A dead letter leaves the list."""
        found = self._letter(pick)
        if found is None:
            return
        group, letter = found
        detail = self._new("d")
        await self.call(f"{detail} = await bus.dead_letters.inspect({letter.id!r})")
        got = self.names[detail]
        if (got.payload, got.key) != (letter.event.payload, letter.event.key):
            raise Contradiction("dead-letters.md: a dead letter keeps what it was",
                                (letter.event.payload, letter.event.key), (got.payload, got.key))  # fmt: skip
        error = await self.call(
            f"await bus.dead_letters.purge([{letter.id!r}], actor='ann', reason='done', confirm='PURGE')"
        )
        expect("dead-letters.md: purge", {None}, error)
        del group.letters[letter.event.place]

    async def do_dead_letter(self, pick: int) -> None:
        """An event that waits is made a dead letter by hand."""
        now = self.harness.now()
        waiting = [
            (group, owed)
            for group in self.model.groups.values()
            for owed in group.owed.values()
            if owed.state == "waiting" and not owed.event.expiring(now + 1.0)
            and not group.name.startswith("_")
            and owed.event.place not in group.letters
        ]  # fmt: skip
        if not waiting:
            return
        group, owed = waiting[pick % len(waiting)]
        topic, partition, offset = owed.event.place
        error = await self.call(
            f"await bus.dead_letters.dead_letter('{topic}/{partition}/{offset}', "
            f"consumer={group.name!r}, topic={topic!r}, reason='by hand', actor='ann')"
        )
        expect(
            "conformance.md: an event that waits can be made a dead letter by hand", {None}, error
        )
        group.withdraw(owed.event.place, "by hand", self.ended)

    async def do_route(
        self, how: str, pattern: str, destination: str, priority: int, topic: str
    ) -> None:
        """The catalogue is changed, and asked where a topic goes."""
        routes, place = self.model.routes, (pattern, destination)
        if how == "put":
            error = await self.call(
                f"await bus.routes.put(penstock.Route({pattern!r}, {destination!r}, priority={priority}))"
            )
            expect("routing.md: put", {None}, error)
            routes[place] = penstock.Route(pattern, destination, priority=priority)
        else:
            confirmed = ", confirm='REMOVE'" if how == "remove" else ""
            error = await self.call(
                f"await bus.routes.{how}({pattern!r}, {destination!r}{confirmed})"
            )
            expect(f"routing.md: {how}", {None} if place in routes else {"UnknownRoute"}, error)
            before = routes.pop(place, None)
            if before is not None and how != "remove":
                routes[place] = penstock.Route(pattern, destination, priority=before.priority,
                                               enabled=how == "enable")  # fmt: skip
        self.model.resolved(topic, await self.names["bus"].routes.resolve(topic))

    async def do_schedule(self, id: str, topic: str, number: int, every_s: float) -> None:
        """A recurring event is declared."""
        value = f"every {number}".encode()
        error = await self.call(
            f"await bus.schedules.put({id!r}, {topic!r}, {value!r}, every={every_s}, codec='raw')"
        )
        expect("scheduling.md: put", {None}, error)
        before = self.model.recurring.get(id)
        made = Recurring(id, topic, value, every_s, Window(self.began, self.ended))
        if before is not None and before.every_s == every_s:
            made.since, made.seen, made.fired = before.since, before.seen, before.fired
        self.model.recurring[id] = made
        self._retire(before)

    def _retire(self, before: Recurring | None) -> None:
        if before is not None and self.harness.outlived:
            self.model.retired[before.topic, before.payload] = before.id

    async def do_unschedule(self, id: str) -> None:
        """A recurring event is removed."""
        error = await self.call(f"await bus.schedules.remove({id!r}, confirm='REMOVE')")
        there = self.model.recurring.pop(id, None)
        expect("scheduling.md: remove", {None} if there else {"UnknownSchedule"}, error)
        self._retire(there)

    async def do_replay(
        self,
        pattern: str,
        start: int | None,
        stop: int | None,
        partition: int | None,
        since_s: int | None,
        batches: bool,
    ) -> None:
        """What is stored is read again, by events or by batches."""
        names = [name for name in self.model.topics if selects(pattern, name)]
        asked = {"from_offset": start, "to_offset": stop, "partition": partition,
                 "since": None if since_s is None else f"{since_s}s"}  # fmt: skip
        text = {name: repr(value) for name, value in asked.items() if value is not None}
        events = self._new("x")
        firsts = [f for name in names for f in self.model.topics[name].firsts.values()]
        read = (
            f"[e async for b in bus.replay_batches({pattern!r}, {_options(text)}) for e in b]"
            if batches
            else f"[e async for e in bus.replay({pattern!r}, {_options(text)})]"
        )
        error = await self.call(f"{events} = {read}")
        literal = not {"*", "#"} & {*pattern.split(".")}
        permitted: set[str | None] = {None}
        if start is not None and since_s is not None:
            permitted = {"InvalidInput"}
        elif literal and not names:
            permitted = {"UnknownTopic"}
        elif start is not None and any(first > start for first in firsts):
            permitted = {None, "OffsetExpired"}
        expect("replay.md: replay", permitted, error)
        if error is None:
            for event in self.names[events]:
                await self._look_for(event)
            since = None
            if since_s is not None:
                since = (
                    self.began - since_s - self.harness.slack_s,
                    self.ended - since_s + self.harness.slack_s,
                )
            self.model.replayed(self.names[events], names, start, stop, partition, since)

    # -- the end -----------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Everything that is owed comes, sooner or later, and then nothing is owed any more."""
        for seat in list(self.seats):
            if not seat.log:
                await self.call(f"await {seat.variable}.close()")
                self.seats.remove(seat)
                self.model.groups[seat.group].leave(seat.name, self.began, self.ended)
                if seat.group.startswith("_"):
                    del self.model.groups[seat.group]
        await self.harness_pause()
        await self._look()
        for name in list(self.model.groups):
            await self.do_join(name, "last", 100, "bus")
            seat = next(seat for seat in self.seats if seat.group == name)
            group = self.model.groups[name]
            for _ in range(2):
                while await self._get(seat):
                    _, hand = self.hands[-1]
                    await self.call(f"await {self.hands[-1][0]}.ack()")
                    group.settled(hand, "ack", None, self.began, self.ended)
                now = self.harness.now()
                waits = [o.due.last for o in group.owed.values() if o.state == "waiting"]
                waits += [o.hand.deadline.last for o in group.owed.values() if o.hand is not None]
                later = max((each for each in waits if each < float("inf")), default=now) - now
                await self.do_wait(round(min(max(later, 0.0) + 0.1, 60.0), 3))
                self.model.pass_time(self.harness.now())
            await self._look()


def _place(place: str | int) -> str:
    return repr(place if isinstance(place, str) else f"offset:{place}")


def _options(options: dict[str, str]) -> str:
    return ", ".join(f"{name}={text}" for name, text in options.items())


def run(harness: Harness, sequence: Sequence) -> Found | None:
    """Run one sequence; what it found, or None."""
    driver = Driver(harness, sequence)
    try:
        harness.run(driver.run)
    except Contradiction as contradiction:
        return Found(harness.name, sequence, driver.step, contradiction, driver.lines)
    return None


Attempt = Callable[[Sequence], Found | None]
"""Runs a sequence against an engine of its own."""


def shortest(found: Found, attempt: Attempt) -> Found:
    """The same contradiction with as few steps as possible."""
    best = found

    def fails(sequence: Sequence) -> bool:
        nonlocal best
        again = attempt(sequence)
        if again is None or again.contradiction.promise != found.contradiction.promise:
            return False
        best = again
        return True

    shrink(found.sequence, fails)
    return best
