"""`penstock demo`: a bus with sample producers and consumers, and what happens on it, live."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli import exits, output
from penstock.cli.invocation import DEFAULT_URL, Invocation, folder_of, leaf
from penstock.cli.when import Duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from penstock.cli.sample import Shop
    from penstock.model.settings import Settings

FOLDER = "./demo-data"
LOOK_S = 0.5  # between two looks at the numbers on a terminal
LINE_S = 2.0  # between two lines in a pipe
DRAIN_S = 30.0  # longest wait for retries after the producers stopped; the ladder takes under 1 s
# Small and short-lived journal files, so that a demo of seconds shows sealing too.
JOURNAL_FILE_BYTES = 4 * 1024 * 1024
JOURNAL_ROLL_S = 4.0
GRACE_S = 4.0


@leaf("demo")
@click.option(
    "--seconds",
    type=Duration(least=0.1),
    default="20s",
    show_default=True,
    help="How long the producers publish.",
)
@click.option(
    "--rate",
    type=click.FloatRange(1, 1_000_000),
    default=3_000.0,
    show_default=True,
    help="Events a second, all tenants together.",
)
@click.pass_obj
def command(invocation: Invocation, seconds: float, rate: float) -> None:
    """Run a bus with producers of three tenants, handlers that sometimes fail, and a log consumer.

    Lives in ./demo-data unless --url says otherwise. Ends by itself, or with Ctrl-C, and checks
    that every event published was handled or is a dead letter; ends with 1 when one is not.
    """  # fmt: skip
    result = asyncio.run(_run(invocation, seconds, rate))
    if invocation.json:
        output.print_json(result)
    else:
        _print_summary(result)
    if not result["balanced"]:
        raise click.exceptions.Exit(exits.FAILED)


async def _run(invocation: Invocation, seconds: float, rate: float) -> dict[str, Any]:
    import penstock
    from penstock.cli.sample import Shop

    url = FOLDER if invocation.url == DEFAULT_URL else invocation.url
    folder = folder_of(url)
    if folder is not None:
        folder.parent.mkdir(parents=True, exist_ok=True)
    async with penstock.connect(url, settings=_demo_settings(invocation.settings())) as bus:
        shop = Shop(bus, rate)
        await shop.open()
        began = time.monotonic()
        with _stopped_by_signal(shop):
            watching = asyncio.create_task(_watch(shop, folder, quiet=invocation.json))
            timer = asyncio.get_running_loop().call_later(seconds, shop.stopping.set)
            try:
                await shop.produce()
                took_s = time.monotonic() - began
                balanced = await shop.drain(DRAIN_S)
            finally:
                timer.cancel()
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
                await shop.close()
        return {"url": url, "seconds": round(took_s, 1), "balanced": balanced, **_totals(shop)}


def _demo_settings(settings: Settings) -> Settings:
    replace = msgspec.structs.replace
    return replace(
        settings,
        journal=replace(
            settings.journal, file_bytes=JOURNAL_FILE_BYTES, roll_after_s=JOURNAL_ROLL_S
        ),
        sealing=replace(settings.sealing, grace_s=GRACE_S),
    )


@contextlib.contextmanager
def _stopped_by_signal(shop: Shop) -> Iterator[None]:
    """The first Ctrl-C stops the producers and lets the rest finish; the second one ends it all."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        shop.stopping.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _totals(shop: Shop) -> dict[str, Any]:
    rows = [
        {
            "tenant": tenant,
            "published": books.published,
            "handled": books.done,
            "retried": books.retried,
            "dead": shop.dead[tenant],
            "read": books.read,
            "revenue": round(books.revenue, 2),
        }
        for tenant, books in shop.books.items()
    ]
    names = ("published", "handled", "retried", "dead", "read")
    return {**{name: sum(row[name] for row in rows) for name in names}, "tenants": rows}


# -- showing it ------------------------------------------------------------------------------------


