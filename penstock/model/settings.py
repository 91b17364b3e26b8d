"""Everything an operator can tune: frozen groups with defaults, ranges and a sentence for each field.

`Settings()` is a complete, safe configuration. A group checks itself when it is made, so a wrong
value never travels: it raises `InvalidSettings` where it was written. Files, environment and flags
are read by `penstock.model.settings_loader`; docs/reference/settings.md is printed from these classes.

Field names end in their unit: `_bytes`, `_s` (seconds), `_ms` (milliseconds).
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, inspect

from penstock.model.errors import InvalidSettings
from penstock.model.parameter import parse, shown, unit_of
from penstock.model.topic import TENANT_NAME

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB
DAY_S = 86_400

# Upper ends only catch a slip of the unit (bytes for MiB, ms for s).
MAX_SIZE_BYTES = 1024 * TIB
MAX_MEMORY_BYTES = 64 * GIB  # what one buffer of one process may sensibly hold
MAX_SPAN_S = 36_525 * DAY_S  # a hundred years
MAX_COUNT = 1_000_000_000

Size = Annotated[int, Meta(ge=1, le=MAX_SIZE_BYTES)]
Memory = Annotated[int, Meta(ge=1, le=MAX_MEMORY_BYTES)]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Span = Annotated[float, Meta(ge=0, le=MAX_SPAN_S)]
DelayMs = Annotated[int, Meta(ge=0, le=7 * DAY_S * 1000)]
Rate = Annotated[float, Meta(gt=0, le=MAX_COUNT)]
ByteRate = Annotated[float, Meta(gt=0, le=TIB)]
Name = Annotated[str, Meta(min_length=1, max_length=255)]
TenantName = Annotated[str, Meta(pattern=TENANT_NAME)]


def about(text: str) -> Meta:
    """Attach the sentence that the reference prints for a field."""
    return Meta(description=text)


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all groups share: a value outside its range is refused when the group is made.

    >>> class Tap(Group, frozen=True):
    ...     litres: Annotated[int, Meta(ge=1)] = 1
    >>> Tap(litres=0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    penstock.model.errors.InvalidSettings: Tap.litres = 0: ...
    """

    def __post_init__(self) -> None:
        for name, kind in field_types(type(self)).items():
            value = getattr(self, name)
            try:
                checked = msgspec.convert(in_unit(value, unit_of(name), kind), kind)
            except ValueError as error:
                raise InvalidSettings(
                    f"{type(self).__name__}.{name} = {shown(value)}: {error}. "
                    "`penstock docs settings` lists what is allowed",
                    key=name,
                    value=shown(value),
                ) from None
            # A list becomes a tuple and a dict a copy, so that a frozen group cannot be changed from outside.
            msgspec.structs.force_setattr(self, name, checked)


def in_unit(value: Any, unit: str, kind: Any) -> Any:
    """A value of a field as a number of the field's unit, from text or a timedelta; "none" is None.

    >>> in_unit("5m", "s", Span), in_unit(timedelta(seconds=1), "ms", DelayMs), in_unit(7, "s", Span)
    (300, 1000, 7)
    """
    shape = _shape(kind)
    if shape == "list" and isinstance(value, str):
        value = value.strip("[] ").split(",")
    if isinstance(value, list | tuple):
        return [_amount(item, unit) for item in value]
    if shape == "optional" and isinstance(value, str) and value.strip().lower() == "none":
        return None
    return _amount(value, unit)


def _amount(value: Any, unit: str) -> Any:
    return parse(value, unit) if unit and isinstance(value, str | timedelta) else value


@cache
def _shape(kind: Any) -> Literal["optional", "list", "single"]:
    info = inspect.type_info(kind)
    if isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.UnionType) and info.includes_none:
        return "optional"
    return "list" if isinstance(info, inspect.VarTupleType) else "single"


@cache
def field_types(group: type[msgspec.Struct]) -> dict[str, Any]:
    """The full type of each field of a group, ranges included."""
    return {field.name: field.type for field in msgspec.structs.fields(group)}


# -- the daemon and its clients --------------------------------------------------------------------


class Server(Group, frozen=True):
    """What `penstock up` listens on. Port 0 takes any free one; `ports.json` in the folder says which."""

    zmq: Annotated[
        str, about("ZeroMQ ROUTER for producers, consumers and control; empty is off.")
    ] = "127.0.0.1:5555"
    pub: Annotated[str, about("ZeroMQ PUB for fan-out; empty is off.")] = "127.0.0.1:5556"
    tcp: Annotated[str, about("The TCP protocol, which `penstock://` speaks; empty is off.")] = (
        "127.0.0.1:5557"
    )
    http: Annotated[str, about("HTTP: admin API, health, metrics; empty is off.")] = (
        "127.0.0.1:5558"
    )
    max_connections: Annotated[
        int, Meta(ge=1, le=1_000_000), about("Clients at once; one more is refused.")
    ] = 4_096
    max_frame_bytes: Annotated[
        int,
        Meta(ge=64 * KIB, le=2 * GIB - 1),
        about("Largest frame a client may send; a larger claim ends its connection."),
    ] = 320 * MIB
    heartbeat_s: Annotated[
        float, Meta(gt=0, le=3_600), about("A client that is silent for three of these is gone.")
    ] = 5.0
    session_s: Annotated[
        Span, about("How long a session outlives its connection, leases and all.")
    ] = 30.0
    lease_grace_s: Annotated[
        Span,
        about("How long a client whose side closed the connection keeps its leases without one."),
    ] = 1.0
    send_buffer_bytes: Annotated[
        Memory, about("Unsent bytes of one client beyond which it gets no more deliveries.")
    ] = 8 * MIB
    max_client_bytes: Annotated[
        Annotated[int, Meta(ge=MIB, le=MAX_SIZE_BYTES)] | None,
        about(
            "Most bytes that all clients make the broker hold; none is a quarter of the memory, at least 1 GiB. One frame has at most half of it."
        ),
    ] = None
    drain_s: Annotated[
        float, Meta(ge=0, le=3_600), about("Time for clients to finish when the broker is stopped.")
    ] = 10.0
    tls_certificate: Annotated[str, about("PEM file; TCP and HTTP speak TLS when it is set.")] = ""
    tls_key: Annotated[str, about("PEM file with its key.")] = ""
    tls_client_ca: Annotated[
        str, about("PEM file; clients must show a certificate signed by it.")
    ] = ""
    curve_secret_key: Annotated[
        str, about("Z85 text; ZeroMQ is encrypted with CURVE when it is set.")
    ] = ""
    curve_clients: Annotated[
        tuple[str, ...], about("Z85 public keys that may connect; none lets every key in.")
    ] = ()
    log_format: Annotated[Literal["text", "json"], about("How the daemon logs.")] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], about("What the daemon logs.")
    ] = "info"


