"""What no single setting can tell: values that contradict each other, and choices worth a warning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock.model.codec import codecs
from penstock.model.compressor import compressors
from penstock.model.quantity import show

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.model.settings import Settings

# (the smaller, the larger): each pair is a bound that would otherwise be broken by the other.
AT_MOST = (
    ("journal.tenant_quantum_bytes", "journal.commit_max_bytes"),
    ("journal.side_file_bytes", "journal.commit_max_bytes"),
    ("journal.commit_max_bytes", "journal.pending_max_bytes"),
    ("sealing.min_segment_bytes", "sealing.target_segment_bytes"),
    ("limits.max_payload_bytes", "limits.max_batch_bytes"),
)


class Conflict(NamedTuple):
    """One finding: how bad, which settings are concerned, what to know."""

    severity: Literal["error", "warning"]
    keys: tuple[str, ...]
    message: str


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Every contradiction (error) and doubtful choice (warning) in a set of valid values.

    >>> from penstock.model.settings import Durability, Settings
    >>> list(conflicts(Settings()))
    []
    >>> [found.keys for found in conflicts(Settings(durability=Durability(fsync="never")))]
    [('durability.fsync',)]
    """
    yield from _contradictions(settings)
    yield from _doubts(settings)
    yield from _missing_parts(settings)


def _contradictions(settings: Settings) -> Iterator[Conflict]:
    for small, large in AT_MOST:
        low, high = _value(settings, small), _value(settings, large)
        if low > high:
            low_shown, high_shown = show(low, "bytes"), show(high, "bytes")
            message = f"{small} ({low_shown}) must be at most {large} ({high_shown})"
            yield Conflict("error", (small, large), message)
    if settings.sealing.backlog_max_bytes < 2 * settings.journal.file_bytes:
        keys = ("sealing.backlog_max_bytes", "journal.file_bytes")
        message = f"{keys[0]} must hold two files of {keys[1]}: one open, one being sealed"
        yield Conflict("error", keys, message)
    if settings.fastpath.require and not settings.fastpath.enabled:
        keys = ("fastpath.require", "fastpath.enabled")
        yield Conflict("error", keys, f"{keys[0]} needs {keys[1]}: enable it, or do not require it")
    if settings.client.tls_key and not settings.client.tls_certificate:
        keys = ("client.tls_key", "client.tls_certificate")
        yield Conflict("error", keys, f"{keys[0]} needs {keys[1]}: set both, or none")
    endpoint = settings.telemetry.otlp_endpoint
    if endpoint and not endpoint.startswith(("http://", "https://")):
        message = f"spans go to an http:// or https:// address, not to {endpoint!r}"
        yield Conflict("error", ("telemetry.otlp_endpoint",), message)


def _doubts(settings: Settings) -> Iterator[Conflict]:
    retries = settings.delivery.max_attempts - 1
    if len(settings.delivery.ladder_ms) > max(1, retries):
        keys = ("delivery.ladder_ms", "delivery.max_attempts")
        message = f"{keys[0]} has more steps than the {retries} retries that {keys[1]} allows; the last ones are never used"
        yield Conflict("warning", keys, message)
    if settings.durability.fsync == "never":
        message = "a power failure loses acknowledged events; `always` loses none"
        yield Conflict("warning", ("durability.fsync",), message)
    if not settings.sealing.enabled:
        message = "nothing is reclaimed, so the journal grows until the disk is full"
        yield Conflict("warning", ("sealing.enabled",), message)
    retention = settings.retention
    if retention.write_once and (retention.max_bytes or retention.topic_max_bytes):
        message = "size limits do not delete what write-once protects; the folder may pass them"
        yield Conflict("warning", ("retention.write_once",), message)


def _missing_parts(settings: Settings) -> Iterator[Conflict]:
    media = settings.media
    # Only a warning: the program may register its own part before it connects.
    if media.codec not in codecs:
        message = f"no codec {media.codec!r} is installed; there is {', '.join(codecs.names())}"
        yield Conflict("warning", ("media.codec",), message)
    if media.compressor not in compressors:
        known = ", ".join(compressors.names())
        message = f"no compressor {media.compressor!r} is installed; there is {known}"
        yield Conflict("warning", ("media.compressor",), message)


def _value(settings: Settings, key: str) -> int:
    group, _, field = key.partition(".")
    value: int = getattr(getattr(settings, group), field)
    return value
