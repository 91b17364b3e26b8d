"""Everything an operator can tune: frozen groups with defaults, ranges and a sentence for each field.

`Settings()` is a complete, safe configuration. A group checks itself when it is made, so a wrong
value never travels: it raises `InvalidSettings` where it was written. Files, environment and flags
are read by `penstock.model.loader`; docs/reference/settings.md is printed from these classes.

Field names end in their unit: `_bytes`, `_s` (seconds), `_ms` (milliseconds).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.model.server_settings import Auth, Client, FastPath, Server, Telemetry
from penstock.model.setting import (
    DAY_S,
    GIB,
    KIB,
    MAX_MEMORY_BYTES,
    MAX_SPAN_S,
    MIB,
    TIB,
    ByteRate,
    Count,
    DelayMs,
    Group,
    Memory,
    Name,
    Rate,
    Size,
    Span,
    TenantName,
    about,
)


class Durability(Group, frozen=True):
    """When a publish counts as stored; docs/guide/durability.md says what each choice survives."""

    fsync: Annotated[
        Literal["always", "interval", "never"],
        about(
            "`always`: on stable storage before publish returns. `interval`: at most `fsync_interval_ms` later. `never`: when the operating system likes."
        ),
    ] = "always"
    fsync_interval_ms: Annotated[
        int,
        Meta(ge=1, le=60_000),
        about("How much time a power failure may cost with `fsync = interval`."),
    ] = 50
    quick_sync_us: Annotated[
        int,
        Meta(ge=0, le=100_000),
        about(
            "While the disk syncs small commits faster than this, the event loop itself waits for them, which is quickest; 0: never. The loop of a broker never waits for a sync."
        ),
    ] = 1_000


class Journal(Group, frozen=True):
    """The one file every event is appended to first."""

    file_bytes: Annotated[
        int,
        Meta(ge=MIB, le=TIB),
        about("Size at which a new journal file is begun; space is given back in whole files."),
    ] = 256 * MIB
    roll_after_s: Annotated[
        float,
        Meta(gt=0, le=MAX_SPAN_S),
        about(
            "Age at which a new file is begun even if little was written, so that quiet buses get sealed too."
        ),
    ] = 600.0
    commit_max_bytes: Annotated[
        Memory, about("Most bytes in one group commit: bounds how long one fsync can take.")
    ] = 8 * MIB
    tenant_quantum_bytes: Annotated[
        Memory,
        about(
            "Most bytes of one tenant in a commit while others wait; at most `commit_max_bytes`."
        ),
    ] = MIB
    pending_max_bytes: Annotated[
        Memory, about("Most bytes waiting for a commit; beyond it publishing waits.")
    ] = 64 * MIB
    side_file_bytes: Annotated[
        Memory,
        about(
            "Payloads of at least this size go to a file of their own and do not sit in everyone's commit."
        ),
    ] = MIB
    reserve_bytes: Annotated[
        int,
        Meta(ge=0, le=GIB),
        about(
            "Room in the last journal file kept back for leases and acks when the disk is full, a quarter of it for operators and new clients; at most a quarter of `file_bytes`."
        ),
    ] = 4 * MIB


class Sealing(Group, frozen=True):
    """The background rewrite of closed journal files into Parquet, one set per topic and partition."""

    enabled: Annotated[
        bool, about("Off keeps everything in the journal: nothing is reclaimed.")
    ] = True
    process: Annotated[
        bool, about("Seal in a process of its own, so that publishing keeps its core.")
    ] = True
    min_segment_bytes: Annotated[
        Size,
        about(
            "A topic with less than this goes into a shared file, so that many quiet topics make few files."
        ),
    ] = MIB
    target_segment_bytes: Annotated[
        Size, about("Size at which a segment file is closed; at least `min_segment_bytes`.")
    ] = 64 * MIB
    shared_files_max: Annotated[
        int, Meta(ge=1, le=1024), about("Shared files kept before they are merged.")
    ] = 8
    backlog_max_bytes: Annotated[
        Size,
        about("Unsealed journal beyond which publishing is slowed; at least two journal files."),
    ] = 8 * GIB
    grace_s: Annotated[
        Span, about("How long a replaced file stays for readers that opened it before.")
    ] = 60.0
    zstd_level: Annotated[
        int,
        Meta(ge=1, le=22),
        about("Compression of segments; 1 keeps up with the journal on one core."),
    ] = 1
    row_group_events: Annotated[
        int,
        Meta(ge=1, le=16 * MIB),
        about("Events in a Parquet row group: the unit a reader skips or loads."),
    ] = 65_536


class Retention(Group, frozen=True):
    """How long events are kept. What is deleted first is always the oldest."""

    age_s: Annotated[
        Span | None, about("Events older than this may be deleted; none keeps them for ever.")
    ] = 30.0 * DAY_S
    max_bytes: Annotated[Size | None, about("Most bytes kept in the folder; none is no limit.")] = (
        None
    )
    topic_max_bytes: Annotated[
        Size | None, about("Most bytes kept for one topic; none is no limit.")
    ] = None
    write_once: Annotated[
        bool,
        about("Refuse, and audit, every attempt to delete or rewrite events younger than `age_s`."),
    ] = False


class Delivery(Group, frozen=True):
    """How queue subscriptions lease, retry and give up."""

    lease_s: Annotated[
        float,
        Meta(gt=0, le=DAY_S),
        about(
            "Time a consumer has to settle an event before it is delivered again; `extend` prolongs it."
        ),
    ] = 30.0
    ladder_ms: Annotated[
        tuple[DelayMs, ...],
        Meta(min_length=1, max_length=32),
        about("Waits before the second, third, ... attempt; the last one repeats."),
    ] = (100, 1_000, 10_000, 60_000)
    max_attempts: Annotated[
        int, Meta(ge=1, le=1_000), about("Deliveries before an event is given up.")
    ] = 5
    max_inflight: Annotated[
        int, Meta(ge=1, le=1_000_000), about("Events one consumer may hold unsettled.")
    ] = 1024
    drain_s: Annotated[
        float,
        Meta(ge=0, le=3_600),
        about(
            "Time handlers have to finish their events when a bus is closed; then they are cancelled, and the events go back to their group."
        ),
    ] = 10.0
    dead_letter: Annotated[
        bool, about("Keep what was given up as a dead letter; off drops it, with an audit record.")
    ] = True


class Limits(Group, frozen=True):
    """Bounds on single things, so that no input can take the process down."""

    max_payload_bytes: Annotated[
        int,
        Meta(ge=1, le=GIB),
        about(
            "Largest payload, before and after compression: also the bound on what a compressed payload may expand to."
        ),
    ] = 64 * MIB
    max_headers: Annotated[int, Meta(ge=0, le=1_024), about("Headers of one event.")] = 64
    max_headers_bytes: Annotated[
        int, Meta(ge=0, le=16 * MIB), about("Names and values of one event's headers together.")
    ] = 16 * KIB
    max_key_bytes: Annotated[int, Meta(ge=1, le=MIB), about("Longest key.")] = KIB
    max_batch_events: Annotated[
        int, Meta(ge=1, le=100_000_000), about("Events in one publish_many call.")
    ] = 1_000_000
    max_batch_bytes: Annotated[
        int,
        Meta(ge=1, le=2 * GIB - 1),
        about(
            "Bytes in one batch; offsets inside a batch are 32 bits wide. At least `max_payload_bytes`."
        ),
    ] = 256 * MIB
    max_scheduled: Annotated[Count, about("Events waiting for their time; each costs memory.")] = (
        10_000_000
    )
    cache_bytes: Annotated[
        int,
        Meta(ge=0, le=MAX_MEMORY_BYTES),
        about(
            "Recent batches kept in memory so that consumers close to the end do not read the disk."
        ),
    ] = 64 * MIB


class TenantLimits(Group, frozen=True):
    """What one tenant may use; none leaves that measure to the limits of everyone."""

    max_inflight: Annotated[
        Count | None, about("Events that all consumers of this tenant hold together.")
    ] = None
    max_queued: Annotated[
        Count | None,
        about("Events of this tenant's topics waiting for direct consumers, together."),
    ] = None
    max_ingress: Annotated[Count | None, about("Publishes of this tenant not yet committed.")] = (
        None
    )
    events_per_s: Annotated[Rate | None, about("Events published a second, on average.")] = None
    bytes_per_s: Annotated[
        ByteRate | None, about("Payload bytes published a second, on average.")
    ] = None
    burst_s: Annotated[
        float,
        Meta(gt=0, le=DAY_S),
        about("Seconds of a rate that may be used at once; a batch of more than that is dropped."),
    ] = 1.0
    storage_bytes: Annotated[
        Size | None,
        about("Bytes this tenant may keep stored: 64 an event, and its payload, key and headers."),
    ] = None
    replays_per_minute: Annotated[Rate | None, about("Replays this tenant may start a minute.")] = (
        None
    )


class Admission(Group, frozen=True):
    """When a producer is told to wait. All off by default: a bus in your own process trusts you."""

    max_inflight_per_consumer: Annotated[
        Count | None, about("Events one consumer may hold; a broker uses 1024.")
    ] = None
    max_per_topic_queue: Annotated[
        Count | None,
        about("Events of one topic waiting for one direct consumer; a broker uses 256."),
    ] = None
    max_queued_direct: Annotated[
        Count | None, about("Events waiting for one direct consumer; a broker uses 4096.")
    ] = None
    max_global_ingress: Annotated[
        Count | None, about("Publishes not yet committed, all tenants; a broker uses 8192.")
    ] = None
    tenants: Annotated[
        dict[TenantName, TenantLimits],
        about("Limits by tenant name: a table in a file, JSON in the environment."),
    ] = msgspec.field(default_factory=dict)


class Dedup(Group, frozen=True):
    """How long an idempotency key is remembered."""

    window_s: Annotated[Span, about("A key seen again within this time is the same event.")] = (
        float(DAY_S)
    )
    capacity: Annotated[
        int,
        Meta(ge=1, le=1_000_000_000),
        about("Keys remembered; the oldest leave first when it is reached."),
    ] = 1_000_000


class Media(Group, frozen=True):
    """How payloads become bytes when a publish does not say."""

    codec: Annotated[
        Name, about("`json`, `msgpack`, `raw`, `arrow`, `protobuf` or one you registered.")
    ] = "json"
    compressor: Annotated[Name, about("`lz4`, `zstd`, `snappy`, `none` or one you registered.")] = (
        "lz4"
    )
    compress_min_bytes: Annotated[
        int,
        Meta(ge=0, le=GIB),
        about(
            "Payloads below this stay as they are: segments compress small ones better, together."
        ),
    ] = 4_096


class Topics(Group, frozen=True):
    """What happens when a topic is used for the first time."""

    auto_create: Annotated[
        bool, about("Create a topic on first publish; off raises UnknownTopic.")
    ] = True
    partitions: Annotated[
        int, Meta(ge=1, le=65_536), about("Partitions of a topic created that way.")
    ] = 1


class Identity(Group, frozen=True):
    """Who a local caller is when nobody authenticates."""

    tenant: Annotated[Name, about("Tenant of local calls.")] = "default"
    subject: Annotated[Name, about("Subject of local calls, as the audit trail names it.")] = (
        "local"
    )


class Settings(Group, frozen=True):
    """The whole configuration of a bus: one attribute per group.

    >>> Settings(durability=Durability(fsync="interval")).durability.fsync_interval_ms
    50
    """

    durability: Durability = msgspec.field(default_factory=Durability)
    journal: Journal = msgspec.field(default_factory=Journal)
    sealing: Sealing = msgspec.field(default_factory=Sealing)
    retention: Retention = msgspec.field(default_factory=Retention)
    delivery: Delivery = msgspec.field(default_factory=Delivery)
    limits: Limits = msgspec.field(default_factory=Limits)
    admission: Admission = msgspec.field(default_factory=Admission)
    dedup: Dedup = msgspec.field(default_factory=Dedup)
    media: Media = msgspec.field(default_factory=Media)
    topics: Topics = msgspec.field(default_factory=Topics)
    identity: Identity = msgspec.field(default_factory=Identity)
    server: Server = msgspec.field(default_factory=Server)
    auth: Auth = msgspec.field(default_factory=Auth)
    fastpath: FastPath = msgspec.field(default_factory=FastPath)
    telemetry: Telemetry = msgspec.field(default_factory=Telemetry)
    client: Client = msgspec.field(default_factory=Client)