class Auth(Group, frozen=True):
    """Who may come in. With nothing set, only listeners on the loopback interface are allowed."""

    admin_token: Annotated[
        str, about("Opens everything: HTTP header X-Admin-Token, or the token of a client.")
    ] = ""
    jwt_secret: Annotated[
        str, about("HS256 secret of the tokens that name a tenant; `penstock token` makes them.")
    ] = ""
    admin_token_file: Annotated[
        str,
        about(
            "File with admin tokens, one a line; each is valid, beside `admin_token`. Read again "
            "when it changes, and on SIGHUP."
        ),
    ] = ""
    jwt_secret_file: Annotated[
        str,
        about(
            "File with secrets, one a line; each is valid, beside `jwt_secret`, and the first signs. "
            "Read again when it changes, and on SIGHUP."
        ),
    ] = ""

    @property
    def asks(self) -> bool:
        """Whether everybody must show a token."""
        return any(getattr(self, name) for name in self.__struct_fields__)


class FastPath(Group, frozen=True):
    """Large payloads leave the broker's loop: compression and framing run in threads."""

    enabled: Annotated[bool, about("Off does everything on the loop.")] = True
    require: Annotated[bool, about("Refuse to start, or to take a large payload, without it.")] = (
        False
    )
    cutover_bytes: Annotated[
        Memory,
        about(
            "Payloads, and frames that are compressed, JSON or protobuf, from this size on take it."
        ),
    ] = 256 * KIB
    fall_back: Annotated[
        bool,
        about(
            "When it is busy, do the work of a publish on the loop rather than wait. Frames always wait, in their order."
        ),
    ] = True
    threads: Annotated[int, Meta(ge=1, le=64), about("Threads that do the work.")] = 2


class Telemetry(Group, frozen=True):
    """Traces; metrics are at /metrics whatever stands here."""

    otlp_endpoint: Annotated[
        str, about("Where `penstock up` sends spans: an OTLP collector over HTTP; empty is off.")
    ] = ""
    sample_ratio: Annotated[
        float, Meta(ge=0, le=1), about("Share of the traces begun here that is kept.")
    ] = 1.0


class Client(Group, frozen=True):
    """How an application talks to a broker."""

    deadline_s: Annotated[
        float,
        Meta(gt=0, le=3_600),
        about(
            "A call that has no answer by then raises, counted from the call, also if it waits to be "
            "sent; reconnecting goes on meanwhile."
        ),
    ] = 10.0
    connect_s: Annotated[
        float,
        Meta(ge=0, le=3_600),
        about(
            "How long connecting waits for a broker that does not answer yet; 0 is as long as `deadline_s`. "
            "Commands wait for 2 s."
        ),
    ] = 0.0
    linger_ms: Annotated[
        float,
        Meta(ge=0, le=1_000),
        about(
            "How long a publish waits for others to share its frame, at most half of `deadline_s`; "
            "0 waits for this loop turn."
        ),
    ] = 0.0
    heartbeat_s: Annotated[float, Meta(gt=0, le=3_600), about("Sign of life when idle.")] = 5.0
    reconnect_max_s: Annotated[
        float, Meta(gt=0, le=600), about("Longest pause between two attempts to reconnect.")
    ] = 2.0
    compressor: Annotated[
        Literal["none", "lz4", "zstd", "snappy"], about("Compresses frames on the wire.")
    ] = "none"
    token: Annotated[str, about("Shown to the broker.")] = ""
    token_file: Annotated[
        str,
        about("File with the token, read again whenever a connection is made; instead of `token`."),
    ] = ""
    tls_ca: Annotated[str, about("PEM file to check a broker's certificate with.")] = ""
    tls_certificate: Annotated[
        str, about("PEM file; shown to a broker that asks clients for a certificate.")
    ] = ""
    tls_key: Annotated[str, about("PEM file with its key; empty: the key is in the same file.")] = (
        ""
    )
    curve_server_key: Annotated[str, about("Z85 public key of the broker, for ZeroMQ.")] = ""
    curve_secret_key: Annotated[
        str, about("Z85 secret key of this client; made up when empty.")
    ] = ""


# -- the bus ---------------------------------------------------------------------------------------


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
    """Who a local caller is, without authentication."""

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
