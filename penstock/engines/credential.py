"""The token that a client shows to a broker, read again for each connection.

A short-lived token comes from a file that is renewed, or from a function of the application. It is read
whenever a connection is made, so a worker goes on after its first token has expired.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.model.errors import InvalidSettings
from penstock.model.parameter import refused, text
from penstock.model.settings import Client

MAX_TOKEN_CHARACTERS = 8_192  # a broker reads no more

Token = str | Callable[[], str | Awaitable[str]]
"""A token, or a function that returns the newest one; `connect(token=...)` takes either."""


class Credential:
    """The source of a client's token.

    >>> Credential(Client(token="secret"), None).renews
    False
    """

    def __init__(self, client: Client, token: Token | None) -> None:
        if client.token and client.token_file:
            raise InvalidSettings(
                "give client.token or client.token_file, not both", key="client.token_file"
            )
        if token is not None and not callable(token):
            if not isinstance(token, str):
                raise refused("token", "text, or a function that gives it", token)
            token = text("token", token, least=1, most=MAX_TOKEN_CHARACTERS)
        self._file = "" if token is not None else client.token_file
        self._token: Token = client.token if token is None else token

    @property
    def given(self) -> bool:
        """Whether a token was given."""
        return bool(self._file or self._token)

    @property
    def renews(self) -> bool:
        """Whether the next connection may get another token."""
        return bool(self._file) or callable(self._token)

    async def current(self) -> str:
        """The token to show now; raises InvalidSettings when file or function gives none."""
        try:
            if self._file:
                return (await asyncio.to_thread(Path(self._file).read_text)).strip()
            if not callable(self._token):
                return self._token
            found = self._token()
            given = await found if inspect.isawaitable(found) else found
            return text("token", given, least=1, most=MAX_TOKEN_CHARACTERS)
        except Exception as error:
            where = f"client.token_file {self._file!r}" if self._file else "connect(token=...)"
            raise InvalidSettings(
                f"{where} gives no token: {error!r}. Check the file, or the function",
                key="client.token_file",
            ) from error
