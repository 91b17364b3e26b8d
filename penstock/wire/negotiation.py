"""Negotiation: the first message each way on a TCP connection, COMMAND 0xFE with a JSON body.

The client offers, the server chooses. The client names its preferences first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from penstock.model.errors import ProtocolViolation, WrongProtocolVersion
from penstock.wire.frame import VERSION, Bytes, Mark
from penstock.wire.message import Fault, to_error, to_fault
from penstock.wire.stream import COMPRESSORS, encode_message

NEGOTIATE = 0xFE
# An offer holds a handful of names; this leaves room for many of later versions.
MAX_NEGOTIATION_BYTES = 16 << 10

# The errors that reading any negotiation raises.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

MARKS = {"raw": Mark.RAW, "json": Mark.JSON, "protobuf": Mark.PROTOBUF}
"""Marks by the name they have in an offer."""


class Offer(msgspec.Struct, frozen=True):
    """Versions, compressors and marks of a client, the preferred ones first."""

    versions: tuple[int, ...]
    compressors: tuple[str, ...] = ()
    marks: tuple[str, ...] = ("raw",)


class Choice(msgspec.Struct, frozen=True):
    """The server's choice for the connection."""

    version: int
    compressor: str
    mark: str
    max_frame_bytes: Annotated[int, msgspec.Meta(ge=1)]
    """Largest body the broker takes."""


class _Refusal(msgspec.Struct, frozen=True):
    error: Fault | None = None


def offer(compressor: str = "none", marks: Sequence[str] = ("raw",)) -> bytes:
    """A client's first message.

    >>> offer("zstd")[5:]
    b'{"versions":[1],"compressors":["zstd"],"marks":["raw"]}'
    """
    compressors = () if compressor == "none" else (compressor,)
    body = msgspec.json.encode(Offer((VERSION,), compressors, tuple(marks)))
    return encode_message(NEGOTIATE, body)


def choose(body: Bytes, max_frame_bytes: int, marks: Sequence[str] = tuple(MARKS)) -> Choice:
    """Pick from an offer; raises WrongProtocolVersion or ProtocolViolation.

    >>> choose(offer("lz4")[5:], 1 << 20).compressor
    'lz4'
    """
    if len(body) > MAX_NEGOTIATION_BYTES:
        raise ProtocolViolation(f"an offer of {len(body)} bytes; {MAX_NEGOTIATION_BYTES} suffice")
    try:
        offered = msgspec.json.decode(body, type=Offer)
    except _UNREADABLE as error:
        raise ProtocolViolation(f"the negotiation is no offer: {error}") from None
    if VERSION not in offered.versions:
        raise WrongProtocolVersion(
            f"the client speaks versions {list(offered.versions[:8])} of the protocol, this broker speaks "
            f"{VERSION}; upgrade the older side",
            versions=list(offered.versions[:8]),
        )
    compressor = next((name for name in offered.compressors if name in COMPRESSORS), "none")
    mark = next((name for name in offered.marks if name in marks), None)
    if mark is None:
        raise ProtocolViolation(
            f"the client wants marks {list(offered.marks[:8])}, this broker has {list(marks)}",
            marks=list(marks),
        )
    return Choice(VERSION, compressor, mark, max_frame_bytes)


def answer(choice: Choice) -> bytes:
    """A server's answer to an offer."""
    return encode_message(NEGOTIATE, msgspec.json.encode(choice))


def refuse(error: Exception) -> bytes:
    """A server's answer to an offer that it refuses; it closes the connection then."""
    return encode_message(NEGOTIATE, msgspec.json.encode(_Refusal(to_fault(error))))


def chosen(body: Bytes) -> Choice:
    """Read a server's answer; raises the error it holds, or ProtocolViolation."""
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
        if refusal.error is not None:
            raise to_error(refusal.error)
        choice = msgspec.json.decode(body, type=Choice)
    except _UNREADABLE as error:
        raise ProtocolViolation(f"the broker's answer is no negotiation: {error}") from None
    if choice.version != VERSION:
        raise WrongProtocolVersion(
            f"the broker chose version {choice.version}, this side speaks {VERSION}; upgrade the "
            "older side",
            version=choice.version,
        )
    if choice.compressor not in COMPRESSORS or choice.mark not in MARKS:
        raise ProtocolViolation(
            f"the broker chose {choice.compressor!r} and {choice.mark!r}, which nobody offered"
        )
    return choice
