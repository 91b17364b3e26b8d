"""Tracing: OpenTelemetry spans for publish, receive, deliver and handle.

    publish   at the producer; its context travels in the headers of the events
    receive   at the broker, until they are durable
    deliver   at the broker, from the append of the events until they are sent
    handle    at the consumer, around the handler

The last three are children of the publish they belong to, or, when a batch has several parents,
linked to each of them. Headers are W3C `traceparent` and `tracestate`; one that is malformed is
ignored.

Tracing is off until `detect` finds a tracer provider or `configure` makes one. While it is off
`tracer` is None, and looking at that is all it costs: no import, no context, no header.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.engines.engine import Engine, Transaction
from penstock.model.batch import EventBatch
from penstock.model.column import Headers
from penstock.model.draft import Draft
from penstock.model.errors import InvalidSettings, MissingExtra
from penstock.model.event import Event, Receipt
from penstock.model.settings import Limits

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Tracer

T = TypeVar("T")

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
GROUP = "messaging.consumer.group.name"
ATTEMPT = "penstock.attempt"

MAX_LINKS = 32
"""Parents that one span is linked to. Backends cut at 128; more than a few dozen help no reader."""

MAX_STAMPED_EVENTS = 1_000
"""Events of one publish that carry its context: 70 bytes each. A bulk load is one span, not a
million longer events."""

EXPORT_TIMEOUT_S = 5.0
"""How long one export may take, and how long `shutdown` waits at most for each."""

tracer: Tracer | None = None
"""Makes the spans; None while tracing is off. Callers look at this and do nothing else then."""

_provider: Any = None


# -- on and off ------------------------------------------------------------------------------------


def detect() -> bool:
    """Turn tracing on if the application has set a tracer provider; a bus does this when it opens.

    Nothing is imported for it: an application without OpenTelemetry has no provider.
    """
    global tracer
    trace = sys.modules.get("opentelemetry.trace")
    if tracer is None and trace is not None:
        provider = trace.get_tracer_provider()
        if not isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            tracer = provider.get_tracer("penstock")
    return tracer is not None


def configure(endpoint: str, service_name: str, sample_ratio: float = 1.0) -> None:
    """Send spans to an OTLP collector over HTTP, `http://host:4318`; for daemons.

    `sample_ratio` is the share of new traces that are kept. A trace that began elsewhere is kept
    or dropped as it was there.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError:
        raise MissingExtra(
            "tracing needs the OpenTelemetry SDK and its OTLP exporter: "
            "pip install 'penstock[tracing]'"
        ) from None
    if not endpoint.startswith(("http://", "https://")) or not 0 <= sample_ratio <= 1:
        raise InvalidSettings(
            f"spans go to an http:// or https:// address, not to {endpoint!r}, in a share of 0 to "
            f"1, not {sample_ratio}; tracing stays as it was",
            endpoint=endpoint,
            sample_ratio=sample_ratio,
        )
    global tracer, _provider
    shutdown()
    path = "" if endpoint.endswith("/v1/traces") else "/v1/traces"
    exporter = OTLPSpanExporter(endpoint.rstrip("/") + path, timeout=EXPORT_TIMEOUT_S)
    _provider = TracerProvider(
        resource=Resource.create({"service.name": service_name}),
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        shutdown_on_exit=False,
    )
    _provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = _provider.get_tracer("penstock")


def shutdown() -> None:
    """Turn tracing off. Sends what is left, so it may take a moment: call it from a thread."""
    global tracer, _provider
    provider, _provider, tracer = _provider, None, None
    if provider is not None:
        provider.shutdown()


# -- spans -----------------------------------------------------------------------------------------


@contextmanager
def publishing(topic: str, count: int, headers: Headers | None = None) -> Iterator[Headers]:
    """A publish; yields the headers that its events carry, none while tracing is off.

    It belongs to the span that is current here. Without one, `headers` (of the first event) may
    say where it comes from: an application that forwards what it received need not be traced.
    """
    if tracer is None:
        yield {}
        return
    from opentelemetry import trace

    parent = None
    if not trace.get_current_span().get_span_context().is_valid:
        parent = _extract(headers or {})
    with _span("publish", topic, count, trace.SpanKind.PRODUCER, parent):
        carried: dict[str, str] = {}
        _propagator().inject(carried)
        yield carried


@contextmanager
def receiving(drafts: Sequence[Draft]) -> Iterator[None]:
    """The broker stores the drafts of one frame; all events of a draft are of one publish."""
    if tracer is None or not drafts:
        yield
        return
    from opentelemetry.trace import SpanKind

    parent, links = _parents(map(_first_headers, drafts))
    with _span("receive", _topic(drafts), _count(drafts), SpanKind.CONSUMER, parent, links):
        yield


def delivering(batch: EventBatch, group: str, attempt: int) -> None:
    """The broker has sent a batch to a consumer: a span from its append until now."""
    if tracer is None:
        return
    from opentelemetry.trace import SpanKind

    parent, links = _parents(_headers_of(batch))
    attributes = _attributes("deliver", batch.topic, batch.count)
    attributes |= {**_place(batch), GROUP: group, ATTEMPT: attempt}
    name, since_ns = f"deliver {batch.topic}", batch.append_time_us * 1_000
    tracer.start_span(
        name, parent, SpanKind.PRODUCER, attributes, links, start_time=since_ns or None
    ).end()


