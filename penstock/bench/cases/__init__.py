"""The benchmark cases, in the order `penstock bench list` shows them."""

from penstock.bench.case import Case, register
from penstock.bench.cases import broker, deliver, lookup, publish, read, recover

register(
    Case(
        "publish-batched",
        "1,000 payloads a call over 100 topics, fsync before ack, sealing on",
        publish.publish_batched,
        operation="publish_batched",
    )
)
register(
    Case(
        "publish-awaited",
        "100 callers, each waiting for its one event, fsync before ack",
        publish.publish_awaited,
        operation="publish_awaited",
    )
)
register(
    Case(
        "publish-serial",
        "one caller, one event at a time, beside the disk's own fdatasync",
        publish.publish_serial,
        operation="publish_serial",
    )
)
register(
    Case(
        "queue",
        "publish, hand each event to a handler, ack each",
        deliver.queue,
        operation="queue",
    )
)
register(
    Case(
        "fanout",
        "every event to eight groups; deliveries counted",
        deliver.fanout,
        operation="fanout",
    )
)
register(
    Case("mixed", "8 topics with a producer and a handler each, one reader of all", deliver.mixed)
)
register(
    Case(
        "read-batches",
        "replay as batches, part sealed, part journal",
        read.read_batches,
        operation="read_batches",
        prepare=read.fill_plain,
    )
)
register(
    Case(
        "read-events",
        "replay as events; key, payload and headers of each touched",
        read.read_events,
        prepare=read.fill_keyed,
    )
)
register(Case("route", "random look-ups among 1 M patterns, 30 % with wildcards", lookup.look_up))
register(
    Case(
        "recover",
        "cold start with 1 M unacked leases to the first delivery",
        recover.recover,
        "bytes",
    )
)
broker.register_all()
