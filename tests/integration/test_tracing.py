"""Tracing: one publish, wherever it goes, is one trace; and nothing at all while it is off."""

from __future__ import annotations

import asyncio
import gzip
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import penstock
from penstock.bus import tracing
from penstock.engines.engine import Transaction
from penstock.model.batch import EventBatch
from penstock.model.draft import Draft
from penstock.model.settings import Limits
from penstock.testing.broker_process import BrokerProcess

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


class Spans:
    """What was recorded, by name."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def one(self, name: str) -> ReadableSpan:
        (span,) = (span for span in self.all() if span.name == name)
        return span


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """Tracing is on, and spans stay in memory."""
    recorded = Spans()
    monkeypatch.setattr(tracing, "tracer", recorded.provider.get_tracer("penstock"))
    return recorded


def ids(span: Any) -> tuple[int, int]:
    """Trace and span."""
    return span.context.trace_id, span.context.span_id


def parent(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def carried_by(headers: Any) -> tuple[int, int]:
    """The trace and span that headers name."""
    _, trace_id, span_id, _ = headers["traceparent"].split("-")
    return int(trace_id, 16), int(span_id, 16)


def is_sampled(headers: Any) -> bool:
    return bool(int(headers["traceparent"][-2:], 16) & 1)


def arrived(batch: EventBatch) -> Draft:
    """A batch as a broker receives it."""
    draft = Draft(batch.topic, (), tenant=batch.tenant, codec=batch.codec)
    draft.batch, draft.count = batch, batch.count
    return draft


async def publish(bus: penstock.Bus, topic: str, value: Any, **options: Any) -> Any:
    return await tracing.publish(bus.engine, bus.draft(topic, value, **options), Limits())


# -- one trace -------------------------------------------------------------------------------------


async def test_a_publish_and_its_handling_are_one_trace(mem: penstock.Bus, spans: Spans) -> None:
    """Row X11: publish, broker's receive and deliver, handler, and what the handler does in turn."""
    with tracing.tracer.start_as_current_span("request"):  # type: ignore[union-attr]
        await publish(mem, "orders.created", b"x", headers={"tenant": "acme"})
    async with mem.subscribe("orders.*", group="billing") as events:
        event = await anext(events)
    with tracing.receiving([arrived(event.batch)]):
        pass
    tracing.delivering(event.batch, "billing", event.attempt)
    with tracing.handling(event, group="billing", function="shop.bill"):
        await publish(mem, "invoices.sent", b"y")

    root, sent = spans.one("request"), spans.one("publish orders.created")
    received, delivered = spans.one("receive orders.created"), spans.one("deliver orders.created")
    handled, next_sent = spans.one("handle orders.created"), spans.one("publish invoices.sent")
    assert len({span.context.trace_id for span in spans.all()}) == 1  # type: ignore[union-attr]
    assert parent(root) is None
    assert parent(sent) == ids(root)
    assert parent(received) == parent(delivered) == parent(handled) == ids(sent)
    assert parent(next_sent) == ids(handled)
    assert [span.kind for span in (sent, received, delivered, handled)] == [
        SpanKind.PRODUCER,
        SpanKind.CONSUMER,
        SpanKind.PRODUCER,
        SpanKind.CONSUMER,
    ]
    assert event.headers["tenant"] == "acme"
    common = {
        "messaging.system": "penstock",
        "messaging.destination.name": "orders.created",
        "messaging.batch.message_count": 1,
    }
    place = {"messaging.destination.partition.id": "0", "penstock.tenant": "default"}
    assert dict(sent.attributes or {}) == common | {
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
    }
    assert dict(delivered.attributes or {}) == common | place | {
        "messaging.operation.name": "deliver",
        "messaging.operation.type": "send",
        "messaging.consumer.group.name": "billing",
        "penstock.attempt": 1,
    }
    assert dict(handled.attributes or {}) == common | place | {
        "messaging.operation.name": "handle",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": "billing",
        "messaging.message.id": "orders.created/0/0",
        "code.function.name": "shop.bill",
        "penstock.attempt": 1,
    }
    assert delivered.start_time == event.append_time_us * 1_000
    assert (delivered.end_time or 0) >= delivered.start_time


