"""Portions: settlements in as many reports as it takes, for a broker reads only so much of one."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.wire.message import MAX_REASON_CHARACTERS, Settlement

# A call is at most six values in a message, and a report of so many well below MAX_SETTLE_VALUES.
MOST_CALLS = 2_048
# Of reasons, in characters of up to four bytes: with the numbers below MAX_SMALL_BYTES.
MOST_CHARACTERS = 200_000


def portions(settlements: list[Settlement]) -> Iterator[list[Settlement]]:
    """The same settlements, in their order, in lists that fit a message.

    >>> [len(each) for each in portions([Settlement(1, acks=[0, 5])] * 1_500)]
    [750, 750]
    """
    if _fit(settlements):
        yield settlements
        return
    if len(settlements) == 1:
        settlements = _halves(settlements[0])
    middle = len(settlements) // 2
    yield from portions(settlements[:middle])
    yield from portions(settlements[middle:])


def _fit(settlements: list[Settlement]) -> bool:
    calls = characters = 0
    for each in settlements:
        calls += 1 + len(each.acks) // 2 + len(each.nacks) + len(each.rejects) + len(each.extends)
        if each.nacks or each.rejects:
            reasons = [*(nack[2] for nack in each.nacks), *(reject[1] for reject in each.rejects)]
            characters += sum(min(len(reason), MAX_REASON_CHARACTERS) for reason in reasons)
    return calls <= MOST_CALLS and characters <= MOST_CHARACTERS


def _halves(whole: Settlement) -> list[Settlement]:
    """A settlement of many events as two of fewer."""
    at = len(whole.acks) // 4 * 2  # a run is two numbers
    nacks, rejects, extends = (
        len(each) // 2 for each in (whole.nacks, whole.rejects, whole.extends)
    )
    return [
        Settlement(
            whole.delivery, whole.handed, whole.acks[:at], whole.nacks[:nacks],
            whole.rejects[:rejects], whole.extends[:extends],
        ),
        Settlement(
            whole.delivery, whole.handed, whole.acks[at:], whole.nacks[nacks:],
            whole.rejects[rejects:], whole.extends[extends:],
        ),
    ]  # fmt: skip