@contextmanager
def handling(what: Event | EventBatch, group: str = "", function: str = "") -> Iterator[None]:
    """A consumer works on an event, or a batch, in the trace that it was published in."""
    if tracer is None:
        yield
        return
    from opentelemetry.trace import SpanKind

    if isinstance(what, EventBatch):
        batch, count = what, what.count
        parent, links = _parents(_headers_of(what))
        attributes: dict[str, str | int] = {}
    else:
        batch, count = what.batch, 1
        parent, links = _extract(what.headers), []
        attributes = {"messaging.message.id": str(what.id), ATTEMPT: what.attempt}
    with _span("handle", batch.topic, count, SpanKind.CONSUMER, parent, links) as span:
        span.set_attributes({**attributes, **_place(batch)})
        if group:
            span.set_attribute(GROUP, group)
        if function:
            span.set_attribute("code.function.name", function)
        yield


# -- for the bus -----------------------------------------------------------------------------------


async def publish(engine: Engine, draft: Draft, limits: Limits) -> Receipt:
    """What the bus does with a draft while tracing is on."""
    with publishing(draft.topic, draft.count, _first_headers(draft)) as carried:
        stamp(draft, carried, limits)
        return await engine.publish(draft)


async def transact(
    engine: Engine, transaction: Transaction, limits: Limits
) -> list[Receipt] | None:
    """What the bus does with a transaction while tracing is on: one publish, whatever is in it."""
    drafts = transaction.drafts
    if not drafts:
        return await engine.transact(transaction)
    with publishing(_topic(drafts), _count(drafts)) as carried:
        for draft in drafts:
            stamp(draft, carried, limits)
        return await engine.transact(transaction)


async def handle(event: Event, function: str, work: Awaitable[T]) -> T:
    """What a handler does with an event while tracing is on; `work` has not begun yet."""
    with handling(event, function=function):
        return await work


def stamp(draft: Draft, carried: Headers, limits: Limits) -> None:
    """Put the context of a publish into the headers of its events, where they have room for it.

    What a forwarded event carried from its last journey is replaced. Columns are left alone: their
    rows are many, and their headers are the caller's.
    """
    if not carried or draft.batch is not None or draft.count > MAX_STAMPED_EVENTS:
        return
    room = limits.max_headers_bytes - sum(len(name) + len(text) for name, text in carried.items())
    stamped: list[Headers | None] = []
    for each in draft.headers or [None] * draft.count:
        if not each:
            stamped.append(carried)
            continue
        own = {name: each[name] for name in each if name not in (TRACEPARENT, TRACESTATE)}
        size = sum(len(name.encode()) + len(text.encode()) for name, text in own.items())
        fits = size <= room and len(own) + len(carried) <= limits.max_headers
        stamped.append({**own, **carried} if fits else each)
    draft.headers = stamped


# -- inside ----------------------------------------------------------------------------------------


@contextmanager
def _span(
    operation: str,
    topic: str,
    count: int,
    kind: SpanKind,
    parent: Context | None,
    links: list[Link] | None = None,
) -> Iterator[Span]:
    assert tracer is not None
    attributes = _attributes(operation, topic, count)
    with tracer.start_as_current_span(
        f"{operation} {topic}", parent, kind, attributes, links
    ) as span:
        try:
            yield span
        except Exception as error:
            span.set_attribute("error.type", getattr(error, "code", type(error).__name__))
            raise


_TYPES = {"publish": "send", "receive": "receive", "deliver": "send", "handle": "process"}


def _attributes(operation: str, topic: str, count: int) -> dict[str, str | int]:
    """The attributes that OpenTelemetry's conventions for messaging ask for."""
    return {
        "messaging.system": "penstock",
        "messaging.operation.name": operation,
        "messaging.operation.type": _TYPES[operation],
        "messaging.destination.name": topic,
        "messaging.batch.message_count": count,
    }


def _place(batch: EventBatch) -> dict[str, str]:
    return {
        "messaging.destination.partition.id": str(batch.partition),
        "penstock.tenant": batch.tenant,
    }


def _topic(drafts: Sequence[Draft]) -> str:
    topics = {draft.topic for draft in drafts}
    return topics.pop() if len(topics) == 1 else "(several topics)"


def _count(drafts: Sequence[Draft]) -> int:
    return sum(draft.count for draft in drafts)


def _first_headers(draft: Draft) -> Headers | None:
    if draft.batch is None:
        return draft.headers[0] if draft.headers else None
    column = draft.batch.header_column
    return None if column is None else column.at(0)


def _headers_of(batch: EventBatch) -> Iterable[Headers]:
    """The headers of a batch, as far as they are looked at."""
    column = batch.header_column
    if column is None:
        return ()
    return column.slice(0, min(batch.count, MAX_STAMPED_EVENTS)).mappings()


def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def _extract(headers: Mapping[str, str]) -> Context:
    """The context that headers carry: empty, not that of here, when they carry none."""
    context: Context = _propagator().extract(headers)
    return context


def _parents(headers: Iterable[Headers | None]) -> tuple[Context, list[Link]]:
    """The one parent of a batch, or none and links when its events come from several publishes."""
    from opentelemetry import trace
    from opentelemetry.context import Context

    contexts: list[Context] = []
    seen: set[str] = set()
    for each in islice(headers, MAX_STAMPED_EVENTS):
        text = each.get(TRACEPARENT) if each else None
        if each and text is not None and text not in seen:
            seen.add(text)
            context = _extract(each)
            if trace.get_current_span(context).get_span_context().is_valid:
                contexts.append(context)
                if len(contexts) == MAX_LINKS:
                    break
    if len(contexts) == 1:
        return contexts[0], []
    spans = [trace.get_current_span(context) for context in contexts]
    return Context(), [trace.Link(span.get_span_context()) for span in spans]
