"""A client's session with a broker, over as many connections as it takes.

Each call has a number and a deadline. While the connection is down, calls wait; on the next connection
the broker names the calls that it never received, and the channel sends those again. It never repeats a
request that could take effect twice: when the broker cannot tell, the call fails with ConnectionLost.

A broker reads only so much of one report of settlements, so large reports are split.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from penstock.engines.broker.tcp import MAX_FRAME_BYTES, ClientLink
from penstock.engines.credential import Credential
from penstock.model.errors import (
    AccessDenied,
    BrokerUnreachable,
    BusClosed,
    ConnectionLost,
    Fenced,
    InvalidSettings,
    NotAuthenticated,
    PayloadTooLarge,
    PenstockError,
    ProtocolViolation,
    WrongProtocolVersion,
)
from penstock.model.settings import Client
from penstock.wire import message as say
from penstock.wire.frame import Bytes, Frame, Kind
from penstock.wire.message import (
    MAX_REASON_CHARACTERS,
    Message,
    Settlement,
    decode,
    encode,
    to_error,
)

log = logging.getLogger("penstock.client")

# Its own generator: the sequence of a program that seeded `random` stays as it is.
_jitter = random.Random()

# Between two attempts to connect at first; it doubles up to `client.reconnect_max_s`.
FIRST_PAUSE_S = 0.05
# After so many heartbeats without a frame from the broker the connection is given up: one may be late.
SILENT_BEATS = 3
# After a connection that lasted this long, the pause starts at FIRST_PAUSE_S again.
STEADY_S = 1.0
# These carry a sequence number: a broker that was restarted knows from its journal whether it had them.
RECOGNISED = (Kind.PUBLISH, Kind.TRANSACT)
SILENT = (
    "nothing refused the connection: a firewall, or a port that is not the broker's, such as that of "
    "HTTP for penstock://. Start one with `penstock up`, or check the URL"
)
# Another attempt gets the same answer, unless a newer token helps.
FINAL = (AccessDenied, WrongProtocolVersion, ProtocolViolation, Fenced, InvalidSettings)
# Calls (ack, nack, ...) in one report. A call is at most six values in the message, so this many stay
# well below MAX_SETTLE_VALUES.
MOST_CALLS = 2_048
# Characters of reasons in one report, of up to four bytes each: with the numbers, below MAX_SMALL_BYTES.
MOST_CHARACTERS = 200_000
# When the broker takes small frames only: three times the size of a call without its reason, and four
# times that of a character.
CALL_BYTES, CHARACTER_BYTES = 96, 16
# The reasons of one nack and one reject, which cannot be split further.
LEAST_CHARACTERS = 2 * MAX_REASON_CHARACTERS


class Call:
    """A request without an answer yet."""

    __slots__ = ("again", "frame", "future", "sent")

    def __init__(self, frame: Frame, future: asyncio.Future[Frame], again: bool) -> None:
        self.frame = frame
        self.future = future
        self.again = again
        """Safe to send to a broker that has forgotten this session."""
        self.sent = False


class Channel:
    """The session with one broker: calls, settlements and what the broker pushes."""

    def __init__(
        self,
        make_link: Callable[[], ClientLink],
        settings: Client,
        hello: say.Hello,
        credential: Credential | None = None,
    ) -> None:
        self.hello = hello
        """The client's first message, without its token."""
        self._credential = Credential(settings, None) if credential is None else credential
        self.welcome: say.Welcome | None = None
        self.frame_bytes = MAX_FRAME_BYTES
        """Largest frame the broker takes, as its last Welcome said."""
        self.on_push: Callable[[Frame], None] = lambda frame: None
        self.held: Callable[[], list[int]] = list
        """Called for the deliveries that are still open, so that the broker can compare."""
        self.lost: Callable[[list[int]], None] = lambda numbers: None
        """Called with deliveries that the broker no longer holds."""
        self.renewed: Callable[[], None] = lambda: None
        """Called when the broker has forgotten what this session had open, before anything is sent."""
        self.ended: Callable[[PenstockError], None] = lambda error: None
        """Called when the channel stops connecting."""
        self._make_link = make_link
        self._settings = settings
        self._link: ClientLink | None = None
        self._calls: dict[int, Call] = {}
        self._request = 0
        self._settles: deque[tuple[int, Frame, list[say.Settlement]]] = deque()
        """Reports that the broker has not confirmed as durable: number, frame, content."""
        self._settle_number = 0
        self._opened: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._broken = asyncio.Event()
        self._heard_at = 0.0
        self._welcomed: asyncio.Future[say.Welcome] | None = None
        self._closed: PenstockError | None = None
        self._connect_error: PenstockError | None = None
        """Why the last attempt to connect failed; None once one succeeded."""

    # -- calls -------------------------------------------------------------------------------

    async def call(
        self,
        kind: Kind,
        message: Message | None = None,
        parts: Sequence[Bytes] = (),
        *,
        again: bool = False,
        deadline_s: float | None = None,
    ) -> Frame:
        """Send a request and wait for its answer; raises the error that the broker answers with.

        `again` says that the request may be sent to a broker that has forgotten this session.
        """
        return await self.finish(self.begin(kind, message, parts, again=again), deadline_s)

    def begin(
        self,
        kind: Kind,
        message: Message | None = None,
        parts: Sequence[Bytes] = (),
        *,
        again: bool = False,
    ) -> Call:
        """Send a request now; `finish` waits for its answer."""
        if self._closed is not None:
            raise self._closed
        self._request += 1
        meta = encode(message) if message is not None else b""
        frame = Frame(kind, self._request, meta, parts)
        call = Call(frame, asyncio.get_running_loop().create_future(), again)
        self._calls[frame.request] = call
        if self._link is not None and self.welcome is not None:
            try:
                self._send(call)
            except BaseException:  # if kept, it would be sent again over every later connection
                del self._calls[frame.request]
                raise
        return call

    async def finish(self, call: Call, deadline_s: float | None = None) -> Frame:
        """Wait for the answer to a request; a deadline of 0 sets no limit."""
        limit_s = self._settings.deadline_s if deadline_s is None else deadline_s
        try:
            async with asyncio.timeout(limit_s if limit_s > 0 else None):
                answer = await call.future
        except TimeoutError:
            raise self._overdue(call) from None
        finally:
            self._calls.pop(call.frame.request, None)
        if answer.kind == Kind.FAULT:
            raise to_error(decode(answer.meta, say.Fault))
        return answer

    def _send(self, call: Call) -> None:
        call.sent = True
        assert self._link is not None
        self._link.send(call.frame)

    def _send_again(self, call: Call) -> None:
        """Send a call that waited; when this connection cannot carry it, only this call fails."""
        try:
            self._send(call)
        except PenstockError as error:
            if not call.future.done():
                call.future.set_exception(error)

    def _overdue(self, call: Call) -> PenstockError:
        if not call.sent:
            error, why = self._connect_error, ""
            if isinstance(error, NotAuthenticated | InvalidSettings):  # the token was refused
                why = f" ({error.message})"
            return self.unsent(f"no connection to the broker{why}")
        return ConnectionLost(
            f"no answer from the broker within {self._settings.deadline_s:g} s; the request may still "
            "take effect. Publish again with the same token or idempotency key to be sure",
            outcome="unknown",
        )

    def unsent(self, why: str) -> BrokerUnreachable:
        """The error for a caller whose deadline passed before anything was sent."""
        return BrokerUnreachable(
            f"{why} within {self._settings.deadline_s:g} s; nothing was sent. It goes on trying: "
            "call again, or check that the broker runs",
            outcome="not sent",
        )

    def settle(self, settlements: list[say.Settlement]) -> None:
        """Report settlements; kept until the broker has confirmed them."""
        for part in split_settlements(settlements, self.frame_bytes):
            number = self._settle_number = self._settle_number + 1
            frame = Frame(Kind.SETTLE, 0, encode(say.Settle(number, part)))
            self._settles.append((number, frame, part))
            if self._link is not None and self.welcome is not None:
                self._link.send(frame)

    def push(self) -> None:
        """Hand everything sent so far to the operating system now."""
        if self._link is not None:
            self._link.push()

    def unconfirmed(self) -> list[say.Settlement]:
        """Settlements that the broker has not confirmed: a crash of the broker may lose them."""
        return [each for _, _, settlements in self._settles for each in settlements]

    async def flush(self) -> None:
        """Return when everything settled so far is durable."""
        number = self._settle_number
        await self.call(Kind.FLUSH, again=True)
        self._confirmed(number)

    # -- connecting --------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect; raises when no broker answers in time."""
        self._opened = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="penstock-channel")
        limit_s = self._settings.connect_s or self._settings.deadline_s
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.shield(self._opened)
        except TimeoutError:
            await self.close()
            # A refused connection leaves an error. Without one, the other end never answered.
            why = SILENT if self._connect_error is None else self._connect_error.message
            raise BrokerUnreachable(
                f"no broker answered within {limit_s:g} s: {why}"
            ) from self._connect_error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Say goodbye and stop."""
        if self._link is not None and self.welcome is not None:
            self._link.send(Frame(Kind.BYE, 0, b""))
        self.fail(BusClosed("the bus is closed; connect again"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._link is not None:
            self._link.close()
            self._link = None

    def fail(self, error: PenstockError) -> None:
        """Fail every call with this error, those to come as well."""
        self._closed = self._closed or error
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(error)

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while self._closed is None:
            try:
                await self._connect()
            except FINAL as error:
                if not self._newer_token_may_help(error):
                    self._end(error)
                    return
                await asyncio.sleep(self._settings.reconnect_max_s * _jitter.uniform(0.5, 1.0))
                continue
            except PenstockError as error:
                self._connect_error = error
                log.info("no connection to the broker: %s", error)
                await asyncio.sleep(pause_s * _jitter.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, self._settings.reconnect_max_s)
                continue
            except Exception as error:
                log.exception("connecting failed with an unexpected error")
                words = f"no connection could be made: {error!r}. This is a defect; connect again"
                self._end(BrokerUnreachable(words))
                return
            if self._opened is not None and not self._opened.done():
                self._opened.set_result(None)
            since = asyncio.get_running_loop().time()
            await self._send_heartbeats()
            if asyncio.get_running_loop().time() - since > STEADY_S:
                pause_s = FIRST_PAUSE_S
            elif self._closed is None:  # a connection that broke at once may do so again
                await asyncio.sleep(pause_s * _jitter.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, self._settings.reconnect_max_s)

    def _newer_token_may_help(self, error: PenstockError) -> bool:
        """Whether to go on with the next token: the session was open once, and the token can change."""
        if self._opened is not None and not self._opened.done():
            return False
        if not isinstance(error, NotAuthenticated | InvalidSettings):
            return False
        if not self._credential.renews:
            return False
        if str(self._connect_error) != str(error):
            log.error("no token that the broker takes: %s; trying again with the newest one", error)
        self._connect_error = error
        return True

    def _end(self, error: PenstockError) -> None:
        """Stop connecting: fail `open` if it still waits, else every call and feed."""
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(error)
            return
        log.error("the broker is not asked again: %s", error)
        self.fail(error)
        self.ended(error)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        token = await self._credential.current()
        link = self._make_link()
        self._broken.clear()
        self._welcomed = loop.create_future()
        await link.open(self._received, self._lost)
        self._link = link
        session = "" if self.welcome is None else self.welcome.session
        self._link.send(
            Frame(
                Kind.HELLO,
                0,
                encode(
                    msgspec.structs.replace(
                        self.hello, token=token, session=session, deliveries=self.held(),
                        pending=[number for number, call in self._calls.items() if call.sent],
                    )
                ),
            )
        )  # fmt: skip
        before = self.welcome
        self.welcome = None  # calls wait until the next Welcome
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                welcome = await self._welcomed
        except TimeoutError:
            self._drop(before)
            raise BrokerUnreachable("the broker took the connection and said nothing") from None
        except BaseException:
            self._drop(before)
            raise
        self._connect_error = None
        self._resume(welcome, before)

    def _drop(self, before: say.Welcome | None) -> None:
        self.welcome = before
        if self._link is not None:
            self._link.close()
            self._link = None

    def _resume(self, welcome: say.Welcome, before: say.Welcome | None) -> None:
        """Repeat on a new connection what the broker has not seen; fail calls of unknown outcome."""
        same = before is not None and welcome.session == before.session
        # A feed must be open before anything is asked of it, so every Subscribe goes first.
        earlier = sorted(self._calls.items(), key=lambda each: each[1].frame.kind != Kind.SUBSCRIBE)
        self.welcome = welcome
        self._heard_at = asyncio.get_running_loop().time()
        assert self._link is not None
        if welcome.max_frame_bytes:  # over ZeroMQ there is no negotiation that could tell it
            self._link.max_frame_bytes = self.frame_bytes = welcome.max_frame_bytes
        if before is not None and not welcome.resumed:
            self.renewed()
        if welcome.resumed:
            self.lost(welcome.lost)
            self._confirmed(welcome.settled)
            for _, frame, _ in self._settles:
                try:
                    self._link.send(frame)
                except (
                    PayloadTooLarge
                ) as error:  # their leases run out, and they are delivered again
                    log.error("settlements could not be reported: %s", error)
        else:
            self._settles.clear()
        unknown = set(welcome.unknown)
        for number, call in earlier:
            if not call.sent or (welcome.resumed and number in unknown):
                self._send_again(call)
            elif not welcome.resumed:
                if call.again or (same and call.frame.kind in RECOGNISED):
                    self._send_again(call)
                elif not call.future.done():
                    call.future.set_exception(
                        ConnectionLost(
                            "the broker was restarted, or has forgotten this session, and cannot say "
                            "what became of the request; look before you repeat it",
                            outcome="unknown",
                        )
                    )

    def _received(self, frame: Frame) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        if frame.kind in (Kind.RESULT, Kind.FAULT) and frame.request:
            call = self._calls.get(frame.request)
            if call is not None and not call.future.done():
                call.future.set_result(frame)
        elif frame.kind == Kind.BEAT:
            self._confirmed(decode(frame.meta, say.Beat).settled)
        elif frame.kind == Kind.WELCOME:
            if self._welcomed is not None and not self._welcomed.done():
                self._welcomed.set_result(decode(frame.meta, say.Welcome))
        elif frame.kind == Kind.FAULT:
            error = to_error(decode(frame.meta, say.Fault))
            if self._welcomed is not None and not self._welcomed.done():
                self._welcomed.set_exception(error)
            else:
                log.warning("the broker objects: %s", error)
        else:
            self.on_push(frame)

    def _confirmed(self, number: int) -> None:
        while self._settles and self._settles[0][0] <= number:
            self._settles.popleft()

    def _lost(self, reason: str) -> None:
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_exception(BrokerUnreachable(f"the connection broke: {reason}"))
        self._broken.set()

    async def _send_heartbeats(self) -> None:
        """Send heartbeats until the connection breaks or the broker is silent."""
        beat_s = self._settings.heartbeat_s
        while not self._broken.is_set():
            assert self._link is not None
            answered = min(self._calls, default=self._request + 1)
            self._link.send(Frame(Kind.HEARTBEAT, 0, encode(say.Beat(answered=answered))))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(beat_s):
                    await self._broken.wait()
            if asyncio.get_running_loop().time() - self._heard_at > SILENT_BEATS * beat_s:
                log.info("the broker is silent; connecting again")
                break
        link, self._link = self._link, None
        if link is not None:
            link.close()


def split_settlements(
    settlements: list[Settlement], frame_bytes: int = MAX_FRAME_BYTES
) -> Iterator[list[Settlement]]:
    """The same settlements, in the same order, in lists that each fit one message.

    >>> [len(each) for each in split_settlements([Settlement(1, acks=[0, 5])] * 1_500)]
    [750, 750]
    """
    if _fit(settlements, frame_bytes):
        yield settlements
        return
    if len(settlements) == 1:
        settlements = _halves(settlements[0])
    middle = len(settlements) // 2
    yield from split_settlements(settlements[:middle], frame_bytes)
    yield from split_settlements(settlements[middle:], frame_bytes)


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