async def test_the_bus_and_its_handlers_trace(mem: penstock.Bus, spans: Spans) -> None:
    """Row X11 through the public API: async and sync handlers, batches, transactions, failures."""
    seen = asyncio.Event()
    left = 6

    def done() -> None:
        nonlocal left
        left -= 1
        if not left:
            seen.set()

    @mem.handler("orders", group="billing")
    async def bill(event: penstock.Event) -> None:
        await asyncio.sleep(0)  # the context outlives a wait
        await mem.publish("invoices", event.payload)
        done()

    loop = asyncio.get_running_loop()

    @mem.handler("invoices", group="mail")
    def mail(value: bytes) -> None:
        assert trace.get_current_span().get_span_context().is_valid  # in its thread, too
        loop.call_soon_threadsafe(done)

    await mem.ready()
    await mem.publish("orders", b"one")
    async with mem.transaction() as transaction:
        transaction.publish("orders", b"two")
    await mem.publish_many("orders", [b"three"])
    async with asyncio.timeout(10):
        await seen.wait()
        while len(spans.all()) < 12:
            await asyncio.sleep(0.01)
    by_id = {ids(span): span for span in spans.all()}

    def chain(span: ReadableSpan | None) -> list[str]:
        return [] if span is None else [*chain(by_id.get(parent(span) or (0, 0))), span.name]

    mailed = [span for span in spans.all() if span.name == "handle invoices"]
    assert [chain(span) for span in mailed] == [
        ["publish orders", "handle orders", "publish invoices", "handle invoices"]
    ] * 3
    assert len({span.context.trace_id for span in mailed}) == 3  # type: ignore[union-attr]
    (function,) = {(span.attributes or {})["code.function.name"] for span in mailed}
    assert str(function).endswith("mail")


async def test_a_failing_handler_is_an_error(mem: penstock.Bus, spans: Spans) -> None:
    event = EventBatch.build("orders", [b"x"]).event(0)
    with pytest.raises(ZeroDivisionError), tracing.handling(event):
        raise ZeroDivisionError
    with pytest.raises(penstock.InvalidInput), tracing.publishing("orders", 1):
        raise penstock.InvalidInput("no")
    handled, sent = spans.one("handle orders"), spans.one("publish orders")
    assert handled.status.status_code is sent.status.status_code is StatusCode.ERROR
    assert (handled.attributes or {})["error.type"] == "ZeroDivisionError"
    assert (sent.attributes or {})["error.type"] == "invalid"


async def test_a_transaction_is_one_publish(mem: penstock.Bus, spans: Spans) -> None:
    drafts = [mem.draft("orders", b"x"), mem.draft_many("invoices", [b"y", b"z"])]
    receipts = await tracing.transact(mem.engine, Transaction(drafts=drafts), Limits())
    assert [receipt.count for receipt in receipts] == [1, 2]
    span = spans.one("publish (several topics)")
    assert (span.attributes or {})["messaging.batch.message_count"] == 3
    found = [event async for event in mem.replay("#")]
    assert {carried_by(event.headers) for event in found} == {ids(span)}
    assert await tracing.transact(mem.engine, Transaction(), Limits()) == []
    assert len(spans.all()) == 1


async def test_interleaved_handlers_keep_their_traces(mem: penstock.Bus, spans: Spans) -> None:
    events = []
    for _ in range(2):
        with tracing.publishing("orders", 1) as carried:
            events.append(EventBatch.build("orders", [b"x"], headers=[carried]).event(0))

    async def work(event: penstock.Event) -> int:
        for _ in range(5):
            await asyncio.sleep(0)
        return trace.get_current_span().get_span_context().trace_id

    found = await asyncio.gather(*(tracing.handle(each, "work", work(each)) for each in events))
    assert [f"{number:032x}" for number in found] == [
        event.headers["traceparent"][3:35] for event in events
    ]
    assert not trace.get_current_span().get_span_context().is_valid


# -- batches ---------------------------------------------------------------------------------------


def carrying(*parents: str | None) -> EventBatch:
    headers = [None if text is None else {"traceparent": text} for text in parents]
    return EventBatch.build("orders", [b"x"] * len(parents), headers=headers)


def test_a_batch_of_one_publish_is_its_child(spans: Spans) -> None:
    with tracing.handling(carrying(PARENT, None, PARENT)):
        pass
    span = spans.one("handle orders")
    assert parent(span) == (int(TRACE, 16), 0x00F067AA0BA902B7)
    assert not span.links
    assert (span.attributes or {})["messaging.batch.message_count"] == 3


