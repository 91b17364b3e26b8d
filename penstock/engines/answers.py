"""Answers: what each administrative request is answered with, so that a wire can carry both."""

from __future__ import annotations

from typing import Any

from penstock.core.audit import AuditRecord
from penstock.core.auditproof import Verdict
from penstock.core.catalogue import Route
from penstock.core.schedule import Definition
from penstock.core.state import DeadLetter
from penstock.engines import request as ask
from penstock.engines.engine import Request
from penstock.engines.views import (
    DeadLetterDetail,
    Effect,
    GroupInfo,
    Outcome,
    SealInfo,
    SessionInfo,
    TenantInfo,
    TopicInfo,
)
from penstock.log.auditseal import AuditManifest

ANSWERS: dict[type[Request], Any] = {
    ask.ListTopics: list[TopicInfo],
    ask.DescribeTopic: TopicInfo,
    ask.CreateTopic: TopicInfo,
    ask.ConfigureTopic: TopicInfo,
    ask.DeleteTopic: Effect,
    ask.Seal: SealInfo,
    ask.FindOffset: int,
    ask.AdmitReplay: None,
    ask.ListGroups: list[GroupInfo],
    ask.DescribeGroup: GroupInfo,
    ask.ResetGroup: GroupInfo,
    ask.DeleteGroup: Effect,
    ask.ListDead: list[DeadLetter],
    ask.InspectDead: DeadLetterDetail,
    ask.ReplayDead: Outcome,
    ask.Quarantine: DeadLetter,
    ask.PurgeDead: Outcome,
    ask.QueryAudit: list[AuditRecord],
    ask.VerifyAudit: Verdict,
    ask.ExportAudit: AuditManifest,
    ask.ListRoutes: list[Route],
    ask.PutRoute: None,
    ask.RemoveRoute: Effect,
    ask.SwitchRoute: None,
    ask.ResolveRoute: list[Route],
    ask.ListSchedules: list[Definition],
    ask.PutSchedule: Definition,
    ask.RemoveSchedule: Effect,
    ask.ListSessions: list[SessionInfo],
    ask.ListTenants: list[TenantInfo],
    ask.Pressure: dict[str, Any],
}

REQUESTS: dict[str, type[Request]] = {kind.__name__: kind for kind in ANSWERS}

# Asked twice, these change nothing more: safe to ask again when the first answer was lost.
READ_ONLY = frozenset(
    {
        ask.ListTopics, ask.DescribeTopic, ask.FindOffset, ask.ListGroups, ask.DescribeGroup,
        ask.ListDead, ask.InspectDead, ask.QueryAudit, ask.VerifyAudit, ask.ListRoutes,
        ask.ResolveRoute, ask.ListSchedules, ask.ListSessions, ask.ListTenants, ask.Pressure,
    }
)  # fmt: skip
