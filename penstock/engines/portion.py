"""Portions: settlements in as many reports as it takes, for a broker reads only so much of one."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.engines.link import MAX_FRAME_BYTES
from penstock.wire.message import MAX_REASON_CHARACTERS, Settlement

# A call is at most six values in a message, and a report of so many well below MAX_SETTLE_VALUES.
MOST_CALLS = 2_048
# Of reasons, in characters of up to four bytes: with the numbers below MAX_SMALL_BYTES.
MOST_CHARACTERS = 200_000
# Of a small frame: three times what a call takes without its reason, and four times what a character does.
CALL_BYTES, CHARACTER_BYTES = 96, 16
# A nack and a reject, which have no halves.
LEAST_CHARACTERS = 2 * MAX_REASON_CHARACTERS


def portions(
    settlements: list[Settlement], frame_bytes: int = MAX_FRAME_BYTES
) -> Iterator[list[Settlement]]:
    """The same settlements, in their order, in lists that fit a message.

    >>> [len(each) for each in portions([Settlement(1, acks=[0, 5])] * 1_500)]
    [750, 750]
    """
    if _fit(settlements, frame_bytes):
        yield settlements
        return
    if len(settlements) == 1:
        settlements = _halves(settlements[0])
    middle = len(settlements) // 2
    yield from portions(settlements[:middle], frame_bytes)
    yield from portions(settlements[middle:], frame_bytes)


def _fit(settlements: list[Settlement], frame_bytes: int) -> bool:
    calls = characters = 0
    for each in settlements:
        calls += 1 + len(each.acks) // 2 + len(each.nacks) + len(each.rejects) + len(each.extends)
        calls += len(each.returns)
        if each.nacks or each.rejects:
            reasons = [*(nack[2] for nack in each.nacks), *(reject[1] for reject in each.rejects)]
            characters += sum(min(len(reason), MAX_REASON_CHARACTERS) for reason in reasons)
    most_calls = min(MOST_CALLS, frame_bytes // CALL_BYTES)
    most_characters = min(MOST_CHARACTERS, max(LEAST_CHARACTERS, frame_bytes // CHARACTER_BYTES))
    return calls <= most_calls and characters <= most_characters


def _halves(whole: Settlement) -> list[Settlement]:
    """A settlement of many events as two of fewer."""
    at = len(whole.acks) // 4 * 2  # a run is two numbers
    nacks, rejects, extends, returns = (
        len(each) // 2 for each in (whole.nacks, whole.rejects, whole.extends, whole.returns)
    )
    return [
        Settlement(
            whole.delivery, whole.handed, whole.acks[:at], whole.nacks[:nacks],
            whole.rejects[:rejects], whole.extends[:extends], whole.returns[:returns],
        ),
        Settlement(
            whole.delivery, whole.handed, whole.acks[at:], whole.nacks[nacks:],
            whole.rejects[rejects:], whole.extends[extends:], whole.returns[returns:],
        ),
    ]  # fmt: skip