def test_a_batch_of_many_publishes_is_linked_to_them(spans: Spans) -> None:
    """Row X11: a span cannot have two parents, so it has none and names them all, up to a bound."""
    texts = [f"00-{number:032x}-{number:016x}-01" for number in range(1, 101)]
    batch = carrying(*texts[:3], texts[0], None)
    parts = [arrived(batch.slice(at, at + 1)) for at in range(5)]
    with tracing.handling(batch), tracing.receiving(parts):
        pass
    tracing.delivering(batch, "billing", 2)
    for name in ("handle orders", "receive orders", "deliver orders"):
        span = spans.one(name)
        assert parent(span) is None
        assert [link.context.span_id for link in span.links] == [1, 2, 3]
    tracing.delivering(carrying(*texts), "many", 1)
    assert len(spans.all()[-1].links) == tracing.MAX_LINKS


def test_what_has_no_context_begins_a_trace(spans: Spans) -> None:
    """Whatever span happens to be current: a consumer's loop is not where an event comes from."""
    batch = EventBatch.build("orders", [b"x"])
    with tracing.tracer.start_as_current_span("loop"):  # type: ignore[union-attr]
        tracing.delivering(batch, "billing", 1)
        with tracing.handling(batch.event(0)):
            pass
        with tracing.receiving([arrived(batch)]):
            pass
    assert [parent(span) for span in spans.all()] == [None] * 4


# -- headers ---------------------------------------------------------------------------------------

MALFORMED = [
    "",
    "nonsense",
    "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"ff-{TRACE}-00f067aa0ba902b7-01",
    f"00-{TRACE.upper()}-00f067aa0ba902b7-01",
    f"00-{TRACE}-00f067aa0ba902b7",
    f"00-{TRACE}-00f067aa0ba902b7-01-extra",
    f"00-{TRACE}x-00f067aa0ba902b7-01",
    "00-" + "é" * 32 + "-00f067aa0ba902b7-01",
    "\0" * 55,
    PARENT * 1_000,
]


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_context_is_ignored(spans: Spans, text: str) -> None:
    """Row X11: what is no traceparent is none: a new trace, no error, no link."""
    batch = carrying(text)
    with tracing.handling(batch.event(0)):
        pass
    with tracing.receiving([arrived(batch)]):
        pass
    tracing.delivering(batch, "billing", 1)
    with tracing.publishing("orders", 1, {"traceparent": text, "tracestate": "a=1,,=,\n"}):
        pass
    assert len(spans.all()) == 4
    assert [parent(span) for span in spans.all()] == [None] * 4
    assert not any(span.links for span in spans.all())
    assert len({ids(span)[0] for span in spans.all()}) == 4


def test_one_good_parent_among_malformed_ones(spans: Spans) -> None:
    tracing.delivering(carrying(*MALFORMED, PARENT), "billing", 1)
    assert parent(spans.one("deliver orders")) == (int(TRACE, 16), 0x00F067AA0BA902B7)


async def test_tracestate_travels(mem: penstock.Bus, spans: Spans) -> None:
    headers = {"traceparent": PARENT, "tracestate": "vendor=abc"}
    await publish(mem, "orders", b"x", headers=headers)
    (event,) = [event async for event in mem.replay("orders")]
    span = spans.one("publish orders")
    assert parent(span) == (int(TRACE, 16), 0x00F067AA0BA902B7), "it came with the headers"
    assert event.headers["tracestate"] == "vendor=abc"
    assert carried_by(event.headers) == ids(span)
    assert is_sampled(event.headers)


async def test_a_forwarded_event_gets_its_new_context(mem: penstock.Bus, spans: Spans) -> None:
    """Handing `event.headers` on must not tie the next handler to the journey before."""
    old = {"traceparent": PARENT, "tracestate": "vendor=abc", "order": "7"}
    with tracing.tracer.start_as_current_span("now"):  # type: ignore[union-attr]
        await publish(mem, "orders", b"x", headers=old)
    (event,) = [event async for event in mem.replay("orders")]
    sent = spans.one("publish orders")
    assert parent(sent) == ids(spans.one("now"))
    assert set(event.headers) == {"order", "traceparent"}
    assert carried_by(event.headers) == ids(sent)


def stamped(headers: list[dict[str, str] | None] | None, count: int = 1, **limits: int) -> Draft:
    draft = Draft("orders", [b"x"] * count, tenant="default", codec="raw")
    draft.headers = headers
    tracing.stamp(draft, {"traceparent": PARENT}, Limits(**limits))
    return draft


