"""Operator rules: what every change by hand must say before anything happens (rows T8, T9).

The command line, the admin API and the wire all end here, so they follow the same rules. What
passes stands in the journal and in the audit chain for ever. The bounds of each field are those of
its request (`penstock.engines.request`).
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.model.errors import (
    ConfirmationNeeded,
    InvalidHeaders,
    InvalidInput,
    PayloadTooLarge,
)
from penstock.model.parameter import MAX_ID_CHARACTERS, MAX_NAME_CHARACTERS, shown
from penstock.model.settings import Limits


def signed(actor: str, reason: str) -> str:
    """The reason as the audit trail keeps it; raises InvalidInput without an actor or a reason.

    >>> signed("ann", " fixed the bug ")
    'fixed the bug'
    """
    if not actor.strip():
        raise InvalidInput(
            "an operator's action needs an actor for the audit trail; nothing was changed. Only a "
            "token tells a broker who the actor is",
            field="actor",
        )
    reason = reason.strip()
    if not reason:
        raise InvalidInput(
            "the reason is empty, and the audit trail keeps one for every action; nothing was "
            "changed. Say why in a few words",
            field="reason",
        )
    return reason


def confirmed(word: str, confirm: str, actor: str, reason: str) -> str:
    """The reason, as `signed` gives it, when the confirmation word was given to the letter."""
    reason = signed(actor, reason)
    check_word(word, confirm)
    return reason


def check_word(word: str, confirm: str) -> None:
    """Raise ConfirmationNeeded unless a destructive request restates its verb, in capitals."""
    if confirm != word:
        raise ConfirmationNeeded(
            f"this needs the word {word} and got {confirm!r}; nothing was changed. Repeat with "
            f"confirm={word!r}, on the command line --confirm {word}; dry_run=True, or --dry-run, "
            "shows what would happen",
            wanted=word,
        )


def check_id(id: str) -> None:
    """Raise InvalidInput when no command could name a dead letter of this id again."""
    # The command line separates ids by commas and strips them.
    fits = 0 < len(id) <= MAX_ID_CHARACTERS and id.isprintable()
    if not fits or "," in id or id != id.strip():
        raise InvalidInput(
            f"{shown(id)} is no id for a message: 1 to {MAX_ID_CHARACTERS} printable characters, "
            "without commas and without spaces around them; nothing was stored. Choose another",
            field="id",
        )


def check_consumer(name: str) -> None:
    """Raise InvalidInput when a name that is no group's should not become a consumer's."""
    fits = 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()
    if not fits or name.startswith("_") or any(each.isspace() or each == "," for each in name):
        raise InvalidInput(
            f"{shown(name)} is no consumer group, and no name for one: 1 to {MAX_NAME_CHARACTERS} "
            "printable characters without spaces and commas, not beginning with '_'; nothing was "
            "stored. `penstock group list` shows the groups",
            field="consumer",
        )


def check_content(payload: bytes, headers: Mapping[str, str], limits: Limits) -> None:
    """Raise what a publish of this would raise: nobody checks it when it is published later on."""
    if len(payload) > limits.max_payload_bytes:
        raise PayloadTooLarge(
            f"a payload of {len(payload)} bytes is over the limit of {limits.max_payload_bytes}; "
            "nothing was stored. Store it elsewhere and name a reference, or raise "
            "limits.max_payload_bytes",
            size_bytes=len(payload),
            limit_bytes=limits.max_payload_bytes,
        )
    size = sum(len(name.encode()) + len(text.encode()) for name, text in headers.items())
    if len(headers) > limits.max_headers or size > limits.max_headers_bytes:
        raise InvalidHeaders(
            f"{len(headers)} headers of {size} bytes are over the limit of {limits.max_headers} and "
            f"{limits.max_headers_bytes} bytes; nothing was stored. Put the rest into the payload"
        )
