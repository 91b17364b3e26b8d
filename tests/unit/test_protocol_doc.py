"""docs/reference/protocol.md says what the code does (row Y13): kinds, messages, defaults, limits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.core.entry import GroupSpec
from penstock.core.retry import Retry
from penstock.model.event import Receipt
from penstock.server import broker, publish, session, subscriptions
from penstock.server.transports import legacy as legacy_transport
from penstock.server.transports import link, zeromq
from penstock.server.transports import tcp as server_tcp
from penstock.wire import encodings, frame, limits, message, negotiation
from penstock.wire import legacy as legacy_wire
from penstock.wire.frame import Kind
from penstock.wire.protobuf import DeliverEvents, EventItem, Result
from tools.reference import ask

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "protocol.md"
TEXT = PAGE.read_text()
FLAT = " ".join(TEXT.split())

MESSAGES: dict[str, type[msgspec.Struct]] = {
    name: each
    for name, each in vars(message).items()
    if isinstance(each, type) and issubclass(each, message.Message) and each is not message.Message
} | {
    "Deliver": DeliverEvents,
    "EventItem": EventItem,
    "GroupSpec": GroupSpec,
    "Receipt": Receipt,
    "Result": Result,
    "Retry": Retry,
}


def table_of(name: str) -> list[list[str]]:
    """The rows below a heading."""
    section = re.split(rf"^### {name}$", TEXT, flags=re.MULTILINE)[1]
    section = re.split(r"^#", section, flags=re.MULTILINE)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def default_of(field: Any) -> str:
    if field.required:
        return "-"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    plain = msgspec.to_builtins(value)
    if isinstance(value, Retry):
        plain = {}  # its own defaults
    return json.dumps(plain)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_messages(name: str) -> None:
    rows = table_of(name)
    fields = msgspec.structs.fields(MESSAGES[name])
    assert [row[0] for row in rows] == [field.name for field in fields]
    assert [row[2] for row in rows] == [default_of(field) for field in fields]


def test_kinds() -> None:
    found = re.findall(r"^\| (0x[0-9a-f]{2}) \| ([A-Z]+) \| (client|broker) \|", TEXT, re.MULTILINE)
    expected = [
        (f"0x{kind:02x}", kind.name, "client" if kind < 0x40 else "broker") for kind in Kind
    ]
    assert found == expected


def test_old_commands() -> None:
    found = re.findall(r"^\| (0x[0-9a-f]{2}) \| ([A-Z]+) \| (?!client|broker)", TEXT, re.MULTILINE)
    commands = [*legacy_wire.Command, *legacy_wire.LegacyReply]
    assert found == [(f"0x{each:02x}", each.name) for each in commands]


@pytest.mark.parametrize(
    "words",
    [
        f"{server_tcp.HANDSHAKE_S:.0f} seconds from connecting",
        f"no body may be over {server_tcp.UNWELCOMED_FRAME_BYTES >> 20} MiB",
        f"more than {link.UNANSWERED_BYTES >> 20} MiB of a client's requests",
        f"at most {negotiation.MAX_NEGOTIATION_BYTES >> 10} KiB",
        f"0 to {frame.MAX_PARTS:,} byte strings",
        f"at most {frame.MAX_META_BYTES >> 20} MiB and from clients",
        f"the last {session.MAX_KEPT_ANSWERS:,}, at most {session.MAX_KEPT_BYTES >> 20} MiB",
        f"| feeds of a session | {subscriptions.MAX_FEEDS:,} |",
        f"| partitions in `log_held` of one Subscribe | {message.MAX_LOG_HELD:,};",
        f"| heartbeats of a session | {session.MAX_BEATS_PER_S} a second;",
        f"| meta of Publish, Transact and Ask | {limits.MAX_MESSAGE_BYTES >> 20} MiB |",
        f"| meta of Subscribe | {limits.MAX_SUBSCRIBE_BYTES >> 20} MiB |",
        f"| meta of other requests | {limits.MAX_SMALL_BYTES >> 20} MiB |",
        f"| meta from the broker | {frame.MAX_META_BYTES >> 20} MiB |",
        f"| values in a meta of a client | {limits.MAX_VALUES:,}; {limits.MAX_SETTLE_VALUES:,} in a Settle, and in protobuf |",
        f"| drafts of one Publish | {publish.MAX_DRAFTS:,};",
        f"Penstock names {message.MAX_HELD:,};",
        f"that break the protocol | {broker.MAX_VIOLATIONS} are answered",
        f"that break the protocol | {zeromq.MAX_VIOLATIONS} are answered",
        f"more than {encodings.MAX_EVENTS:,} events or {encodings.MAX_EVENTS_BYTES >> 20} MiB",
        f"At most {legacy_transport.MAX_SUBSCRIPTIONS} subscriptions; while {legacy_transport.MAX_WAITING:,} commands",
        f"most outstanding (0: {legacy_wire.DEFAULT_OUTSTANDING})",
        f"rest, at most {legacy_wire.MAX_PING_BYTES >> 10} KiB",
    ],
)
def test_numbers(words: str) -> None:
    assert words in FLAT


def test_layouts() -> None:
    """The sizes the tables add up to."""
    assert (frame.ENVELOPE.size, frame.BODY_HEAD.size) == (16, 16)
    assert "an envelope of 16 bytes" in FLAT
    assert "what follows the first 16 bytes" in FLAT


def test_what_can_be_asked() -> None:
    """Y13: `make reference` prints the section when a request has changed."""
    assert ask.TITLE in TEXT
    assert ask.within(TEXT) == TEXT