async def _watch(shop: Shop, folder: Path | None, *, quiet: bool) -> None:
    """Show the numbers until cancelled: a table on a terminal, a line now and then in a pipe."""
    if quiet:
        return
    meter = _Meter(shop, folder)
    if not sys.stdout.isatty():
        await _repeat(meter, LINE_S, lambda: output.print_text(meter.line()))
        return
    from rich.live import Live

    with Live(meter.table(), refresh_per_second=4, transient=True) as live:
        await _repeat(meter, LOOK_S, lambda: live.update(meter.table()))


async def _repeat(meter: _Meter, every_s: float, show: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(every_s)
        await meter.look()
        show()
        sys.stdout.flush()


class _Meter:
    """The numbers between two looks."""

    def __init__(self, shop: Shop, folder: Path | None) -> None:
        self._shop = shop
        self._folder = folder
        self._at = self._began = time.monotonic()
        self._before: dict[str, int] = {}
        self._rates: dict[str, float] = {}
        self._disk = "in memory"

    async def look(self) -> None:
        """Take the numbers anew."""
        await self._shop.count_dead()
        now = time.monotonic()
        for tenant, books in self._shop.books.items():
            new = books.published - self._before.get(tenant, 0)
            self._rates[tenant] = new / (now - self._at)
            self._before[tenant] = books.published
        self._at = now
        if self._folder is not None:
            self._disk = await asyncio.to_thread(_disk_use, self._folder)

    def line(self) -> str:
        """One line for a pipe."""
        totals = _totals(self._shop)
        lag = totals["published"] - totals["handled"] - totals["dead"]
        return (
            f"{self._at - self._began:5.1f} s  {sum(self._rates.values()):8,.0f}/s  "
            f"published {totals['published']:,}  handled {totals['handled']:,}  lag {lag:,}  "
            f"retried {totals['retried']:,}  dead {totals['dead']:,}  {self._disk}"
        )

    def table(self) -> Table:
        """A table for a terminal."""
        from rich.table import Table

        headings = ("tenant", "per s", "published", "handled", "lag", "retried", "dead", "read in order", "revenue")  # fmt: skip
        table = Table(title=f"Penstock: {self._at - self._began:.0f} s, Ctrl-C ends it")
        table.caption = self._disk
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "tenant" else "right")
        for row in _totals(self._shop)["tenants"]:
            lag = row["published"] - row["handled"] - row["dead"]
            table.add_row(
                row["tenant"], f"{self._rates.get(row['tenant'], 0.0):,.0f}",
                f"{row['published']:,}", f"{row['handled']:,}", f"{lag:,}", f"{row['retried']:,}",
                f"{row['dead']:,}", f"{row['read']:,}", f"{row['revenue']:,.2f}",
            )  # fmt: skip
        return table


def _disk_use(folder: Path) -> str:
    parts = []
    for name in ("journal", "segments"):
        sizes = []
        for path in (folder / name).glob("*"):
            with contextlib.suppress(FileNotFoundError):  # sealed and removed meanwhile
                sizes.append(path.stat().st_blocks * 512)
        parts.append(f"{name} {sum(sizes) / 1e6:.1f} MB in {len(sizes)} files")
    return ", ".join(parts)


def _print_summary(result: dict[str, Any]) -> None:
    rows = [{**row, "revenue": f"{row['revenue']:,.2f}"} for row in result["tenants"]]
    output.show_rows(Invocation(), rows, list(rows[0]))
    output.print_text(
        f"{result['seconds']} s: published {result['published']:,} = handled {result['handled']:,} "
        f"+ dead {result['dead']:,}; read in order {result['read']:,}"
        if result["balanced"]
        else f"NOT balanced: published {result['published']:,}, handled {result['handled']:,}, "
        f"dead {result['dead']:,}, read in order {result['read']:,}"
    )
    if result["url"] != "mem:":
        output.print_text(
            f"It is all in {result['url']}: try `penstock --url {result['url']} dlq list`, or "
            f"`penstock --url {result['url']} replay 'orders.#' --limit 3`"
        )
