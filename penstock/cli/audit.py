"""`penstock audit`: operator actions, whether their record is whole, and exports of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.arguments import MOMENT
from penstock.cli.invocation import FAILED, Invocation, Noun, change, is_broker, look

if TYPE_CHECKING:
    import penstock

COLUMNS = ["sequence", "at_us", "actor", "operation", "targets", "result", "reason"]


@click.group("audit", cls=Noun)
def command() -> None:
    """Query, verify and export the audit trail."""


@command.command("query")
@click.option("--message", metavar="ID", help="Records about this message or name.")
@click.option("--actor", help="Records of this actor.")
@click.option("--since", type=MOMENT, help="From this time on, or 2h ago.")
@click.option("--until", type=MOMENT, help="Up to this time, which is not included.")
@click.option("--operation", help="Records of this operation.")
@click.option("--id", "id_", hidden=True)
@click.option("--start", type=MOMENT, hidden=True)
@click.option("--end", type=MOMENT, hidden=True)
@click.pass_obj
def query(invocation: Invocation, /, id_: str | None, start: Any, end: Any, **selection: Any) -> None:  # fmt: skip
    """Show the records that match all that is given."""
    former = {"message": id_, "since": start, "until": end}  # what the options were called before
    selection |= {name: value for name, value in former.items() if value is not None}

    async def work(bus: penstock.Bus) -> list[Any]:
        return list(await bus.audit.query(**selection))

    rows = [output.plain(record) for record in look(invocation, work)]
    if not invocation.json:
        rows = [row | {"result": _outcome(row["result"])} for row in rows]
    output.show_rows(invocation, rows, COLUMNS)


def _outcome(result: dict[str, Any]) -> str:
    """How it ended, in a word or two: a refused attempt must not look like a success."""
    words = (result.get("status") or "done", result.get("code"))
    return " ".join(str(word) for word in words if word)


@command.command("verify")
@click.pass_obj
def verify(invocation: Invocation) -> None:
    """Check the whole chain; ends with 1 and names the first broken link when it is broken."""

    async def work(bus: penstock.Bus) -> Any:
        return await bus.audit.verify()

    verdict = look(invocation, work)
    if invocation.json:
        output.print_json(verdict)
    elif verdict.ok:
        last = verdict.last
        output.print_text(f"the chain is whole: {verdict.records} records, {verdict.checkpoints} signed checkpoints, up to record {last.sequence} {last.hash}")  # fmt: skip
    else:
        broken = verdict.broken
        place = f" in {broken.file}" if broken.file else ""
        place += f" line {broken.line}" if broken.line else ""
        output.print_text(f"broken at record {broken.sequence}{place}: {broken.kind}: {output.escaped(broken.explanation)}")  # fmt: skip
    if not verdict.ok:
        raise click.exceptions.Exit(FAILED)


@command.command("export")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@click.pass_obj
def export(invocation: Invocation, folder: str) -> None:
    """Copy the finished audit files and a signed list of them to DIR; a broker's are on its own disk.

    Nothing in DIR is ever rewritten, so it may be write-once storage; export there again later. A
    broker writes to the disk of its own host, so there DIR is an absolute path of that host.
    """

    async def work(bus: penstock.Bus) -> Any:
        return await bus.audit.export(folder)

    manifest = change(invocation, work)
    where = {"host": "the broker's"} if is_broker(invocation.url) else {}
    record = {"folder": folder, **where, "records": manifest.sequence, "hash": manifest.hash, "files": [file.path for file in manifest.files], "public_key": manifest.public_key}  # fmt: skip
    output.show_record(invocation, record)
