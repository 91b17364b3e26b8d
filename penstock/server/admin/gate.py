"""Authorization of administrative requests: who may ask for what, and which rows they see.

Every administrative request of `penstock.engines.requests` passes here, whichever transport brought it,
so the rules are the same everywhere. Role `admin` asks the engine directly. Roles `operator` and `reader`
stay inside their tenant (`Tenancy`): what belongs to another tenant does not exist for them.

The fourth word of a topic's name is its tenant, as in `orders.created.v1.acme`. A topic without a tenant
in its name is open to all, and belongs to the bus's own tenant. A group belongs to a tenant when
everything that it reads does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from penstock.core.audit import AuditRecord
from penstock.core.routes import Route
from penstock.core.schedule import Definition
from penstock.core.state import DeadLetter
from penstock.engines import requests
from penstock.engines.embedded.dead_letters import dead_letter_topic
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.engines.engine import Request
from penstock.engines.requests import DeadLetterDetail, Effect, GroupInfo, Outcome, TopicInfo
from penstock.model.errors import (
    AccessDenied,
    UnknownDeadLetter,
    UnknownGroup,
    UnknownRoute,
    UnknownSchedule,
)
from penstock.model.event import Identity
from penstock.model.parameter import checked
from penstock.model.role import ADMIN, OPERATOR, READER
from penstock.model.topic import ANY_WORDS, is_system, is_wildcard, tenant_of

_DEAD_LETTERS = dead_letter_topic("")

Answer = Callable[[Request], Awaitable[Any]]

_INCLUDED = {READER: {READER, OPERATOR, ADMIN}, OPERATOR: {OPERATOR, ADMIN}}

RIGHTS: dict[type[Request], str] = {
    **dict.fromkeys(
        (
            requests.ListTopics, requests.DescribeTopic, requests.FindOffset, requests.AdmitReplay, requests.ListGroups,
            requests.DescribeGroup, requests.ListDead, requests.InspectDead, requests.QueryAudit, requests.ListRoutes,
            requests.ResolveRoute, requests.ListSchedules, requests.ListSessions, requests.ListTenants,
        ),
        READER,
    ),
    **dict.fromkeys(
        (
            requests.CreateTopic, requests.ConfigureTopic, requests.DeleteTopic, requests.ResetGroup, requests.DeleteGroup,
            requests.ReplayDead, requests.Quarantine, requests.PurgeDead, requests.PutRoute, requests.RemoveRoute,
            requests.SwitchRoute, requests.PutSchedule, requests.RemoveSchedule,
        ),
        OPERATOR,
    ),
    **dict.fromkeys((requests.VerifyAudit, requests.ExportAudit, requests.Pressure, requests.Seal), ADMIN),
}  # fmt: skip
"""The least role that each request needs. Requests about the whole bus need `admin`."""


def require(identity: Identity, role: str) -> None:
    """Raise AccessDenied unless the identity has the role, or one that includes it."""
    if not _INCLUDED.get(role, {role, ADMIN}) & set(identity.roles):
        raise AccessDenied(
            f"this needs role {role!r}, and {identity.subject!r} of tenant {identity.tenant!r} has "
            f"{', '.join(identity.roles) or 'none'}; nothing was done. Ask for a token with that role",
            role=role,
            tenant=identity.tenant,
        )


class Authorizer:
    """Asks the engine on behalf of an identity; a broker passes its own `ask` as `answer`."""

    def __init__(self, engine: EmbeddedEngine, answer: Answer | None = None) -> None:
        self._engine = engine
        self._ask = answer or engine.ask
        self._scoped: dict[type[Request], Callable[[Tenancy, Any], Awaitable[Any]]] = {
            requests.ListTopics: self._list_topics,
            requests.DescribeTopic: self._read_topic,
            requests.FindOffset: self._read_topic,
            requests.ListGroups: self._list_groups,
            requests.DescribeGroup: self._describe_group,
            requests.ResetGroup: self._change_group,
            requests.DeleteGroup: self._change_group,
            requests.ListDead: self._list_dead,
            requests.InspectDead: self._inspect_dead,
            requests.ReplayDead: self._change_letters,
            requests.PurgeDead: self._change_letters,
            requests.Quarantine: self._quarantine,
            requests.QueryAudit: self._query_audit,
            requests.ListRoutes: self._list_routes,
            requests.PutRoute: self._put_route,
            requests.RemoveRoute: self._change_route,
            requests.SwitchRoute: self._change_route,
            requests.ResolveRoute: self._resolve_route,
            requests.ListSchedules: self._list_schedules,
            requests.PutSchedule: self._put_schedule,
            requests.RemoveSchedule: self._remove_schedule,
            requests.AdmitReplay: self._admit_replay,
            requests.ListSessions: self._list_own,
            requests.ListTenants: self._list_own,
            **dict.fromkeys(
                (requests.CreateTopic, requests.ConfigureTopic, requests.DeleteTopic),
                self._change_topic,
            ),
        }  # fmt: skip

    async def ask(self, identity: Identity, request: Request) -> Any:
        """The engine's answer, reduced to what this identity may see; raises AccessDenied."""
        request = checked(_signed(identity, request))
        if ADMIN in identity.roles:
            return await self._ask(request)
        if _is_clients_own(request):
            require(identity, READER)
            return await self._ask(request)
        role = RIGHTS.get(type(request), ADMIN)
        require(identity, role)
        actor = getattr(request, "actor", identity.subject)
        if role == OPERATOR and actor != identity.subject:
            raise AccessDenied(
                f"{identity.subject!r} cannot act in the name of {actor!r}; nothing was done. Leave "
                "the actor out: the audit trail names who showed the token",
                actor=actor,
            )
        return await self._scoped[type(request)](Tenancy(self._engine, identity.tenant), request)

    async def _list_own(self, own: Tenancy, request: Request) -> list[Any]:
        """Rows with a tenant of their own."""
        return [row for row in await self._ask(request) if row.tenant == own.tenant]

    # -- topics ----------------------------------------------------------------------------------

    async def _list_topics(self, own: Tenancy, request: requests.ListTopics) -> list[TopicInfo]:
        found: list[TopicInfo] = await self._ask(request)
        return [topic for topic in found if own.open_topic(topic.name)]

    async def _read_topic(self, own: Tenancy, request: Any) -> Any:
        _check_open(own, request.topic)
        return await self._ask(request)

    async def _change_topic(self, own: Tenancy, request: Any) -> Any:
        _check_topic(own, request.topic)
        answer = await self._ask(request)
        if isinstance(answer, Effect):
            mine = [group for group in answer.groups if await self._is_own(own, group.name)]
            answer = msgspec.structs.replace(answer, groups=mine)
        return answer

    async def _is_own(self, own: Tenancy, name: str) -> bool:
        with suppress(UnknownGroup):
            return own.group(await self._ask(requests.DescribeGroup(name)))
        return False

    async def _admit_replay(self, own: Tenancy, request: requests.AdmitReplay) -> None:
        _check_tenant(own, request.tenant)
        await self._ask(request)

    # -- groups ----------------------------------------------------------------------------------

    async def _list_groups(self, own: Tenancy, request: requests.ListGroups) -> list[GroupInfo]:
        found: list[GroupInfo] = await self._ask(request)
        return [group for group in found if own.group(group)]

    async def _describe_group(self, own: Tenancy, request: requests.DescribeGroup) -> GroupInfo:
        group: GroupInfo = await self._ask(request)
        if not own.group(group):
            raise UnknownGroup(
                f"no group {request.group!r}; `penstock group list` shows them", group=request.group
            )
        return group

    async def _change_group(self, own: Tenancy, request: Any) -> Any:
        await self._describe_group(own, requests.DescribeGroup(request.group))
        return await self._ask(request)

    # -- dead letters ----------------------------------------------------------------------------

    async def _list_dead(self, own: Tenancy, request: requests.ListDead) -> Any:
        _check_tenant(own, request.tenant)
        return await self._ask(msgspec.structs.replace(request, tenant=own.tenant))

    async def _inspect_dead(self, own: Tenancy, request: requests.InspectDead) -> DeadLetterDetail:
        if not own.letter_id(request.id):
            raise _no_letter(request.id)
        detail: DeadLetterDetail = await self._ask(request)
        return detail

    async def _change_letters(
        self, own: Tenancy, request: requests.ReplayDead | requests.PurgeDead
    ) -> Outcome:
        mine = [id for id in request.ids if own.letter_id(id)]
        outcome: Outcome = await self._ask(msgspec.structs.replace(request, ids=mine))
        for id in set(request.ids).difference(mine):
            outcome.failed(id, _no_letter(id))
        outcome.requested = len(request.ids)
        return outcome

    async def _quarantine(self, own: Tenancy, request: requests.Quarantine) -> Any:
        _check_topic(own, request.topic)
        # The caller chooses the id of a payload given by hand; it must not replace another tenant's.
        taken = self._engine.state.dead.get(f"{request.id}@{request.consumer}")
        if request.payload is not None and taken is not None and not own.letter(taken):
            raise AccessDenied(f"the id {request.id!r} is taken; choose another", id=request.id)
        return await self._ask(request)

    async def _query_audit(self, own: Tenancy, request: requests.QueryAudit) -> list[AuditRecord]:
        found: list[AuditRecord] = await self._ask(request)
        return [record for record in found if own.record(record)]

    # -- routes and schedules --------------------------------------------------------------------

    async def _list_routes(self, own: Tenancy, request: requests.ListRoutes) -> list[Route]:
        found: list[Route] = await self._ask(request)
        return [route for route in found if route.tenant == own.tenant]

    async def _change_route(self, own: Tenancy, request: Any) -> Any:
        route = self._engine.routes.get(request.pattern, request.destination)
        if route.tenant != own.tenant:
            raise UnknownRoute(
                f"no route from pattern {request.pattern!r} to {request.destination!r} of your own; "
                "nothing was changed. `penstock route list` shows them",
                pattern=request.pattern,
                destination=request.destination,
            )
        return await self._ask(request)

    async def _put_route(self, own: Tenancy, request: requests.PutRoute) -> Any:
        route = request.route
        _check_tenant(own, route.tenant or "")
        if await self._is_foreign(own, route):
            raise AccessDenied(
                f"{route.destination!r} is not yours to send events to from {route.pattern!r}; "
                "nothing was changed. Ask an admin",
                destination=route.destination,
            )
        return await self._ask(request)

    async def _is_foreign(self, own: Tenancy, route: Route) -> bool:
        """Whether a route would replace one of another tenant, or lead into another tenant's group."""
        with suppress(UnknownRoute):
            return self._engine.routes.get(route.pattern, route.destination).tenant != own.tenant
        if route.destination not in self._engine.state.groups:
            return False
        return not own.group(await self._ask(requests.DescribeGroup(route.destination)))

    async def _resolve_route(self, own: Tenancy, request: requests.ResolveRoute) -> Any:
        _check_open(own, request.topic)
        _check_tenant(own, request.tenant)
        return await self._ask(msgspec.structs.replace(request, tenant=own.tenant))

    async def _list_schedules(
        self, own: Tenancy, request: requests.ListSchedules
    ) -> list[Definition]:
        found: list[Definition] = await self._ask(request)
        return [definition for definition in found if own.schedule(definition)]

    async def _put_schedule(self, own: Tenancy, request: requests.PutSchedule) -> Any:
        _check_topic(own, request.topic)
        for taken in await self._ask(requests.ListSchedules()):
            if taken.id == request.id and not own.schedule(taken):
                raise AccessDenied(f"the id {request.id!r} is taken; choose another", id=request.id)
        return await self._ask(request)

    async def _remove_schedule(self, own: Tenancy, request: requests.RemoveSchedule) -> Any:
        mine = await self._list_schedules(own, requests.ListSchedules())
        if request.id not in {definition.id for definition in mine}:
            raise UnknownSchedule(
                f"no recurring schedule {request.id!r}; nothing was changed", id=request.id
            )
        return await self._ask(request)


