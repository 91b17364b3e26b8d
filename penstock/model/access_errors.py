"""Errors of identity and rights: part of the tree in penstock.model.errors."""

from __future__ import annotations

from penstock.model.error import PenstockError


class AccessDenied(PenstockError):
    """This identity may not do that."""

    code = "access.denied"


class NotAuthenticated(AccessDenied):
    """A token is missing, expired or not from here."""

    code = "access.unauthenticated"
