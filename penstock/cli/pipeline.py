"""`penstock pipeline`: data pipelines on Spark, by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import output
from penstock.cli.arguments import DURATION, open_warehouse, read_toml, warehouse_options
from penstock.cli.invocation import Invocation, Noun, asked_to_stop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.pipelines.pipeline import Pipeline

STATE = "pipeline-state"
"""Where checkpoints are kept unless --state says otherwise."""


@click.group("pipeline", cls=Noun)
def command() -> None:
    """List, run, watch and test data pipelines on Spark."""


def _folder_option(function: Any) -> Any:
    return click.option(
        "--path", "folder", type=click.Path(file_okay=False), help="Folder of your own pipelines. Default: ./pipelines where there is one."
    )(function)  # fmt: skip


def _token_option(function: Any) -> Any:
    return click.option("--token", envvar="PENSTOCK_CLIENT_TOKEN", help="Token for the broker.")(function)  # fmt: skip


def _params_options(function: Any) -> Any:
    function = click.option("--params", "params_file", type=click.Path(exists=True, dir_okay=False), help="TOML file of parameters.")(function)  # fmt: skip
    return click.option("-p", "--param", "params", multiple=True, metavar="NAME=VALUE", help="One parameter; repeat as needed.")(function)  # fmt: skip


def _spark_options(function: Any) -> Any:
    function = click.option("--master", help="Spark master: local[N], spark://host:port, yarn, k8s://... Default: local[*].")(function)  # fmt: skip
    return click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A setting of Spark; repeat as needed.")(function)  # fmt: skip


@command.command("list")
@_folder_option
@click.pass_obj
def list_(invocation: Invocation, folder: str | None) -> None:
    """List the pipelines there are."""
    from penstock.pipelines.session import check_requirements

    check_requirements()
    from penstock.pipelines.pipeline import discover

    rows = [
        {
            "name": made.name,
            "mode": made.mode,
            "reads": ", ".join(each.topics for each in made.reads.values()) or None,
            "writes": made.results or made.writes,
            "table": made.table,
            "summary": made.summary,
        }
        for made in sorted(discover(folder).values(), key=lambda made: made.name)
    ]
    output.show_rows(invocation, rows, ["name", "mode", "reads", "writes", "table", "summary"])


@command.command("run")
@click.argument("name")
@click.option("--to", help="The bus that results go to. Default: the one that is read.")
@click.option("--topics", help="Read these topics instead of the pipeline's own.")
@click.option("--start", help="earliest, latest, a time, how long ago (2h), or offsets as JSON.")
@warehouse_options
@click.option("--state", default=STATE, show_default=True, help="Folder of checkpoints.")
@click.option("--once", is_flag=True, help="Stop when everything that is there now is done.")
@click.option("--for", "for_s", type=DURATION, help="Stop after this long.")
@click.option("--every", "every_s", type=DURATION, help="Time between two batches. Default: none.")
@click.option("--max-events", type=click.IntRange(1), help="Events in one batch at the most.")
@click.option(
    "--on-expired", type=click.Choice(["fail", "skip"]),
    help="When retention took events that were not read yet. Default: fail.",
)  # fmt: skip
@click.option("--schema", help="Types of the payload as DDL, for pipelines that name none.")
@click.option(
    "--metrics-port", type=click.IntRange(0, 65_535), help="Serve Prometheus metrics here."
)
@_token_option
@_params_options
@_spark_options
@_folder_option
@click.pass_obj
def run(invocation: Invocation, /, name: str, **said: Any) -> None:
    """Run a pipeline; Ctrl-C stops it, and it goes on from there the next time."""
    from penstock.cli.pipeline_run import run_stream, run_table

    made, spark, route = _prepared(invocation, name, said)
    params = _params(said["params_file"], said["params"])
    if made.mode == "batch":
        run_table(invocation, made, spark, route, params)
        return
    with asked_to_stop(said["for_s"]) as stopping:
        totals = run_stream(
            made, spark, route, params,
            checkpoint=Path(said["state"]) / made.name,
            once=said["once"], every_s=said["every_s"], metrics_port=said["metrics_port"],
            until=stopping.is_set, quiet=invocation.json,
        )  # fmt: skip
    output.show_record(invocation, totals)


@command.command("status")
@click.argument("name")
@click.option("--topics", help="The topics that are read, when they were given to `run`.")
@click.option("--state", default=STATE, show_default=True, help="Folder of checkpoints.")
@_token_option
@_folder_option
@click.pass_obj
def status(invocation: Invocation, name: str, topics: str | None, state: str, token: str | None, folder: str | None) -> None:  # fmt: skip
    """Show how far a pipeline is: its last batch, and how many events are left."""
    from penstock.pipelines.session import check_requirements

    check_requirements()
    from penstock.pipelines.pipeline import find
    from penstock.pipelines.plan import Topics, behind
    from penstock.pipelines.run import read_checkpoint
    from penstock.pipelines.stores import store_at

    made = find(name, folder)
    found = read_checkpoint(Path(state) / made.name)
    store = store_at(invocation.url, token)
    for place in found.places:
        place.check_bus(store.identity(), invocation.url)
    read = [Topics.of(topics or each.topics, each.exclude) for each in made.reads.values()]
    left = sum(
        behind(place.offsets, wanted.bounds(store.bounds))
        for place, wanted in zip(found.places, read, strict=False)
    )
    record = {
        "name": name,
        "query": found.query,
        "batch": found.batch,
        "unfinished": found.planned if found.planned > found.batch else None,
        "lag": left if found.places else None,
        "offsets": {
            f"{topic}/{partition}": offset
            for place in found.places
            for (topic, partition), offset in sorted(place.offsets.items())
        },
    }
    output.show_record(invocation, record)


@command.command("test")
@click.argument("name")
@click.argument("rows", type=click.Path(exists=True, dir_okay=False))
@click.option("--expect", type=click.Path(exists=True, dir_okay=False), help="JSON lines that must come out, in any order; ends with 1 when they do not.")  # fmt: skip
@_params_options
@_spark_options
@_folder_option
@click.pass_obj
def test(invocation: Invocation, /, name: str, rows: str, expect: str | None, **said: Any) -> None:
    """Run a pipeline on rows from a file of JSON lines, without a bus, and print what comes out.

    A row is an object with `payload` and whatever else it should have: topic, key, headers,
    event_time. With several inputs it has `input`, the name of the argument.
    """
    from penstock.cli.pipeline_run import run_test
    from penstock.pipelines.pipeline import find

    spark = _spark(invocation, said)
    made = find(name, said["folder"])
    params = _params(said["params_file"], said["params"])
    run_test(made, spark, Path(rows), Path(expect) if expect else None, params)


def _prepared(invocation: Invocation, name: str, said: dict[str, Any]) -> tuple[Pipeline, SparkSession, Any]:  # fmt: skip
    from penstock.pipelines.session import check_requirements

    check_requirements()
    from penstock.pipelines.pipeline import find
    from penstock.pipelines.run import Route, check_goes_somewhere, parameters

    # All that can be wrong is told at once, before Java starts.
    made = find(name, said["folder"])
    parameters(made, _params(said["params_file"], said["params"]))
    options = {
        "start": said["start"],
        "maxEventsPerTrigger": said["max_events"] and str(said["max_events"]),
        "onExpired": said["on_expired"],
        "schema": said["schema"],
    }
    warehouse = open_warehouse(said) if said["warehouse"] is not None else None
    route = Route(
        url=invocation.url, to=said["to"], warehouse=warehouse, token=said["token"],
        topics=said["topics"], options={key: each for key, each in options.items() if each},
    )  # fmt: skip
    if made.mode != "batch":
        check_goes_somewhere(made, route)
    return made, _spark(invocation, said), route


def _spark(invocation: Invocation, said: dict[str, Any]) -> SparkSession:
    from penstock.pipelines.session import spark_session

    settings = dict(_pair(text, "--conf") for text in said["conf"])
    return spark_session(master=said["master"], settings=settings, verbose=invocation.verbose)


def _params(path: str | None, pairs: tuple[str, ...]) -> dict[str, Any]:
    return read_toml(path) | dict(_pair(text, "--param") for text in pairs)


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(f"{option} {text}: write it as NAME=VALUE")
    return name.strip(), value
