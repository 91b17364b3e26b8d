"""The cases that go through a broker: `penstock up` in its own process, clients in theirs."""

from __future__ import annotations

from penstock.bench.case import Case, register
from penstock.bench.cases import (
    broker_consumers,
    broker_direct,
    broker_fair,
    broker_fuzzed,
    broker_matrix,
    broker_paced,
    broker_publish,
    broker_queue,
)

# The goal of `neighbour` is a median of five rounds. Each has so many turns that a few in which the
# machine paused do not decide it.
FAIR_ROUNDS, FAIR_SECONDS, FAIR_BUDGET_S = 5, 10.0, 240.0
# Eighteen cells take a third of a case's time.
MATRIX_ROUNDS = 2
# Connecting a thousand consumers takes longer than measuring them.
CONSUMERS_ROUNDS = 2

BROKER_CASES = (
    Case(
        "broker-publish-batched",
        "through a broker: 1,000 payloads a call, eight calls under way, fsync before ack",
        broker_publish.broker_publish_batched,
        operation="publish_batched",
    ),
    Case(
        "broker-queue",
        "through a broker: publish, hand each event to a handler in another process, ack each",
        broker_queue.broker_queue,
        operation=broker_queue.queue_apart,
        parts=broker_queue.QUEUE_PARTS,
    ),
    Case(
        "broker-latency",
        "through a broker: publish to handler at 1,000 events/s, beside the disk's fdatasync",
        broker_paced.broker_latency,
        parts=broker_paced.PACED_PARTS,
    ),
    Case(
        "broker-direct-ack",
        "through a broker: single events of 64 callers to a registered consumer, ack each",
        broker_direct.broker_direct_ack,
        parts=broker_direct.DIRECT_PARTS,
    ),
    Case(
        "broker-fanout",
        "through a broker: every event to eight subscribers; deliveries counted",
        broker_queue.broker_fanout,
        operation=broker_queue.fanout_apart,
        parts=broker_queue.FANOUT_PARTS,
    ),
    Case(
        "broker-mixed",
        "through a broker: 8 topics with a producer and a handler each, one reader of all",
        broker_queue.broker_mixed,
        parts=broker_queue.MIXED_PARTS,
    ),
    Case(
        "broker-consumers",
        "1,000 connected consumers, an event for each 12 times a second, ack each",
        broker_consumers.broker_consumers,
        parts=broker_consumers.CONSUMERS_PARTS,
        rounds=CONSUMERS_ROUNDS,
    ),
    Case(
        "neighbour",
        "a tenant's publishes alone and beside another at ten times its quota: p99 ratio",
        broker_fair.neighbour,
        parts=broker_paced.PACED_PARTS,
        rounds=FAIR_ROUNDS,
        seconds=FAIR_SECONDS,
        budget_s=FAIR_BUDGET_S,
    ),
    Case(
        "large",
        "publishes of 100 bytes alone and beside a publisher of 16 MiB: p99 ratio",
        broker_fair.large,
        parts=broker_paced.PACED_PARTS,
        rounds=FAIR_ROUNDS,
        seconds=FAIR_SECONDS,
        budget_s=FAIR_BUDGET_S,
    ),
    Case(
        "fuzzed",
        "a client's publishes alone and beside clients that send broken frames: p99 ratio",
        broker_fuzzed.fuzzed_tcp,
        parts=broker_fuzzed.FUZZED_PARTS,
        rounds=FAIR_ROUNDS,
        seconds=FAIR_SECONDS,
        budget_s=FAIR_BUDGET_S,
    ),
    Case(
        "fuzzed-zmq",
        "the same, with broken frames over ZeroMQ: p99 ratio",
        broker_fuzzed.fuzzed_zmq,
        parts=broker_fuzzed.FUZZED_PARTS,
        rounds=FAIR_ROUNDS,
        seconds=FAIR_SECONDS,
        budget_s=FAIR_BUDGET_S,
    ),
    Case(
        "matrix",
        "through a broker: payloads of 100 B, 4 KiB, 256 KiB x none, lz4, zstd x 1, 4 connections",
        broker_matrix.matrix,
        parts=broker_matrix.MATRIX_PARTS,
        rounds=MATRIX_ROUNDS,
    ),
    Case(
        "batch-cost",
        "CPU of the broker for a frame of 1,000 events against a frame of one",
        broker_publish.batch_cost,
    ),
)


def register_all() -> None:
    """Put them behind the cases that were there before."""
    for case in BROKER_CASES:
        register(case)
