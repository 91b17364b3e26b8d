"""Replies: answers kept for a client that may have missed them, until it says that it has them."""

from __future__ import annotations

from penstock.wire.frame import Frame


class Replies:
    """The last answers of one session, by request: at most so many, and of so many bytes.

    >>> replies = Replies(100, 1 << 20)
    >>> replies.keep(Frame(0x52, 7, b"")); 7 in replies
    True
    >>> replies.forget_before(8); 7 in replies
    False
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: dict[int, Frame] = {}
        self.bytes = 0

    def __contains__(self, request: int) -> bool:
        return request in self._kept

    def __getitem__(self, request: int) -> Frame:
        return self._kept[request]

    def keep(self, answer: Frame) -> None:
        """Keep an answer; the oldest go when there are too many."""
        self._kept[answer.request] = answer
        self.bytes += answer.size_bytes
        while len(self._kept) > self._most or self.bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def forget_before(self, request: int) -> None:
        """The client has all answers to requests before this one."""
        for each in [each for each in self._kept if each < request]:
            self._drop(each)

    def clear(self) -> None:
        """Keep none of them."""
        self._kept.clear()
        self.bytes = 0

    def _drop(self, request: int) -> None:
        self.bytes -= self._kept.pop(request).size_bytes
