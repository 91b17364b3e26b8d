"""Connection: one client at the door of the broker, before and after it is part of a session."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from penstock.model.errors import AccessDenied, PenstockError, ProtocolViolation
from penstock.wire.fault import to_fault
from penstock.wire.frame import Frame, Kind
from penstock.wire.message import Hello, decode, encode

if TYPE_CHECKING:
    from penstock.server.broker import Broker
    from penstock.server.link import Link
    from penstock.server.session import Session

log = logging.getLogger("penstock.server")

# So many frames behind a Hello let others go first. More are taken at once: while they waited even
# more would come, and a client that never stops could fill the memory.
COURTEOUS_FRAMES = 8
MAX_VIOLATIONS = 16  # frames against the protocol after which a client is cut off


class Connection:
    """One connection: nobody until its Hello, then part of a session."""

    def __init__(self, broker: Broker, link: Link) -> None:
        self.link = link
        self.session: Session | None = None
        self.heard_at = broker.now()
        self._broker = broker
        self._greeting: asyncio.Task[None] | None = None
        self._greeted = False
        self._early: deque[Frame] = deque()
        self._violations = 0

    @property
    def tenant(self) -> str:
        """Whom the client speaks for; nobody before its welcome."""
        return "" if self.session is None else self.session.identity.tenant

    def received(self, frame: Frame) -> None:
        """Take a frame; what is wrong with it is answered, here and now."""
        self.heard_at = self._broker.now()
        if self._greeting is None or self._greeted:
            self._take(frame)
        else:
            self._early.append(frame)  # of an eager client: few can come while it is greeted

    def _take(self, frame: Frame) -> None:
        try:
            if self.session is not None:
                if frame.kind == Kind.BYE:
                    self._broker.goodbye(self)
                else:
                    self.session.received(frame)
            elif self._greeting is not None:
                pass  # it said goodbye, or is gone
            elif frame.kind == Kind.HELLO:
                hello = decode(frame.meta, Hello)
                self._greeting = asyncio.create_task(self._greet(frame.request, hello))
            else:
                raise ProtocolViolation("the first frame of a client is HELLO")
        except PenstockError as error:
            self.fault(frame.request, error)

    async def _greet(self, request: int, hello: Hello) -> None:
        """Welcome a client, then take what it sent meanwhile; others, who are known, go first."""
        courtesy = self._broker.courtesy
        try:
            await courtesy.turn()
            self.session = await self._broker.greet(self, hello)
        except Exception as error:
            if not isinstance(error, PenstockError):
                log.exception("a greeting failed", extra={"peer": self.link.peer})
                error = PenstockError(
                    f"the broker failed: {type(error).__name__}; its log says more"
                )
            elif isinstance(error, AccessDenied):
                # Whoever tries tokens must show in the log; the reason never repeats one.
                self._broker.refusals.warning(
                    "client refused", peer=self.link.peer, reason=error.message
                )
            self.fault(request, error)
            self.link.close()
            return
        while self._early:
            if len(self._early) <= COURTEOUS_FRAMES:
                await courtesy.turn()
            if self._early:  # else the client is gone meanwhile
                self._take(self._early.popleft())
        self._greeted = True

    def fault(self, request: int, error: PenstockError) -> None:
        """Answer with an error; who goes on breaking the protocol is cut off."""
        self._broker.failed(error)
        self.link.send(Frame(Kind.FAULT, request, encode(to_fault(error))))
        self._violations += isinstance(error, ProtocolViolation)
        if self._violations > MAX_VIOLATIONS:
            self._early.clear()
            self.link.close()

    def lost(self, reason: str, *, closed: bool = False) -> None:
        """The transport has no connection any more."""
        self._early.clear()
        self._broker.disconnected(self, reason, closed=closed)
