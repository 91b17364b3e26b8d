"""One Spark session for all pipeline tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Java starts slowly on a busy machine, and a call that is cut off breaks the session for all."""
    for item in items:
        if "tests/pipelines" in str(item.path):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from penstock.pipelines.session import spark_session

    tables = {"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("tables"))}
    session = spark_session(master="local[2]", name="penstock-tests", settings=tables)
    yield session
    session.stop()
