"""Progress on a terminal: a bar for each pipeline, or a line now and then where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING

from penstock.pipelines.failure import explain_failure
from penstock.pipelines.progress import Meter

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from rich.console import Console
    from rich.table import Table

LOOK_S = 0.5  # between two looks on a terminal
LINE_S = 3.0  # between two lines in a pipe
BAR_CELLS = 16
HEADINGS = ("caught up", "rows", "in/s", "done/s", "lag", "watermark", "state", "batch")


def watch(
    queries: Mapping[str, StreamingQuery],
    *,
    until: Callable[[], bool] = lambda: False,
    console: Console | None = None,
    quiet: bool = False,
    looked: Callable[[Mapping[str, Meter]], None] = lambda _: None,
) -> dict[str, Meter]:
    """Show pipelines by name until all have ended or `until()`; raise when one fails.

    `looked` is called with the numbers after each look, which is how metrics get theirs. The
    queries are left as they are: whoever started them stops them.
    """
    from rich.console import Console

    meters = {name: Meter(query) for name, query in queries.items()}
    console = console or Console(stderr=True, quiet=quiet)
    with ExitStack() as stack:
        show = _bars(console, stack) if console.is_terminal and not quiet else _lines(console)
        while True:
            # Asked before the numbers are: the last batch of a query that ends is counted too.
            over = all(meter.ended for meter in meters.values()) or until()
            for name, meter in meters.items():
                meter.look()
                failure = meter.query.exception() if meter.ended else None
                if failure is not None:
                    raise explain_failure(failure, name)
            looked(meters)
            show(meters, over)
            if over:
                return meters
            time.sleep(LOOK_S)


def _bars(console: Console, stack: ExitStack) -> Callable[[Mapping[str, Meter], bool], None]:
    from rich.live import Live

    live = stack.enter_context(Live(console=console, transient=True, auto_refresh=False))

    def show(meters: Mapping[str, Meter], _: bool) -> None:
        live.update(table(meters), refresh=True)

    return show


def _lines(console: Console) -> Callable[[Mapping[str, Meter], bool], None]:
    """A line for each pipeline every few seconds, and at the end."""
    printed = began = time.monotonic()

    def show(meters: Mapping[str, Meter], last: bool) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= LINE_S or last:
            printed = now
            for name, meter in meters.items():
                text = f"{now - began:6.1f} s  {line(name, meter)}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)

    return show


def cells(meter: Meter) -> dict[str, str]:
    """The numbers of a pipeline as texts, by heading."""
    last = meter.last
    if last is None:
        return dict.fromkeys(HEADINGS, "-") | {"rows": "0"}
    behind = last.lag_events
    share = "-" if behind is None else f"{caught_up(meter):.0%}"
    state = f"{last.state_rows:,} rows {_size(last.state_bytes)}" if last.state_bytes else "-"
    texts = (
        share,
        f"{meter.rows_in:,}",
        f"{last.in_per_s:,.0f}",
        f"{last.done_per_s:,.0f}",
        "-" if behind is None else f"{behind:,}",
        _time(last.watermark),
        state,
        f"{last.batch} in {last.batch_s:.2f} s",
    )
    return dict(zip(HEADINGS, texts, strict=True))


def caught_up(meter: Meter) -> float:
    """Rows read as a share of those that were there to be read; 1 where nobody knows."""
    behind = meter.last.lag_events if meter.last is not None else None
    return meter.rows_in / (meter.rows_in + behind) if behind else 1.0


def line(name: str, meter: Meter) -> str:
    """One line for a pipe."""
    if meter.last is None:
        return f"{name}  waiting for the first batch"
    shown = cells(meter)
    dropped = f"  dropped {meter.dropped_rows:,}" if meter.dropped_rows else ""
    skipped = f"  skipped {meter.skipped_events:,}" if meter.skipped_events else ""
    return (
        f"{name}  rows {shown['rows']}  in {shown['in/s']}/s  done {shown['done/s']}/s  "
        f"lag {shown['lag']}  watermark {shown['watermark']}  state {shown['state']}  "
        f"batch {shown['batch']}{dropped}{skipped}"
    )


def table(meters: Mapping[str, Meter]) -> Table:
    """A row for each pipeline, with a bar of how much of the log it has read."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False)
    shown.add_column("pipeline")
    shown.add_column("", width=BAR_CELLS)
    for heading in HEADINGS:
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, meter in meters.items():
        bar = ProgressBar(total=1.0, completed=caught_up(meter), pulse=meter.last is None)
        shown.add_row(Text(name), bar, *map(Text, cells(meter).values()))
    return shown


def _time(moment: datetime | None) -> str:
    return "-" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S")


def _size(size_bytes: float) -> str:
    """Bytes for people.

    >>> _size(512), _size(2_864), _size(5_000_000)
    ('512 B', '2.9 kB', '5.0 MB')
    """
    for unit in ("B", "kB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} GB"