def test_context_never_breaks_a_limit() -> None:
    """A publish that would pass without tracing passes with it."""
    full = {str(number): "x" for number in range(64)}
    assert stamped([full]).headers == [full]
    large = {"a": "é" * 100}
    assert stamped([large], max_headers_bytes=210).headers == [large]
    assert stamped([{"a": "b"}, None], 2).headers == [
        {"a": "b", "traceparent": PARENT},
        {"traceparent": PARENT},
    ]
    assert stamped(None, tracing.MAX_STAMPED_EVENTS + 1).headers is None
    columns = Draft("orders", (), tenant="default", codec="raw")
    columns.batch = EventBatch.build("orders", [b"x"])
    tracing.stamp(columns, {"traceparent": PARENT}, Limits())
    assert columns.headers is None


# -- off -------------------------------------------------------------------------------------------

OFF = """
import asyncio, sys, penstock
from penstock.bus import tracing

async def main():
    async with penstock.connect("mem:") as bus:
        done = asyncio.Event()

        @bus.handler("orders", group="billing")
        async def bill(event: penstock.Event) -> None:
            assert "traceparent" not in event.headers
            with tracing.handling(event), tracing.publishing("x", 1) as carried:
                assert carried == {}
            done.set()

        await bus.ready()
        assert not tracing.detect()
        await bus.publish("orders", b"x")
        await done.wait()

asyncio.run(main())
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


def test_off_costs_nothing(tmp_path: Path) -> None:
    """Row X11: without a provider nothing is imported, recorded or added to an event."""
    subprocess.run([sys.executable, "-W", "error", "-c", OFF], check=True, cwd=tmp_path)


def test_a_provider_of_the_application_is_found(
    spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "tracer", None)
    assert not tracing.detect()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: trace.NoOpTracerProvider())
    assert not tracing.detect()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: spans.provider)
    assert tracing.detect()
    with tracing.publishing("orders", 1) as carried:
        assert set(carried) == {"traceparent"}
    assert spans.one("publish orders")


# -- export ----------------------------------------------------------------------------------------


class Collector:
    """A tiny OTLP receiver: keeps every span that is posted to it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """Service name and span."""
        self.paths: set[str] = set()
        collector = self

        class Post(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.paths.add(self.path)
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Tests are quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Post)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def take(self, request: Any) -> None:
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    receiver = Collector()
    yield receiver
    tracing.shutdown()
    receiver.close()


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
async def test_spans_reach_a_collector(mem: penstock.Bus, collector: Collector, path: str) -> None:
    """Row X11, OTLP export: real HTTP, real protobuf, one trace in the right order."""
    tracing.configure(collector.endpoint + path, "shop", sample_ratio=1.0)
    await publish(mem, "orders", b"x")
    async with mem.subscribe("orders", group="billing") as events:
        event = await anext(events)
        with tracing.receiving([arrived(event.batch)]):
            pass
        tracing.delivering(event.batch, "billing", event.attempt)
        with tracing.handling(event):
            await event.ack()
    await asyncio.to_thread(tracing.shutdown)
    assert tracing.tracer is None
    assert collector.paths == {"/v1/traces"}
    assert {service for service, _ in collector.spans} == {"shop"}
    found = {span.name: span for _, span in collector.spans}
    assert list(found) == ["publish orders", "receive orders", "deliver orders", "handle orders"]
    sent = found.pop("publish orders")
    assert sent.parent_span_id == b""
    for span in found.values():
        assert span.trace_id == sent.trace_id
        assert span.parent_span_id == sent.span_id
    attributes = {each.key: each.value for each in sent.attributes}
    assert attributes["messaging.system"].string_value == "penstock"
    assert attributes["messaging.batch.message_count"].int_value == 1
    sent_ids = int.from_bytes(sent.trace_id), int.from_bytes(sent.span_id)
    assert carried_by(event.headers) == sent_ids


