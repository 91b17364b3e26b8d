"""Roles: what an identity may do. A role of a tenant never reaches beyond the tenant."""

from __future__ import annotations

ADMIN = "admin"
"""Everything, for all tenants."""
OPERATOR = "operator"
"""Changes topics, groups, routes and dead letters of its tenant."""
READER = "reader"
"""Looks at them, and publishes and consumes."""
MONITOR = "monitor"
"""Reads metrics and pressure, which show all tenants."""
ROLES = (ADMIN, OPERATOR, READER, MONITOR)
