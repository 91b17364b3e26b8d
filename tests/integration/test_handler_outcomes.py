"""Whatever an event, a result or a reply does fails that event; the handler goes on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import penstock
from penstock.testing.broker_process import BrokerProcess
from penstock.testing.conformance.harness import dead_letters, eventually, owes

ONCE = penstock.Retry.none()
TWICE = penstock.Retry(ladder_ms=(20,), max_attempts=2)
LATE_S = 20.0


@pytest.fixture(scope="module")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with BrokerProcess(tmp_path_factory.mktemp("outcomes") / "data") as broker:
        yield broker.url()


@pytest_asyncio.fixture(params=["memory", "folder", "broker"])
async def bus(
    request: pytest.FixtureRequest, tmp_path: Path, broker_url: str
) -> AsyncIterator[penstock.Bus]:
    url = {"memory": "mem:", "folder": tmp_path / "data", "broker": broker_url}[request.param]
    async with penstock.connect(url, delivery__drain_s=0.2) as bus:
        yield bus


@pytest.fixture
def topic() -> str:
    return f"t{uuid.uuid4().hex[:12]}.orders"


@pytest.fixture
def group() -> str:
    return f"g{uuid.uuid4().hex[:12]}"


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Vague(penstock.RetryLater):
    def __init__(self) -> None:
        self.delay_s = float("nan")
        self.reason = "some day"


def fail(error: BaseException) -> Callable[[], Any]:
    def raising() -> Any:
        raise error

    return raising


FAULTS: dict[str, Callable[[], Any]] = {
    "half a character in its error": fail(ValueError("\ud800")),
    "half a character in a reason": fail(penstock.Reject("\udfff")),
    "a reason that is no text": fail(penstock.Reject({"why": 1})),  # type: ignore[arg-type]
    "an error without words": fail(Speechless()),
    "a delay that is no number": fail(Vague()),
    "a delay that is no duration": lambda: penstock.RetryLater("soon"),
    "sys.exit": fail(SystemExit(3)),
    "a generator's exit": fail(GeneratorExit()),
    "a stopped iteration": lambda: next(iter([])),
    "a cancellation": fail(asyncio.CancelledError()),
    "an error of its own kind": fail(type("Odd", (BaseException,), {})("odd")),
}


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_what_a_handler_raises_fails_its_event_alone(
    bus: penstock.Bus, topic: str, group: str, fault: str, plain: bool
) -> None:
    handled: list[bytes] = []

    def handle(payload: bytes) -> None:
        if payload == b"bad":
            FAULTS[fault]()
        handled.append(payload)

    async def handle_async(payload: bytes) -> None:
        handle(payload)

    bus.handler(topic, group=group, retry=ONCE)(handle if plain else handle_async)
    await bus.publish_many(topic, [b"bad", b"good"])
    [letter] = await dead_letters(bus, group, 1)
    assert letter.offset == 0
    await owes(bus, group, 0)
    assert handled == [b"good"]


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def fail_in_a_task_group() -> None:
    async def fail_soon() -> None:
        await asyncio.sleep(0)
        raise ValueError("one of several")

    async with asyncio.TaskGroup() as group:
        group.create_task(fail_soon())
        group.create_task(asyncio.sleep(3_600))


async def swallow_a_cancellation_and_fail() -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await cancel_itself()
    raise ValueError("later")


async def time_out() -> None:
    async with asyncio.timeout(0.01):
        await asyncio.sleep(3_600)


@pytest.mark.parametrize(
    "cancel", [cancel_itself, fail_in_a_task_group, swallow_a_cancellation_and_fail, time_out]
)
async def test_a_function_that_has_its_own_task_cancelled_fails_its_event_alone(
    bus: penstock.Bus, topic: str, group: str, cancel: Callable[[], Awaitable[None]]
) -> None:
    """B6: each time is an attempt, and the same task goes on with the next event."""
    handled: list[tuple[bytes, int]] = []

    @bus.handler(topic, group=group, retry=TWICE)
    async def handle(payload: bytes, event: penstock.Event) -> None:
        handled.append((payload, event.attempt))
        if payload == b"bad":
            await cancel()

    await bus.publish_many(topic, [b"bad", b"good"])
    [letter] = await dead_letters(bus, group, 1)
    assert (letter.offset, letter.attempts) == (0, 2)
    await owes(bus, group, 0)
    assert sorted(handled) == [(b"bad", 1), (b"bad", 2), (b"good", 1)]


async def test_a_cancellation_that_outlives_its_function_reaches_no_other_event(
    bus: penstock.Bus, topic: str, group: str
) -> None:
    """B6: it is raised in the next await, or while the handler waits for events."""
    handled: list[tuple[bytes, int]] = []

    @bus.handler(topic, group=group, retry=ONCE)
    async def handle(payload: bytes, event: penstock.Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        if payload == b"now":
            task.cancel()
        elif payload == b"soon":
            asyncio.get_running_loop().call_later(0.05, task.cancel)
        else:
            await asyncio.sleep(0)
        handled.append((payload, event.attempt))

    await bus.publish_many(topic, [b"now", b"good", b"soon"])
    await owes(bus, group, 0)
    await asyncio.sleep(0.2)
    await bus.publish(topic, b"last")
    await owes(bus, group, 0)
    assert handled == [(b"now", 1), (b"good", 1), (b"soon", 1), (b"last", 1)]
    assert await bus.dead_letters.list(consumer=group) == []


async def test_a_plain_function_cannot_interrupt_the_program(
    bus: penstock.Bus, topic: str, group: str
) -> None:
    """B6: Ctrl-C is raised in the main thread, so this is the function's own."""

    @bus.handler(topic, group=group, retry=TWICE)
    def handle(payload: bytes) -> None:
        raise KeyboardInterrupt

    await bus.publish(topic, b"x")
    [letter] = await dead_letters(bus, group, 1)
    assert letter.attempts == 2
    assert "KeyboardInterrupt" in letter.reason