class Tenancy:
    """What one tenant owns on an engine; False means "not yours", and not whether it exists."""

    def __init__(self, engine: EmbeddedEngine, tenant: str) -> None:
        self.tenant = tenant
        self._engine = engine

    def topic(self, name: str) -> bool:
        """A topic, by its name alone: it need not exist."""
        if is_system(name):
            return name == _DEAD_LETTERS + self.tenant
        return (tenant_of(name) or self._engine.settings.identity.tenant) == self.tenant

    def open_topic(self, name: str) -> bool:
        """A topic the tenant may look at: its own, or one whose name has no tenant."""
        return self.topic(name) or (not is_system(name) and tenant_of(name) is None)

    def pattern(self, pattern: str) -> bool:
        """A pattern that can never select a topic of another tenant."""
        if not is_wildcard(pattern):
            return self.topic(pattern)
        return ANY_WORDS not in pattern.split(".") and tenant_of(pattern) == self.tenant

    def group(self, group: GroupInfo) -> bool:
        """A group: by what it reads, or by its patterns while it reads nothing."""
        if group.lanes:
            return all(self.topic(lane.topic) for lane in group.lanes)
        return bool(group.patterns) and all(map(self.pattern, group.patterns))

    def letter(self, letter: DeadLetter) -> bool:
        """A dead letter: the tenant whose event it was."""
        return letter.tenant == self.tenant

    def letter_id(self, id: str) -> bool:
        """A dead letter by its id; False when it does not exist."""
        try:
            return self.letter(self._engine.dead_letter_store.find(id))
        except UnknownDeadLetter:
            return False

    def schedule(self, definition: Definition) -> bool:
        """A recurring event: by the topic it is published to."""
        return self.topic(definition.topic)

    def record(self, record: AuditRecord) -> bool:
        """An audit record about something of the tenant; records about routes are for admins."""
        match record.operation.partition(".")[0]:
            case "topic":
                return all(map(self.topic, record.targets))
            case "dlq":
                topic = record.prior.get("topic") or record.result.get("topic")
                return self.topic(str(topic)) or any(map(self.letter_id, record.targets))
            case "schedule":
                topics = [
                    each["topic"] for each in (record.prior, record.result) if "topic" in each
                ]
                return bool(topics) and all(self.topic(str(topic)) for topic in topics)
            case "group":
                places = [place.rpartition("/")[0] for place in record.prior if "/" in place]
                patterns = str(record.prior.get("patterns") or "").split()
                read = [*map(self.topic, places), *map(self.pattern, patterns)]
                return bool(read) and all(read)
        return False


