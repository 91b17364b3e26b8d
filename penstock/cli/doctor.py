"""`penstock doctor`: is this machine and this folder in order?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli import exits, output
from penstock.cli.invocation import Invocation, folder_of, leaf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cli.checkup import Check


@leaf("doctor")
@click.option("--deep", is_flag=True, help="Read and hash every sealed file.")
@click.pass_obj
def command(invocation: Invocation, deep: bool) -> None:
    """Check the machine, the settings and the data folder; ends with 1 when something fails.

    Reads only, apart from an unnamed file that measures the disk, and works beside a running writer.
    """
    checks = list(_examine(invocation, deep))
    rows = [output.plain(check) for check in checks]
    output.show_rows(invocation, rows, ["name", "status", "found", "advice"])
    failed = sum(check.status == "fail" for check in checks)
    if not invocation.json:
        warned = sum(check.status == "warn" for check in checks)
        output.print_text(f"{len(checks)} checks: {failed} failed, {warned} warnings")
    if failed:
        raise click.exceptions.Exit(exits.FAILED)


def _examine(invocation: Invocation, deep: bool) -> Iterator[Check]:
    from penstock.cli import checkup
    from penstock.cli.checkup import Check, guarded
    from penstock.model.errors import InvalidSettings
    from penstock.model.settings import Settings

    yield checkup.check_python()
    yield checkup.check_packages()
    yield from checkup.check_extras()
    yield from checkup.check_config(invocation)
    folder = folder_of(invocation.url)
    if folder is None:
        yield Check("folder", "ok", f"{invocation.url} keeps nothing on disk here")
        return
    if not folder.is_dir():
        yield Check("folder", "warn", f"{folder} does not exist", "the first publish makes it; name another one with --url")  # fmt: skip
        return
    yield Check("folder", "ok", str(folder.resolve()))
    try:
        settings = invocation.settings()
    except InvalidSettings:
        settings = Settings()  # reported above; the rest is examined all the same
    yield from guarded("disk", lambda: checkup.check_sync(folder))
    yield from guarded("space", lambda: checkup.check_space(folder, settings))
    formats = list(guarded("format", lambda: checkup.check_format(folder)))
    yield from formats
    if formats[0].status == "fail":
        return
    yield from guarded("lock", lambda: checkup.check_lock(folder))
    yield from guarded("log", lambda: checkup.check_log(folder, settings))
    yield from guarded("segments", lambda: checkup.check_segments(folder, deep=deep))
    yield from guarded("audit", lambda: checkup.check_audit(folder))