def test_a_loop_that_ends_ends_its_handlers(tmp_path: Path) -> None:
    """A program that forgets to close its bus ends, whatever its handlers make of their cancellation."""
    code = """
        import asyncio, penstock

        async def main():
            bus = await penstock.connect("mem:").open()

            @bus.handler("busy", group="busy")
            async def busy(payload: bytes):
                try:
                    await asyncio.sleep(3_600)
                finally:
                    raise OSError("cleaning up failed")

            @bus.handler("idle", group="idle", concurrency=3)
            async def idle(payload: bytes):
                pass

            await bus.publish("busy", b"x")
            await asyncio.sleep(0.3)

        asyncio.run(main())
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LATE_S, check=False)
    assert done.returncode == 0, done.stderr


async def test_a_result_that_no_codec_takes_fails_its_event_and_the_requester_learns_why(
    bus: penstock.Bus, topic: str, group: str
) -> None:
    calls = []

    @bus.handler(topic, group=group)
    async def handle(number: int) -> Any:
        calls.append(number)
        return object() if number == 1 else number

    with pytest.raises(penstock.RequestRejected, match="json cannot encode"):
        await bus.request(topic, 1, timeout_s=LATE_S)
    assert await bus.request(topic, 2, timeout_s=LATE_S) == 2
    assert calls == [1, 2]  # the next attempt would return the same


@pytest.mark.parametrize("delay", ["50ms", timedelta(milliseconds=50), 0.05])
async def test_retry_later_takes_durations_as_text_and_timedelta(
    bus: penstock.Bus, topic: str, group: str, delay: Any
) -> None:
    times: list[float] = []

    @bus.handler(topic, group=group, retry=penstock.Retry((60_000,), 3))
    async def handle(event: penstock.Event) -> None:
        times.append(time.monotonic())
        if event.attempt == 1:
            raise penstock.RetryLater(delay)

    await bus.publish(topic, b"x")
    await owes(bus, group, 0)
    assert times[1] - times[0] >= 0.045


@pytest.mark.parametrize(
    "address",
    [
        "_dlq.default", "_transactions.default", "mine", "no topic!", "_inbox.mine", "_inbox." + 31 * "a",
        "_inbox." + 32 * "G", "",
    ],
)  # fmt: skip
async def test_a_reply_goes_to_an_inbox_or_nowhere(
    bus: penstock.Bus, topic: str, group: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    handled = []

    @bus.handler(topic, group=group, retry=ONCE)
    async def handle(event: penstock.Event) -> str:
        handled.append(event.offset)
        return "a reply that belongs nowhere"

    headers = {"penstock-reply-to": address, "penstock-correlation": "7"}
    before = {info.name: info for info in await bus.topics.list(system=True)}
    await bus.publish(topic, b"x", headers=headers)
    await bus.publish(topic, b"y")
    await owes(bus, group, 0)
    assert handled == [0, 1]
    after = {info.name: info for info in await bus.topics.list(system=True)}
    del after[topic]
    assert after == before
    assert await bus.dead_letters.list(consumer=group) == []
    assert [record for record in caplog.records if "which is no inbox" in record.message]


async def test_a_reply_to_a_requester_that_has_gone_is_dropped(
    bus: penstock.Bus, topic: str, group: str
) -> None:
    headers = {"penstock-reply-to": f"_inbox.{uuid.uuid4().hex}", "penstock-correlation": "7"}

    @bus.handler(topic, group=group, retry=ONCE)
    async def handle(event: penstock.Event) -> str:
        return "too late"

    await bus.publish(topic, b"x", headers=headers)
    await owes(bus, group, 0)
    assert headers["penstock-reply-to"] not in [t.name for t in await bus.topics.list(system=True)]
    assert await bus.dead_letters.list(consumer=group) == []


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_the_end_of_a_subscription_is_said_once_and_raised_plain(
    bus: penstock.Bus, topic: str, group: str, concurrency: int, caplog: pytest.LogCaptureFixture
) -> None:
    @bus.handler(topic, group=group, concurrency=concurrency)
    async def handle(event: penstock.Event) -> None: ...

    serving = asyncio.create_task(bus.run())
    await bus.ready()
    await bus.publish(topic, b"x")
    await owes(bus, group, 0)
    await bus.groups.delete(group, confirm="DELETE")
    with pytest.raises(penstock.UnknownGroup):
        await asyncio.wait_for(serving, LATE_S)
    assert len([r for r in caplog.records if "gets no more events" in r.message]) == 1


async def test_ready_raises_the_end_of_a_subscription(
    bus: penstock.Bus, topic: str, group: str
) -> None:
    bus.handler(topic, group=group)(_ignore)
    await bus.ready()
    await bus.groups.delete(group, confirm="DELETE")

    async def raised() -> bool:
        try:
            await bus.ready()
        except penstock.UnknownGroup:
            return True
        return False

    await eventually(raised, "the end of the subscription")


async def _ignore(event: penstock.Event) -> None: ...


# -- requests ------------------------------------------------------------------------------------


async def test_a_rejection_reaches_the_requester_at_once(
    bus: penstock.Bus, topic: str, group: str
) -> None:
    @bus.handler(topic, group=group)
    async def handle(number: int) -> int:
        raise penstock.Reject("no such account")

    began = time.monotonic()
    with pytest.raises(penstock.RequestRejected) as caught:
        await bus.request(topic, 7, timeout_s=60)
    assert time.monotonic() - began < LATE_S
    assert (caught.value.code, caught.value.reason) == ("refused.request", "no such account")
    assert (caught.value.topic, caught.value.consumer, caught.value.attempts) == (topic, group, 1)


async def test_the_last_failure_reaches_the_requester_and_earlier_ones_do_not(
    bus: penstock.Bus, topic: str, group: str
) -> None:
    @bus.handler(topic, group=group, retry=TWICE)
    async def handle(number: int, event: penstock.Event) -> int:
        if number == 1 or event.attempt == 1:
            raise OSError(f"down at attempt {event.attempt}")
        return number

    with pytest.raises(penstock.RequestRejected, match="down at attempt 2"):
        await bus.request(topic, 1, timeout_s=60)
    assert await bus.request(topic, 2, timeout_s=60) == 2


async def test_a_consumer_of_dead_letters_answers_no_request(
    bus: penstock.Bus, topic: str, group: str
) -> None:
    seen = asyncio.Event()

    @bus.handler("_dlq.*", group=f"{group}-dead", start="latest")
    async def look(event: penstock.Event) -> str:
        if event.headers["penstock-topic"] == topic:
            assert "penstock-reply-to" not in event.headers
            seen.set()
        return "noted"

    @bus.handler(topic, group=group)
    async def handle(number: int) -> None:
        raise penstock.Reject("no")

    await bus.ready()
    with pytest.raises(penstock.RequestRejected, match="no"):
        await bus.request(topic, 7, timeout_s=60)
    await asyncio.wait_for(seen.wait(), LATE_S)


async def test_an_inbox_that_was_closed_is_opened_again(
    bus: penstock.Bus, topic: str, group: str
) -> None:
    release = asyncio.Event()

    @bus.handler(topic, group=group, concurrency=2)
    async def handle(number: int) -> int:
        if number == 2:
            await release.wait()
        return number

    assert await bus.request(topic, 1, timeout_s=LATE_S) == 1
    waiting = asyncio.create_task(bus.request(topic, 2, timeout_s=60))
    for info in await bus.groups.list():
        if info.name.startswith("_listener."):
            await bus.groups.delete(info.name, confirm="DELETE")
    assert await bus.request(topic, 3, timeout_s=LATE_S) == 3
    release.set()
    assert await asyncio.wait_for(waiting, LATE_S) == 2


async def test_a_request_keeps_its_deadline_without_a_broker(tmp_path: Path) -> None:
    broker = await asyncio.to_thread(BrokerProcess(tmp_path / "data").start)
    async with penstock.connect(broker.url(), client__deadline_s=60.0) as bus:
        bus.handler("known", group="g")(_same)
        assert await bus.request("known", 1, timeout_s=LATE_S) == 1
        await asyncio.to_thread(broker.kill)
        began = time.monotonic()
        with pytest.raises(penstock.RequestTimedOut, match="did not even confirm"):
            await bus.request("known", 2, timeout_s=0.5)
        assert time.monotonic() - began < 10
        await asyncio.to_thread(broker.start)
        assert await bus.request("known", 3, timeout_s=60) == 3
        await asyncio.to_thread(broker.stop)
        async with asyncio.timeout(LATE_S):
            with pytest.raises(penstock.RequestTimedOut):
                await bus.request("known", 4, timeout_s=0.2)
        await asyncio.to_thread(broker.start)
    await asyncio.to_thread(broker.stop)


async def _same(number: int) -> int:
    return number


# -- what can be a handler -------------------------------------------------------------------------


class Shop:
    def __init__(self) -> None:
        self.sold: list[Any] = []

    async def sell(self, order: dict[str, int], event: penstock.Event) -> int:
        return order["id"]

    def sell_plainly(self, order: dict[str, int]) -> int:
        return order["id"]

    async def __call__(self, order: dict[str, int]) -> int:
        return order["id"]


async def sell_at(price: int, order: dict[str, int], *, discount: int = 0) -> int:
    return order["id"] if (price, discount) == (5, 1) else -1


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **options)  # what the function returns is to be waited for

    return call


@traced
async def sell_traced(order: dict[str, int]) -> int:
    return order["id"]


async def sell_with_more(order: dict[str, int], event: Any = None, retries: int = 3) -> int:
    return order["id"] if event is not None and retries == 3 else -1


CALLABLES: dict[str, Callable[..., Any]] = {
    "a method": Shop().sell,
    "a plain method": Shop().sell_plainly,
    "an object": Shop(),
    "a partial": functools.partial(sell_at, 5, discount=1),
    "a plain wrapper": sell_traced,
    "a lambda": lambda order: order["id"],
    "defaults": sell_with_more,
}


@pytest.mark.parametrize("kind", CALLABLES)
async def test_whatever_can_be_called_with_an_event_can_be_a_handler(
    mem: penstock.Bus, kind: str
) -> None:
    mem.handler("orders", group="g")(CALLABLES[kind])
    assert await mem.request("orders", {"id": 7}, timeout_s=LATE_S) == 7


async def generate(order: dict[str, int]) -> AsyncIterator[int]:
    yield 1


def generate_plainly(order: dict[str, int]) -> Iterator[int]:
    yield 1


async def keyword_only(order: dict[str, int], *, price: int) -> None: ...


async def anything(*args: Any) -> None: ...


async def event_first(event: penstock.Event, order: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    "function", [generate, generate_plainly, keyword_only, anything, event_first, Shop, 5]
)
async def test_what_cannot_be_a_handler_is_refused_at_once(
    mem: penstock.Bus, function: Any
) -> None:
    with pytest.raises(penstock.InvalidInput, match="write a function of"):
        mem.handler("orders", group="g")(function)


async def test_a_handler_may_settle_its_event_itself(
    bus: penstock.Bus, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    done = []

    @bus.handler(topic, group=group)
    async def handle(number: int, event: penstock.Event) -> None:
        done.append(number)
        if number == 0:
            await event.ack()
        else:
            async with bus.transaction() as tx:
                tx.publish(f"{topic}.done", number)
                tx.ack(event)
        raise ValueError("after the event was settled")

    await bus.publish_many(topic, [0, 1])
    await owes(bus, group, 0)
    assert done == [0, 1]
    assert await bus.dead_letters.list(consumer=group) == []


async def test_a_request_expires_at_its_deadline(bus: penstock.Bus, topic: str, group: str) -> None:
    """B11: however long its inbox took; a handler that comes later does no work for nothing."""
    calls: list[Any] = []
    with pytest.raises(penstock.RequestTimedOut):
        await bus.request(topic, "question", timeout_s=0.5)

    @bus.handler(topic, group=group)
    async def handle(question: str) -> str:
        calls.append(question)
        return "answer"

    await dead_letters(bus, group, 1)
    assert calls == []