def _signed(identity: Identity, request: Request) -> Request:
    """The request, with the caller as its actor where it names no actor."""
    if getattr(request, "actor", None) == "":
        return msgspec.structs.replace(request, actor=identity.subject)
    return request


def _is_clients_own(request: Request) -> bool:
    """Whether a client library asks for itself: its reply inbox, or a listener without a group name.

    These names are random, so only the client that made one knows it.
    """
    if isinstance(request, requests.CreateTopic):
        return request.spec.ephemeral and request.topic.startswith("_inbox.")
    return isinstance(request, requests.DeleteGroup) and request.group.startswith("_listener.")


def _check_open(own: Tenancy, topic: str) -> None:
    if not own.open_topic(topic):
        _check_topic(own, topic)


def _check_topic(own: Tenancy, topic: str) -> None:
    # The name itself contains the tenant, so the error does not tell whether the topic exists.
    if not own.topic(topic):
        raise AccessDenied(
            f"topic {topic!r} does not belong to tenant {own.tenant!r}; nothing was done. Its own "
            f"topics are called like orders.created.v1.{own.tenant}",
            topic=topic,
            tenant=own.tenant,
        )


def _check_tenant(own: Tenancy, tenant: str | None) -> None:
    if tenant is not None and tenant != own.tenant:
        asked = f"for tenant {tenant!r}" if tenant else "for all tenants"
        raise AccessDenied(
            f"the token is for tenant {own.tenant!r} and cannot speak {asked}; nothing was done",
            tenant=own.tenant,
        )


def _no_letter(id: str) -> UnknownDeadLetter:
    return UnknownDeadLetter(f"no dead letter {id!r}; `penstock dlq list` shows their ids", id=id)
