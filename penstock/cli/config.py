"""`penstock config`: check settings without starting anything, show which hold, print an example."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.invocation import INVALID, Invocation, Noun

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.model.settings_loader import Problem

TENANTS = "admission.tenants"


@click.group("config", cls=Noun)
def command() -> None:
    """Check, show and write settings."""


@command.command("check")
@click.argument("file", required=False)
@click.pass_obj
def check(invocation: Invocation, file: str | None) -> None:
    """List every problem of FILE, the environment and --set; ends with 2 when one is an error.

    Without FILE the one of --config or PENSTOCK_CONFIG is checked. Addresses, tokens, certificates
    and keys are looked at as a broker on this machine would.
    """
    from penstock.model.settings_loader import check as find_problems

    path = file or invocation.config
    problems = find_problems(path, os.environ, invocation.flags)
    if all(problem.severity != "error" for problem in problems):
        found = _broker_problems(path, invocation.flags)
        problems = sorted([*problems, *found], key=lambda problem: problem.severity)
    if invocation.json:
        for problem in problems:
            output.print_json(problem)
    for problem in () if invocation.json else problems:
        output.print_text(output.escaped(str(problem)))
    errors = sum(problem.severity == "error" for problem in problems)
    if errors:
        raise click.exceptions.Exit(INVALID)
    if not invocation.json:
        output.note(f"the settings are valid, {len(problems)} warnings")


def _broker_problems(path: str | None, flags: Mapping[str, Any]) -> Iterator[Problem]:
    """What each setting allows and a broker could not start with, and what it would warn of."""
    from penstock.cli.checks import Check
    from penstock.cli.up import settings_steps
    from penstock.model.errors import PenstockError
    from penstock.model.settings_loader import Problem, load

    sources, told = origins(path, os.environ, flags), set[str]()
    for name, step in settings_steps(load(path, os.environ, flags)):
        try:
            result = step()
            found = [result] if isinstance(result, Check) else list(result)
        except (PenstockError, OSError) as error:
            key = getattr(error, "key", "") or name
            message = error.message if isinstance(error, PenstockError) else str(error)
            if message not in told:  # an address that is none is met by two of them
                yield Problem("error", sources.get(key, "default"), key, message)
            told.add(message)
            continue
        for check in found:
            if check.status == "warn":
                yield Problem("warning", "settings", check.name, f"{check.found}; {check.advice}")


@command.command("show")
@click.option("--all/--changed", "everything", default=True, help="All settings (the default), or those that are not the default.")  # fmt: skip
@click.pass_obj
def show(invocation: Invocation, everything: bool) -> None:
    """Show the settings that hold, and where each comes from."""
    from penstock.model.parameter import show as shown
    from penstock.model.parameter import unit_of

    sources = origins(invocation.config, os.environ, invocation.flags)
    rows = []
    for key, value in _fields(invocation.settings()):
        source = sources.get(key, "default")
        if everything or source != "default":
            text = value if invocation.json else shown(value, unit_of(key.rpartition(".")[2]))
            rows.append({"key": key, "value": text, "source": source})
    output.show_rows(invocation, rows, ["key", "value", "source"])


def _fields(settings: Any) -> Iterator[tuple[str, Any]]:
    for group in settings.__struct_fields__:
        table = getattr(settings, group)
        for field in table.__struct_fields__:
            value = getattr(table, field)
            if f"{group}.{field}" != TENANTS:
                yield f"{group}.{field}", value
                continue
            for tenant, limits in value.items():
                for name in limits.__struct_fields__:
                    if getattr(limits, name) is not None:
                        yield f"{TENANTS}.{tenant}.{name}", getattr(limits, name)


def origins(path: str | None, env: Mapping[str, str], flags: Mapping[str, Any]) -> dict[str, str]:
    """The source of each setting that a file, the environment or a flag sets.

    >>> origins(None, {"PENSTOCK_DELIVERY_LEASE_S": "5s"}, {"durability.fsync": "never"})
    {'delivery.lease_s': 'environment PENSTOCK_DELIVERY_LEASE_S', 'durability.fsync': 'flag'}
    """
    from penstock.model.settings_loader import NOT_SETTINGS, PREFIX, read_file

    found: dict[str, str] = {}
    for group, table in read_file(path).items() if path else ():
        for field, value in table.items() if isinstance(table, dict) else ():
            found |= dict.fromkeys(_keys(f"{group}.{field}", value), f"file {path}")
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in NOT_SETTINGS:
            group, _, field = name.removeprefix(PREFIX).lower().partition("_")
            found |= dict.fromkeys(_keys(f"{group}.{field}", env[name]), f"environment {name}")
    for key, value in flags.items():
        found |= dict.fromkeys(_keys(key, value), "flag")
    return found


def _keys(key: str, value: Any) -> Iterator[str]:
    """The settings one written value fills: one, or all limits in a table of tenants."""
    import msgspec

    if key != TENANTS:
        yield key
        return
    tenants = msgspec.json.decode(value) if isinstance(value, str) else value
    for tenant, limits in tenants.items():
        yield from (f"{key}.{tenant}.{name}" for name in limits)


@command.command("example")
@click.pass_obj
def example(invocation: Invocation) -> None:
    """Print a settings file with every setting, its default and what it is for."""
    text = example_toml()
    if invocation.json:
        output.print_json({"toml": text})
    else:
        output.print_text(text.rstrip("\n"))


def example_toml() -> str:
    """A TOML file in which everything is commented out: the defaults, ready to be changed."""
    from penstock.model.parameter import unit_of
    from penstock.model.settings import Settings, field_types
    from penstock.model.settings_loader import allowed

    lines = ["# Settings of Penstock. Every line is the default; remove its # to change one."]
    for group, kind in field_types(Settings).items():
        lines += ["", f"[{group}]"]
        defaults = kind()
        for field, type_ in field_types(kind).items():
            if f"{group}.{field}" == TENANTS:
                lines += ["# Limits of one tenant: a table for each.", "#[admission.tenants.acme]", "#events_per_s = 1000"]  # fmt: skip
                continue
            purpose = next(meta.description for meta in type_.__metadata__ if getattr(meta, "description", None))  # fmt: skip
            lines.append(f"# {purpose} Allowed: {allowed(type_, unit_of(field))}.")
            lines.append(f"#{field} = {_toml(getattr(defaults, field), unit_of(field))}")
    return "\n".join(lines) + "\n"


def _toml(value: Any, unit: str) -> str:
    """A default the way one would write it in TOML: with a unit where that is easier to read."""
    import msgspec

    from penstock.model.parameter import show as shown

    if value is None:
        return '"none"'
    if isinstance(value, bool | str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item, unit) for item in value) + "]"
    text = shown(value, unit).replace(" min", "m").replace(" ", "")
    return f'"{text}"' if unit and not text.isdecimal() else text
