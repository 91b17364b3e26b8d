"""What `penstock pipeline` is told beside a name: tokens, parameters, formats, a port for metrics (S4, S5, S6, S8)."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli import invocation
from penstock.cli.app import run
from penstock.model.settings_loader import load
from penstock.pipelines import pipeline
from penstock.pipelines.lakehouse.warehouse import Warehouse
from penstock.pipelines.pipeline import registered
from penstock.server.auth import Authenticator
from penstock.testing.broker_process import BrokerProcess

OWN = '''
import msgspec
import penstock

class Params(msgspec.Struct):
    factor: int = 2
    minus: int = 0

@penstock.pipeline("shifted", reads="numbers.#", writes="shifted.numbers.v1.acme", schema="n BIGINT", params=Params)
def shifted(events, params):
    """Numbers times a factor, less something."""
    rows = events.where("fault IS NULL")
    return rows.selectExpr(f"value.n * {params.factor} - {params.minus} AS n")
'''
TOPIC = "numbers.all.v1.acme"
SECRET = "a secret of at least thirty-two bytes"


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "shifted.py").write_text(OWN)
    yield tmp_path
    registered.pop("shifted", None)


def fill(bus: Any, *numbers: int) -> None:
    bus.publish_many(TOPIC, [{"n": n} for n in numbers])


def told(project: Path, url: str | Path, *more: str) -> list[str]:
    return ["--json", "--url", str(url), "pipeline", *more, "--path", str(project / "own")]


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# -- tokens ----------------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that asks for tokens."""
    with BrokerProcess(tmp_path / "bus").start(auth__jwt_secret=SECRET) as broker:
        yield broker


def test_a_tenants_token_opens_what_is_its_own(spark, project, guarded, capsys) -> None:
    """S5, T10: for source, sink, dead-letters and status; without it nothing is told."""
    auth = load(None, {}, {"auth.jwt_secret": SECRET}).auth
    made = Authenticator(auth).issue("acme", "tester", ["operator"], 600.0)
    with penstock.connect_sync(guarded.url(), client__token=made, identity__tenant="acme") as bus:
        fill(bus, 1, 2)
        with bus.subscribe(TOPIC, group="billing") as events:
            next(iter(events)).reject("no stock for order 17")
        bus.flush()
    token, state = ["--token", made], ["--state", str(project / "state")]
    assert run(told(project, guarded.url(), "run", "dead-letters", *token)) == 0
    [letter] = said(capsys)
    assert (letter["error"], letter["letters"]) == ("no stock for order <n>", 1)
    assert run(told(project, guarded.url(), "run", "shifted", "--once", *token, *state)) == 0
    assert run(told(project, guarded.url(), "status", "shifted", *token, *state)) == 0
    *_, standing = said(capsys)
    assert (standing["lag"], standing["offsets"]) == (0, {f"{TOPIC}/0": 2})
    for words in (["run", "dead-letters"], ["status", "shifted", *state]):
        assert run(told(project, guarded.url(), *words)) == invocation.REFUSED
        assert "a token is needed here" in capsys.readouterr().out


# -- where pipelines and their parameters come from --------------------------------------------------


def test_a_package_brings_pipelines_by_entry_point(project, capsys, monkeypatch) -> None:
    """S6: an entry point of the group names a module, and loading it is enough."""
    (project / "shop_pipelines.py").write_text(OWN.replace('"shifted"', '"of-a-package"'))
    monkeypatch.syspath_prepend(project)
    point = EntryPoint("shop", "shop_pipelines", pipeline.GROUP)

    def installed(*, group: str) -> list[EntryPoint]:
        return [point] if group == "penstock.pipelines" else []

    monkeypatch.setattr(pipeline, "entry_points", installed)
    try:
        assert run(told(project, "data", "list")) == 0
        assert {"of-a-package", "shifted", "usage"} <= {row["name"] for row in said(capsys)}
        assert pipeline.find("of-a-package").function.__module__ == "shop_pipelines"
    finally:
        registered.pop("of-a-package", None)


class Answers:
    """Asks for a pipeline's metrics as long as it runs, and keeps what rows it said were read."""

    def __init__(self, port: int) -> None:
        self.rows: list[float] = []
        self._url, self._over = f"http://127.0.0.1:{port}/metrics", threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Answers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._over.wait(0.2):
            try:
                with urllib.request.urlopen(self._url, timeout=10) as answer:
                    text = answer.read().decode()
            except OSError:  # not yet, or not any more
                continue
            found = re.findall(r"^penstock_pipeline_input_rows_total\{.*\} (\S+)$", text, re.MULTILINE)  # fmt: skip
            self.rows += map(float, found)


def test_parameters_of_a_file_and_of_flags_and_metrics_while_it_runs(spark, project, capsys) -> None:  # fmt: skip
    """S6, S8: flags win over the file; the port answers with the query's own numbers."""
    with penstock.connect_sync(project / "data") as bus:
        fill(bus, 1, 2, 3)
    file = project / "params.toml"
    file.write_text("factor = 10\nminus = 4\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = ["--params", str(file), "-p", "minus=5", "--metrics-port", str(port), "--for", "15s"]
    words = told(project, project / "data", "run", "shifted", *given, "--state", str(project / "state"))  # fmt: skip
    with Answers(port) as answers:
        assert run(words) == 0
    assert answers.rows[-1] == 3
    with penstock.connect_sync(f"{project / 'data'}?mode=ro") as bus:
        assert [event.value()["n"] for event in bus.replay("shifted.#")] == [5, 15, 25]


# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_a_topic_becomes_a_table_of_another_format(spark, project, capsys, kind) -> None:
    """S4, S5: `--format`; with a schema, what does not fit is in the table of rejected rows."""
    with penstock.connect_sync(project / "data") as bus:
        fill(bus, 1, 2, 3)
        bus.publish(TOPIC, b"no number")
    lake = ["--warehouse", str(project / "lake"), "--format", kind, "--schema", "n BIGINT"]
    more = ["--once", "--topics", "numbers.#", *lake, "--state", str(project / "state")]
    assert run(told(project, project / "data", "run", "topic-to-table", *more)) == 0
    with Warehouse(project / "lake", format=kind) as warehouse:
        good, bad = (
            spark.read.parquet(*warehouse.table(name).files()).orderBy("offset").collect()
            for name in ("events", "events__rejected")
        )
    assert [(row["source_topic"], row["offset"], row["value"]["n"]) for row in good] == [
        (TOPIC, n, n + 1) for n in range(3)
    ]
    [row] = bad
    assert (row["topic"], row["offset"], bytes(row["payload"])) == (TOPIC, 3, b"no number")
    assert row["reason"].startswith("not a JSON object")
    logs = list((project / "lake").rglob("_delta_log"))
    assert bool(logs) == (kind == "delta")
