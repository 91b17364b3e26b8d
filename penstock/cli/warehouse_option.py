"""The options that name a warehouse, the same wherever a command writes or reads tables."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.model.errors import InvalidSettings

if TYPE_CHECKING:
    from penstock.pipelines.lakehouse.warehouse import Warehouse


def warehouse_options(function: Any) -> Any:
    """`--warehouse`, `--format` and `--properties`."""
    file = click.Path(exists=True, dir_okay=False)
    function = click.option("--properties", "properties_file", type=file, help="TOML file with what the warehouse needs: its catalogue, its credentials.")(function)  # fmt: skip
    function = click.option("--format", "table_format", type=click.Choice(["iceberg", "delta", "parquet"]), default="iceberg", show_default=True, help="Format of tables.")(function)  # fmt: skip
    return click.option("--warehouse", help="Folder or URI of tables.")(function)


def open_warehouse(said: dict[str, Any], *, create: bool = True) -> Warehouse:
    """The warehouse that these options name; a command that needs one says so.

    `create` is off for commands that only look: they make neither a folder nor a catalogue.
    """
    from penstock.pipelines.lakehouse.warehouse import Warehouse

    if said["warehouse"] is None:
        raise click.UsageError("where are the tables? Give --warehouse, a folder or a URI")
    properties = _flat(read_toml(said["properties_file"]))
    return Warehouse(
        said["warehouse"], format=said["table_format"], properties=properties, create=create
    )


def read_toml(path: str | None) -> dict[str, Any]:
    """A file's content; nothing where there is none."""
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"{path} is no TOML: {error}") from None


def _flat(found: dict[str, Any], above: str = "") -> dict[str, str]:
    """Properties have dots in their names, and TOML reads those as tables.

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
