"""Standing orders: routes and schedules, which hold until an operator says otherwise (T2, T7, T9).

Every change leaves an audit record with what was in force before and after.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core.audit import State
from penstock.core.catalogue import Route
from penstock.core.entry import RecurringGone, RecurringPut
from penstock.core.schedule import Definition
from penstock.engines import request as ask
from penstock.engines.operator_rules import check_consumer, check_content, check_word
from penstock.engines.views import Effect
from penstock.model.errors import PenstockError, UnknownRoute, UnknownSchedule
from penstock.model.topic import check_topic

if TYPE_CHECKING:
    from penstock.engines.embedded import EmbeddedEngine

SHOWN_CHARACTERS = 1_000  # of one text in an audit record, which has a bound itself
SHOWN_TOPICS = 1_000  # that a route leads: a pattern can match every topic there is
LOCAL = "local"  # who acts where nobody has a name


class StandingOrders:
    """Answers requests about routes and schedules."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    # -- routes --------------------------------------------------------------------------------

    async def list_routes(self, request: ask.ListRoutes) -> Any:
        """The whole catalogue."""
        return list(self._engine.routes)

    async def put_route(self, request: ask.PutRoute) -> None:
        """Add or replace."""
        route = request.route
        if route.enabled:
            self._check_destination(route)
        before = self._route(route.pattern, route.destination)
        self._engine.routes.put(route)
        await self._routes_changed(
            request.actor, "route.put", route.pattern, route.destination, before
        )

    async def remove_route(self, request: ask.RemoveRoute) -> Effect:
        """Drop one."""
        ends = (request.pattern, request.destination)
        route = self._engine.routes.get(*ends)
        if not request.dry_run:
            check_word("REMOVE", request.confirm)
        led = [
            topic
            for topic in sorted(self._engine.groups.selected([request.pattern]))
            if route in self._engine.routes.resolve(topic, self._engine.topics.tenant_for(topic))
        ]
        target = " -> ".join(ends)
        effect = Effect("route.remove", target, not request.dry_run, topics=led[:SHOWN_TOPICS])
        if request.dry_run:
            return effect
        before = self._engine.routes.remove(*ends)
        await self._routes_changed(
            request.actor, "route.remove", request.pattern, request.destination, before
        )
        return effect

    async def switch_route(self, request: ask.SwitchRoute) -> None:
        """Enable or disable one."""
        routes, ends = self._engine.routes, (request.pattern, request.destination)
        before = routes.get(*ends)
        if request.enabled:
            self._check_destination(before)
        switch = routes.enable if request.enabled else routes.disable
        switch(*ends)
        word = "route.enable" if request.enabled else "route.disable"
        await self._routes_changed(request.actor, word, *ends, before)

    def _check_destination(self, route: Route) -> None:
        """A route leads to a group: one that is there, or one that can be made for it."""
        if route.group not in self._engine.state.groups:
            check_consumer(route.group)

    def _route(self, pattern: str, destination: str) -> Route | None:
        with suppress(UnknownRoute):
            return self._engine.routes.get(pattern, destination)
        return None

    async def _routes_changed(
        self, actor: str, operation: str, pattern: str, destination: str, before: Route | None
    ) -> None:
        engine, route = self._engine, self._route(pattern, destination)
        after = _route_state(route, gone="removed")
        after["version"] = engine.routes.version
        try:
            audit = engine.audit.entry(
                actor, operation, f"{pattern} -> {destination}", _route_state(before), after
            )
            await engine.save_routes()
            await engine.intake.submit(
                [], when_taken=lambda _: [*engine.groups.routes_changed(pattern, route), audit]
            )
        except PenstockError:
            await self._undo(pattern, destination, before)
            raise

    async def _undo(self, pattern: str, destination: str, before: Route | None) -> None:
        """A change that could not be kept is not in force either."""
        if before is not None:
            self._engine.routes.put(before)
        elif self._route(pattern, destination) is not None:
            self._engine.routes.remove(pattern, destination)
        with suppress(PenstockError):  # the file may still be as it was
            await self._engine.save_routes()

    async def resolve_route(self, request: ask.ResolveRoute) -> Any:
        """The routes an event of a topic takes."""
        check_topic(request.topic)
        tenant = request.tenant or self._engine.topics.tenant_for(request.topic)
        return self._engine.routes.resolve(request.topic, tenant)

    # -- schedules -----------------------------------------------------------------------------

    async def list_schedules(self, request: ask.ListSchedules) -> list[Definition]:
        """All recurring events."""
        return self._engine.state.schedule.recurring.definitions()

    async def put_schedule(self, request: ask.PutSchedule) -> Definition:
        """Define a recurring event, or replace the one of its id."""
        engine, recurring = self._engine, self._engine.state.schedule.recurring
        check_topic(request.topic)
        check_content(request.payload, request.headers, engine.settings.limits)
        wanted = Definition(
            id=request.id, topic=request.topic, payload=request.payload, codec=request.codec,
            headers=request.headers, cron=request.cron, every_us=request.every_us,
        )  # fmt: skip
        before: Definition | None = None
        with suppress(UnknownSchedule):
            before = recurring.get(request.id)
        definition = recurring.put(wanted, engine.runtime.wall_us())
        try:
            audit = engine.audit.entry(
                request.actor or LOCAL, "schedule.put", request.id, _schedule_state(before),
                _schedule_state(definition),
            )  # fmt: skip
            put = RecurringPut(request.id, msgspec.msgpack.encode(definition))
            await engine.intake.write_entries([put, audit])
        except PenstockError:
            recurring.undo(definition, before)
            raise
        engine.timekeeper.wake()
        return definition

    async def remove_schedule(self, request: ask.RemoveSchedule) -> Effect:
        """Drop a recurring event."""
        engine = self._engine
        before = engine.state.schedule.recurring.get(request.id)
        done, topics = not request.dry_run, [before.topic]
        effect = Effect("schedule.remove", request.id, done, topics=topics)
        if request.dry_run:
            return effect
        check_word("REMOVE", request.confirm)
        audit = engine.audit.entry(
            request.actor or LOCAL, "schedule.remove", request.id, _schedule_state(before),
            _schedule_state(None, gone="removed"),
        )  # fmt: skip
        await engine.intake.write_entries([RecurringGone(request.id), audit])
        return effect


def _route_state(route: Route | None, gone: str | None = None) -> State:
    if route is None:
        return {"status": gone}
    return {
        "type": route.type,
        "priority": route.priority,
        "enabled": str(route.enabled),
        "tenant": route.tenant,
    }


def _schedule_state(definition: Definition | None, gone: str | None = None) -> State:
    if definition is None:
        return {"status": gone}
    return {
        "topic": definition.topic,
        "cron": None if definition.cron is None else definition.cron[:SHOWN_CHARACTERS],
        "every_us": definition.every_us,
        "codec": definition.codec,
        "headers": msgspec.json.encode(definition.headers).decode()[:SHOWN_CHARACTERS],
        "payload_bytes": len(definition.payload),
        "payload_sha256": hashlib.sha256(definition.payload).hexdigest(),
    }
