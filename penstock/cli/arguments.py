"""Types of options: times, positions, durations and sizes; and the options that name a warehouse.

The types take the same texts as the API: penstock.model.parameter reads them.
"""

from __future__ import annotations

import time
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.model.errors import InvalidSettings

if TYPE_CHECKING:
    from penstock.pipelines.lakehouse.warehouse import Warehouse

    _Click = click.ParamType[Any]
else:
    _Click = click.ParamType  # older versions of click have no type argument

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _Parameter(_Click):
    """The base of these types: a converter of penstock.model.parameter as a type of click."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Convert a text; any other value is a default, and stays the same."""
        from penstock.model.errors import InvalidInput

        if not isinstance(value, str):
            return value
        name = "it" if param is None else param.human_readable_name
        try:
            return self.read(name, value)
        except InvalidInput as error:
            raise click.BadParameter(error.message, ctx=ctx, param=param) from None

    def read(self, name: str, text: str) -> Any:
        """The value of a text; raises InvalidInput."""
        raise NotImplementedError


def parse_moment(text: str, name: str = "it") -> datetime:
    """A time: ISO 8601 (in UTC without a zone), "@" and seconds since 1970, or how long ago (2h).

    >>> parse_moment("2026-01-01T00:00:00Z")
    datetime.datetime(2026, 1, 1, 0, 0, tzinfo=datetime.timezone.utc)
    """
    from penstock.model.parameter import moment_us

    return _EPOCH + timedelta(microseconds=moment_us(name, text, time.time_ns() // 1_000))


class Moment(_Parameter):
    """A point in the past: a time, or how long ago."""

    name = "TIME"

    def read(self, name: str, text: str) -> Any:
        """Text to datetime."""
        return parse_moment(text, name)


class Future(_Parameter):
    """A point in the future: ISO 8601, or "@" and seconds since 1970."""

    name = "TIME"

    def read(self, name: str, text: str) -> Any:
        """Text to datetime."""
        from penstock.model.parameter import moment_us

        return _EPOCH + timedelta(microseconds=moment_us(name, text))


class Position(_Parameter):
    """A place in a log: earliest, latest, an offset (offset:42), a time, or how long ago."""

    name = "POSITION"

    def read(self, name: str, text: str) -> Any:
        """Check the text and return it: the API takes the same text."""
        from penstock.model.parameter import place

        place(name, text, time.time_ns() // 1_000)
        return text


class Duration(_Parameter):
    """A length of time in seconds: 250ms, 90s, 5m, 1h30m, 2d, or a plain number."""

    name = "DURATION"

    def __init__(self, least: float = 0.0) -> None:
        self._least = least

    def read(self, name: str, text: str) -> Any:
        """Text to seconds."""
        from penstock.model.parameter import seconds

        return seconds(name, text, least=self._least)


class Size(_Parameter):
    """An amount of bytes: 64MiB, 1GB, or a plain number."""

    name = "SIZE"

    def read(self, name: str, text: str) -> Any:
        """Text to bytes."""
        from penstock.model.parameter import size_bytes

        return size_bytes(name, text)


MOMENT, FUTURE, POSITION, DURATION, SIZE = Moment(), Future(), Position(), Duration(), Size()


# -- the warehouse of tables ----------------------------------------------------------------------


def warehouse_options(function: Any) -> Any:
    """`--warehouse`, `--format` and `--properties`."""
    file = click.Path(exists=True, dir_okay=False)
    function = click.option("--properties", "properties_file", type=file, help="TOML file with what the warehouse needs: its catalogue, its credentials.")(function)  # fmt: skip
    function = click.option("--format", "table_format", type=click.Choice(["iceberg", "delta", "parquet"]), default="iceberg", show_default=True, help="Format of tables.")(function)  # fmt: skip
    return click.option("--warehouse", help="Folder or URI of tables.")(function)


def open_warehouse(said: dict[str, Any], *, create: bool = True) -> Warehouse:
    """The warehouse that these options name; raises a usage error when they name none.

    `create` is off for commands that only read: they make neither a folder nor a catalogue.
    """
    from penstock.pipelines.lakehouse.warehouse import Warehouse

    if said["warehouse"] is None:
        raise click.UsageError("where are the tables? Give --warehouse, a folder or a URI")
    properties = _flat(read_toml(said["properties_file"]))
    return Warehouse(
        said["warehouse"], format=said["table_format"], properties=properties, create=create
    )


def read_toml(path: str | None) -> dict[str, Any]:
    """The content of a TOML file; nothing without a path."""
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"{path} is no TOML: {error}") from None


def _flat(found: dict[str, Any], above: str = "") -> dict[str, str]:
    """Properties with dotted names, which TOML reads as tables.

    >>> _flat({"type": "rest", "s3": {"endpoint": "http://localhost"}})
    {'type': 'rest', 's3.endpoint': 'http://localhost'}
    """
    flat: dict[str, str] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = str(value).lower() if isinstance(value, bool) else str(value)
    return flat
