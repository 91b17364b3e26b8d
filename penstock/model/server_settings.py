"""Settings of the daemon and of the clients that talk to it: part of penstock.model.settings."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.setting import GIB, KIB, MIB, Group, Memory, Span, about


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
    """Who may come in. With neither set, only listeners on the loopback interface are allowed."""

    admin_token: Annotated[
        str, about("Opens everything: HTTP header X-Admin-Token, or the token of a client.")
    ] = ""
    jwt_secret: Annotated[
        str, about("HS256 secret of the tokens that name a tenant; `penstock token` makes them.")
    ] = ""


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
