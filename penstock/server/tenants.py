"""Tenants as operators see them: the limits in force, and how much of them is used."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.admission import Admission
from penstock.engines.views import TenantInfo


def tenants_view(
    admission: Admission, refusals: Mapping[tuple[str, str, str], int]
) -> list[TenantInfo]:
    """Every tenant that has limits of its own, stored something, or was refused something.

    `refusals` are those of the metrics, by kind, limit and tenant, so that both say the same.

    >>> from penstock.core.quota import AdmissionLimits, TenantLimits
    >>> limits = AdmissionLimits(tenants={"acme": TenantLimits(max_ingress=10)})
    >>> [(each.tenant, each.limits.max_ingress) for each in tenants_view(Admission(limits), {})]
    [('acme', 10)]
    """
    refused: dict[str, dict[str, int]] = {}
    for (kind, limit, tenant), count in refusals.items():
        refused.setdefault(tenant, {})[f"{kind} {limit}"] = count
    use = admission.use()
    names = {*admission.limits.tenants, *use, *refused}
    return [
        TenantInfo(
            name,
            admission.limits.tenants.get(name, admission.limits.default),
            *use.get(name, (0, 0)),
            refused.get(name, {}),
        )
        for name in sorted(names)
    ]
