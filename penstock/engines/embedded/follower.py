"""The follower: the engine of a folder that is open read-only (`?mode=ro`) while another process writes.

It sees committed events only. It reads stored events, follows topics in log mode without a cursor that
others see, and answers the requests that files alone can answer; everything else is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from penstock.core.entry import Entry
from penstock.core.routes import RouteCatalogue
from penstock.core.routing import RouteTree
from penstock.core.state import DeadLetter, GroupState, State
from penstock.engines import requests
from penstock.engines.embedded.admin import recorded_group, topic_info
from penstock.engines.embedded.dead_letters import detail_of, newest_letters
from penstock.engines.embedded.log_groups import LogGroup
from penstock.engines.embedded.reader import event_at, stored_batches
from penstock.engines.embedded.runtime import Runtime
from penstock.engines.engine import LogFeed, QueueFeed, Request, Subscribe, Transaction
from penstock.engines.requests import DeadLetterDetail, known_partition
from penstock.log.audit_reader import AuditReader
from penstock.log.disk import Disk, no_folder, read_file, unusable
from penstock.log.recovery import Recovery, check_folder, open_for_reading
from penstock.model.batch import EventBatch
from penstock.model.draft import Draft
from penstock.model.errors import UnknownDeadLetter, UnknownGroup, Unsupported
from penstock.model.event import Event, Receipt
from penstock.model.settings import Settings
from penstock.model.topic import check_topic, is_system, tenant_of

POLL_S = 0.02  # between two looks for new commits, while a subscription is open
CAPABILITIES = frozenset({"audit", "durable", "routes", "schedules", "time-replay"})


def _read_only() -> Unsupported:
    return Unsupported(
        "the folder is open read-only ('?mode=ro'): it can be read, replayed and followed in log "
        "mode. Open it without the option to change it"
    )


class FollowerEngine:
    """A bus that can only be read."""

    capabilities = CAPABILITIES

    def __init__(self, disk: Disk, settings: Settings, runtime: Runtime | None = None) -> None:
        self.disk = disk
        self.settings = settings
        self.runtime = runtime or Runtime()
        self._groups: dict[str, LogGroup] = {}
        self._poller: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read the folder as it is now."""
        self.runtime.attach(asyncio.get_running_loop())
        try:
            self._recovery = await self.runtime.read(self._recover)
        except BaseException as error:
            self.runtime.close()
            if isinstance(error, OSError):
                raise unusable(error) from error
            raise
        self.log = self._recovery.log
        self.log.refresh = self._advance
        self._poller = asyncio.create_task(self._poll(), name="penstock-follow")

    def _recover(self) -> Recovery:
        try:
            check_folder(self.disk, write=False)
        except OSError as error:
            raise no_folder(error) from None
        return open_for_reading(self.disk, self.settings)

    @property
    def state(self) -> State:
        """What the entries read so far add up to."""
        return self._recovery.fold.state

    async def close(self) -> None:
        """Close the files."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
        self.log.close()
        self.log.manifest.close()
        self.runtime.close()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if self._groups:
                self._advance()

    def _advance(self) -> None:
        if self._recovery.advance():
            for group in self._groups.values():
                self._open_lanes(group, "earliest")
                group.arrived()

    # -- reading -------------------------------------------------------------------------------

    def read(
        self, topic: str, partition: int, start: int, stop: int | None
    ) -> AsyncIterator[EventBatch]:
        """Stored batches in order."""
        self._advance()
        known_partition(self.state, topic, partition)
        return stored_batches(self.log, self.runtime, topic, partition, start, stop)

    async def subscribe(self, subscribe: Subscribe) -> QueueFeed | LogFeed:
        """Follow topics in log mode, without a cursor that others see."""
        if subscribe.spec.mode != "log" or not subscribe.spec.ephemeral:
            raise _read_only()
        self._advance()
        state = GroupState(subscribe.spec)
        group = LogGroup(subscribe.group, state, self.log, self.runtime, self._refuse)
        self._open_lanes(group, subscribe.spec.start)
        self._groups[subscribe.group] = group
        return group.join(subscribe.member)

    def _open_lanes(self, group: LogGroup, start: str) -> None:
        tree: RouteTree[bool] = RouteTree()
        for pattern in group.state.spec.patterns:
            tree.add(pattern, True)
        opened = False
        for topic, spec in self.state.topics.items():
            if not tree.match(topic):
                continue
            for partition in range(spec.partitions):
                if (topic, partition) not in group.state.cursors:
                    group.state.cursors[topic, partition] = self._offset(topic, partition, start)
                    opened = True
        if opened:
            group.lanes_changed()

    def _offset(self, topic: str, partition: int, start: str) -> int:
        first, end = self.log.bounds(topic, partition)
        kind, _, number = start.partition(":")
        if kind == "offset":
            return max(first, min(int(number), end))
        if kind == "time":
            return self.log.find_time(topic, partition, int(number))
        return end if kind == "latest" else first

    async def _event(self, topic: str, partition: int, offset: int) -> Event:
        return await event_at(self.log, self.runtime, topic, partition, offset)

    # -- requests ------------------------------------------------------------------------------

    async def ask(self, request: Request) -> Any:
        """Answer the requests that files alone can answer."""
        self._advance()
        match request:
            case requests.ListTopics():
                names = [n for n in sorted(self.state.topics) if request.system or not is_system(n)]
                return [topic_info(self.state, self.log, self.settings, name) for name in names]
            case requests.DescribeTopic():
                return topic_info(self.state, self.log, self.settings, request.topic)
            case requests.AdmitReplay():
                return None  # a process that can read the files needs no permission
            case requests.FindOffset():
                known_partition(self.state, request.topic, request.partition)
                return self.log.find_time(request.topic, request.partition, request.time_us)
            case requests.ListGroups():
                return [self._group(name) for name in sorted(self.state.groups)]
            case requests.DescribeGroup():
                return self._group(request.group)
            case requests.DeleteGroup() if request.group in self._groups:
                return self._groups.pop(request.group) and None
            case requests.ListDead() | requests.InspectDead():
                return await self._dead(request)
            case requests.QueryAudit() | requests.VerifyAudit():
                return await self._audit(request)
            case requests.ListRoutes() | requests.ResolveRoute():
                return self._routes(request)
            case requests.ListSchedules():
                return self.state.schedule.recurring.definitions()
        raise _read_only()

    def _group(self, name: str) -> Any:
        group = self.state.groups.get(name)
        if group is None:
            raise UnknownGroup(f"no group {name!r}; `penstock group list` shows them", group=name)
        return recorded_group(name, group, self.log)

    async def _dead(
        self, request: requests.ListDead | requests.InspectDead
    ) -> list[DeadLetter] | DeadLetterDetail:
        if isinstance(request, requests.ListDead):
            return newest_letters(self.state.dead.values(), request)
        letter = self.state.dead.get(request.id)
        if letter is None:
            raise UnknownDeadLetter(f"no dead letter {request.id!r}", id=request.id)
        return await detail_of(letter, self._event)

    async def _audit(self, request: requests.QueryAudit | requests.VerifyAudit) -> Any:
        reader = AuditReader(self.disk)
        if isinstance(request, requests.VerifyAudit):
            return await self.runtime.read(reader.verify)
        return await self.runtime.read(
            lambda: list(
                reader.records(
                    message=request.message, actor=request.actor, since_us=request.since_us,
                    until_us=request.until_us, operation=request.operation,
                )
            )
        )  # fmt: skip

    def _routes(self, request: requests.ListRoutes | requests.ResolveRoute) -> Any:
        routes = RouteCatalogue()
        with contextlib.suppress(FileNotFoundError):
            routes = RouteCatalogue.decode(read_file(self.disk, "routes.json"))
        if isinstance(request, requests.ListRoutes):
            return list(routes)
        check_topic(request.topic)
        tenant = request.tenant or tenant_of(request.topic) or self.settings.identity.tenant
        return routes.resolve(request.topic, tenant)

    # -- refused -------------------------------------------------------------------------------

    async def publish(self, draft: Draft) -> Receipt:
        """Refused."""
        raise _read_only()

    async def transact(self, transaction: Transaction) -> list[Receipt] | None:
        """Refused."""
        raise _read_only()

    async def _refuse(self, entries: list[Entry]) -> None:
        raise _read_only()

    async def flush(self) -> None:
        """Nothing to flush."""