async def test_sampling_is_decided_once(mem: penstock.Bus, collector: Collector) -> None:
    """A trace that is not kept is kept nowhere; one that began elsewhere stays as it was there."""
    tracing.configure(collector.endpoint, "shop", sample_ratio=0.0)
    await publish(mem, "orders", b"x")
    await publish(mem, "orders", b"y", headers={"traceparent": PARENT})
    dropped, kept = [event async for event in mem.replay("orders")]
    assert not is_sampled(dropped.headers)
    assert is_sampled(kept.headers)
    for event in (dropped, kept):
        with tracing.handling(event):
            pass
    await asyncio.to_thread(tracing.shutdown)
    assert {span.trace_id.hex() for _, span in collector.spans} == {TRACE}
    assert len(collector.spans) == 2


async def test_a_collector_that_is_gone_harms_nobody(
    mem: penstock.Bus, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.close()
    tracing.configure(collector.endpoint, "shop")
    began = time.monotonic()
    for _ in range(100):
        await publish(mem, "orders", b"x")
    assert time.monotonic() - began < 2
    with caplog.at_level(logging.CRITICAL, "opentelemetry"):
        await asyncio.to_thread(tracing.shutdown)
    assert time.monotonic() - began < 4 * tracing.EXPORT_TIMEOUT_S


@pytest.mark.parametrize(
    ("endpoint", "ratio"), [("collector:4318", 1.0), ("", 1.0), ("http://c", 1.1), ("http://c", -1)]
)
def test_settings_that_cannot_work(endpoint: str, ratio: float) -> None:
    with pytest.raises(penstock.InvalidSettings):
        tracing.configure(endpoint, "shop", ratio)
    assert tracing.tracer is None


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(penstock.MissingExtra, match=r"pip install 'penstock\[tracing\]'"):
        tracing.configure("http://127.0.0.1:4318", "shop")


# -- through a broker ------------------------------------------------------------------------------


async def test_one_trace_through_a_broker(tmp_path: Path, collector: Collector) -> None:
    """Row X11: the broker's spans come from its own process, and are of the producer's trace."""
    flags = {"telemetry__otlp_endpoint": collector.endpoint}
    with BrokerProcess(tmp_path / "data").start(**flags) as broker:
        tracing.configure(collector.endpoint, "shop")
        handled = asyncio.Event()
        async with penstock.connect(broker.url()) as bus:

            @bus.handler("orders.*", group="billing", start="earliest")
            async def bill(event: penstock.Event) -> None:
                handled.set()

            await bus.publish("orders.created", {"id": 7})
            async with asyncio.timeout(30):
                await handled.wait()
        await asyncio.to_thread(tracing.shutdown)
        assert broker.stop() == 0, "it sends what is left before it ends"
    found = {(service, span.name): span for service, span in collector.spans}
    assert set(found) == {
        ("shop", "publish orders.created"),
        ("penstock", "receive orders.created"),
        ("penstock", "deliver orders.created"),
        ("shop", "handle orders.created"),
    }
    sent = found.pop(("shop", "publish orders.created"))
    for span in found.values():
        assert (span.trace_id, span.parent_span_id) == (sent.trace_id, sent.span_id)


async def test_transactions_and_log_groups_through_a_broker(
    tmp_path: Path, collector: Collector
) -> None:
    """Row X11: the broker's spans of a transaction, and of what the member of a log group fetches."""
    flags = {"telemetry__otlp_endpoint": collector.endpoint}
    with BrokerProcess(tmp_path / "data").start(**flags) as broker:
        tracing.configure(collector.endpoint, "shop")
        async with penstock.connect(broker.url()) as bus:
            async with bus.transaction() as transaction:
                transaction.publish("orders.created", {"id": 7})
            reading = bus.subscribe("orders.*", group="copy", mode="log", start="earliest")
            async with reading as events, asyncio.timeout(30):
                assert (await anext(events)).offset == 0
                async with bus.transaction() as transaction:
                    transaction.commit(events)  # nothing is published: there is nothing to receive
        await asyncio.to_thread(tracing.shutdown)
        assert broker.stop() == 0
    found = {(service, span.name): span for service, span in collector.spans}
    assert len(found) == len(collector.spans)
    assert set(found) == {
        ("shop", "publish orders.created"),
        ("penstock", "receive orders.created"),
        ("penstock", "deliver orders.created"),
    }
    sent = found.pop(("shop", "publish orders.created"))
    for span in found.values():
        assert (span.trace_id, span.parent_span_id) == (sent.trace_id, sent.span_id)
    delivered = found["penstock", "deliver orders.created"].attributes
    attributes = {each.key: each.value for each in delivered}
    assert attributes["messaging.consumer.group.name"].string_value == "copy"
