"""`penstock showcase`: broker, producers of several tenants and the risk-tag pipeline, live.

`make run` runs it: the whole product on one machine, with a balance of all events at the end. The first
results are printed as soon as they are on the bus.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click
import msgspec

from penstock.cli import output
from penstock.cli.arguments import DURATION
from penstock.cli.invocation import DEFAULT_URL, FAILED, Invocation, asked_to_stop, folder_of, leaf
from penstock.model.errors import InvalidInput, PenstockError

if TYPE_CHECKING:
    from penstock.model.event import Event
    from penstock.pipelines.builtin.evidence import Counts
    from penstock.pipelines.builtin.risk_tags import Balance
    from penstock.testing.broker_process import BrokerProcess

FOLDER = "./showcase-data"
PIPELINE = "risk-tags"
SHOWN = 3  # results with a tag: enough to show what a result is, few enough for a terminal
LOOK_S = 0.2  # between two checks whether the showcase is over


@leaf("showcase")
@click.option("--for", "for_s", type=DURATION, help="Stop by itself after this long. Default: at Ctrl-C.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(1, 100_000), default=500.0, show_default=True, help="Evidence events a second, all tenants together.")  # fmt: skip
@click.option("--master", help="Spark master. Default: local[*].")
@click.pass_obj
def command(invocation: Invocation, for_s: float | None, rate: float, master: str | None) -> None:
    """Run the whole product: a broker, sample producers, and a Spark pipeline with its table.

    Evidence of three tenants goes to a broker, with duplicates, late events and bad rows among it;
    the pipeline risk-tags turns it into tags on the bus and in an Iceberg table. The first tags are
    shown as soon as they are on the bus. Lives in
    ./showcase-data unless --url names another folder. Ends with 1 unless, for each tenant, every
    event ended as a result, a duplicate, a late or a bad row.
    """  # fmt: skip
    from penstock.pipelines.session import check_requirements

    began = time.monotonic()
    check_requirements()
    folder = folder_of(FOLDER if invocation.url == DEFAULT_URL else invocation.url)
    if folder is None:
        raise InvalidInput("the showcase starts a broker of its own: --url names a folder here")
    with asked_to_stop(for_s) as stopping:
        books, table_rows = _run(invocation, folder, rate, master, stopping, began)
    _report(invocation, folder, books, table_rows)
    out = sum(each.out for each in books.values())
    if not all(each.balanced for each in books.values()) or table_rows != out:
        raise click.exceptions.Exit(FAILED)


def _run(
    invocation: Invocation,
    folder: Path,
    rate: float,
    master: str | None,
    stopping: threading.Event,
    began: float,
) -> tuple[dict[str, Balance], int]:
    from penstock.testing.broker_process import BrokerProcess

    folder.mkdir(parents=True, exist_ok=True)
    with BrokerProcess(folder / "bus") as broker:
        output.note(f"broker    {broker.url()}  admin http://127.0.0.1:{broker.ports['http']}")
        producing = _Producing(broker, rate, stopping)
        producing.start()
        output.note("spark     starting (some seconds)")
        try:
            with FirstResults(broker.url(), began):
                table_rows = _pipeline(invocation, folder, broker, master, producing)
        finally:
            stopping.set()
            producing.join()
        if producing.error is not None:
            raise producing.error
        return asyncio.run(_books(broker.url(), list(producing.published))), table_rows


class _Producing(threading.Thread):
    """The sample producers, in a thread with a loop of its own beside Spark."""

    def __init__(self, broker: BrokerProcess, rate: float, stopping: threading.Event) -> None:
        super().__init__(name="producers", daemon=True)
        from penstock.pipelines.builtin.evidence import TENANTS, Counts

        self.published: dict[str, Counts] = {tenant: Counts() for tenant in TENANTS}
        self.error: PenstockError | None = None
        self._url, self._rate, self._stopping = broker.url(), rate, stopping

    def run(self) -> None:
        try:
            asyncio.run(self._produce())
        except PenstockError as error:
            self.error = error
            self._stopping.set()

    async def _produce(self) -> None:
        import penstock
        from penstock.pipelines.builtin.evidence import Producer, Sample

        async with penstock.connect(self._url) as bus:
            # A name for this run in every evidence id: the folder may hold those of an earlier run.
            producer = Producer(bus, Sample(run=f"{bus.wall_us():x}"), self._rate)
            self.published = producer.published
            ended = asyncio.Event()
            producing = asyncio.create_task(producer.run(ended))
            await asyncio.to_thread(self._stopping.wait)
            ended.set()
            await producing


def _pipeline(
    invocation: Invocation,
    folder: Path,
    broker: BrokerProcess,
    master: str | None,
    producing: _Producing,
) -> int:
    """Run the pipeline until all produced events are processed; returns the rows of its table."""
    from pyspark.errors import PySparkException

    from penstock.pipelines.failure import explain_failure
    from penstock.pipelines.lakehouse.warehouse import Warehouse
    from penstock.pipelines.pipeline import find
    from penstock.pipelines.progress import watch
    from penstock.pipelines.run import Route, start
    from penstock.pipelines.session import spark_session

    spark = spark_session(master=master, verbose=invocation.verbose)
    made = find(PIPELINE)
    assert made.table is not None
    with Warehouse(folder / "warehouse") as warehouse:
        # The source reads the broker's own files, which are on this machine.
        route = Route(url=str(folder / "bus"), to=broker.url(), warehouse=warehouse)
        query = start(made, spark, route, checkpoint=folder / "state" / made.name)
        try:
            watch({made.name: query}, until=_caught_up(query, producing), quiet=invocation.json)
        except PySparkException as error:
            raise explain_failure(error, made.name) from error
        finally:
            query.stop()
        table = warehouse.table(made.table)
        return _rows(spark, table.files())


def _rows(spark: Any, files: list[str]) -> int:
    return int(spark.read.parquet(*files).count()) if files else 0


def _caught_up(query: Any, producing: _Producing) -> Callable[[], bool]:
    """Whether the producers are done and the query has nothing left."""

    def done() -> bool:
        if producing.is_alive():
            return False
        query.processAllAvailable()
        return True

    return done


async def _books(url: str, tenants: list[str]) -> dict[str, Balance]:
    import penstock
    from penstock.pipelines.builtin.risk_tags import take_stock

    async with penstock.connect(url) as bus:
        return await take_stock(bus, tenants)


def _report(
    invocation: Invocation, folder: Path, books: dict[str, Balance], table_rows: int
) -> None:
    rows = [
        {
            "tenant": tenant, "events": each.events, "results": each.out,
            "duplicates": each.duplicates, "late": each.late, "bad": each.bad, "lost": each.lost,
            "repeated": each.repeated, "balanced": each.balanced,
        }
        for tenant, each in books.items()
    ]  # fmt: skip
    output.show_rows(invocation, rows, list(rows[0]) if rows else [])
    for tenant, each in books.items():
        if each.examples:
            output.note(f"{tenant}: look at {', '.join(each.examples)}")
    out = sum(each.out for each in books.values())
    output.note(f"the table in {folder / 'warehouse'} holds {table_rows:,} rows of {out:,} results")


# -- the first results ----------------------------------------------------------------------------


class _Tag(msgspec.Struct):
    tag: str


class _Result(msgspec.Struct):
    tenant: str
    risk: str
    tags: list[_Tag]
    asset: str | None = None


class FirstResults(threading.Thread):
    """Subscribes to the pipeline's first results, and prints them and how long they took.

    Events that are on the bus already belong to an earlier run.
    """

    def __init__(self, url: str, began: float, tell: Callable[[str], None] = output.note) -> None:
        super().__init__(name="first-results", daemon=True)
        self._url, self._began, self._tell = url, began, tell
        self._subscribed, self._over = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        self.start()
        self._subscribed.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Listen until enough results are shown or the showcase is over; an error does not end it."""
        try:
            asyncio.run(self._listen())
        except PenstockError as error:
            self._tell(f"first results cannot be shown: {error.message}; the showcase goes on")
        finally:
            self._subscribed.set()

    async def _listen(self) -> None:
        import penstock
        from penstock.pipelines.builtin.risk_tags import TAGS

        seen = shown = 0
        async with (
            penstock.connect(self._url) as bus,
            bus.subscribe(f"{TAGS}.#", mode="log", start="latest") as results,
        ):
            self._subscribed.set()
            while shown < SHOWN and not self._over.is_set():
                event = await results.get(timeout_s=LOOK_S)
                if event is None:
                    continue
                if not seen:
                    self._tell(f"results   first after {time.monotonic() - self._began:.1f} s")
                seen += 1
                shown += self._show(event)

    def _show(self, event: Event) -> bool:
        """Print a result that has a tag; most have none."""
        found = msgspec.json.decode(event.payload, type=_Result)
        if found.tags:
            tags = ", ".join(each.tag for each in found.tags)
            self._tell(f"          {found.tenant}  {found.asset}  {found.risk}: {tags}")
        return bool(found.tags)
