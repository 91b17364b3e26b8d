"""The figures of a benchmark (row T12): what is measured, and what counts as a change."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench import Meter, Sample, compare, compare_files, compare_table
from penstock.bench.measure import MAX_LATENCIES, disk_sync_s, median_sample, percentile
from penstock.model.errors import InvalidInput
from penstock.testing.server_process import Server

if TYPE_CHECKING:
    from pathlib import Path


def sample(per_s: float = 1000.0, **figures: Any) -> Sample:
    defaults = {"p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0, "cpu": 0.5, "rss_mb": 50.0}
    return Sample(per_s=per_s, **(defaults | figures))


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.sampled_from([0.5, 0.95, 0.99, 1.0])
)
def test_percentile_is_nearest_rank(values: list[float], share: float) -> None:
    ordered = sorted(values)
    expected = numpy.percentile(ordered, share * 100, method="inverted_cdf")
    assert percentile(ordered, share) == expected


def test_meter_stays_bounded_and_keeps_the_whole_window() -> None:
    meter = Meter(10)
    calls = MAX_LATENCIES * 3
    with meter:
        for number in range(calls):
            meter.add(number / calls, events=2)
    found = meter.sample()
    assert len(meter._kept) < MAX_LATENCIES
    assert meter.events == calls * 2
    assert found.p50_ms == pytest.approx(500, abs=5)
    assert found.p99_ms == pytest.approx(990, abs=5)


def test_meter_rate_uses_the_time_really_spent() -> None:
    clock = itertools.count(100.0, 0.5)
    with Meter(2, clock=lambda: next(clock)) as meter:
        turns = 0
        while meter.running:
            meter.add(0.001, events=100, size_bytes=1000)
            turns += 1
    found = meter.sample(lost=0)
    assert turns == 3
    assert found.per_s == pytest.approx(300 / meter.wall_s)
    assert found.mb_per_s == pytest.approx(3000 / meter.wall_s / 1e6)
    assert found.extra == {"lost": 0}


BURN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"


def test_cpu_counts_children_running_and_reaped_but_not_servers(tmp_path: Path) -> None:
    stay = BURN + "print(1, flush=True)\ntime.sleep(30)"
    with Meter(1) as meter:
        subprocess.run([sys.executable, "-c", BURN], check=True)
        child = subprocess.Popen([sys.executable, "-c", stay], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
    child.kill()
    child.communicate()
    spent_s = meter.sample().cpu * meter.wall_s
    assert 0.55 <= spent_s <= 1.2

    wait = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    server = Server("burner", [sys.executable, "-c", wait + stay], tmp_path / "data")
    try:
        with Meter(1, server_pid=server.pid) as meter:
            (server.folder / "go").touch()
            end = time.monotonic() + 20
            while "1" not in server.log_tail() and time.monotonic() < end:
                time.sleep(0.02)
        found = meter.sample()
    finally:
        server.stop()
    assert found.server_cpu is not None
    assert found.server_cpu * meter.wall_s >= 0.25
    assert found.cpu * meter.wall_s < 0.25
    assert found.server_rss_mb is not None
    assert found.server_rss_mb > 3


def test_peak_memory_is_of_this_window_only() -> None:
    with Meter(1) as big:
        block = bytearray(120_000_000)
        del block
    with Meter(1) as small:
        pass
    assert big.sample().rss_mb - small.sample().rss_mb > 80


def test_median_is_taken_per_figure() -> None:
    found = median_sample(
        [
            sample(10, p99_ms=1, extra={"a": 1, "b": 1}),
            sample(30, p99_ms=9, mb_per_s=5, extra={"a": 5}),
            sample(20, p99_ms=4, mb_per_s=5, extra={"a": 2}),
        ]
    )
    assert (found.per_s, found.p99_ms, found.mb_per_s) == (20, 4, None)
    assert found.extra == {"a": 2}


def test_disk_probe_times_each_sync_and_leaves_nothing(tmp_path: Path) -> None:
    found = disk_sync_s(tmp_path, writes=5, max_s=5)
    assert len(found) == 5
    assert min(found) > 0
    assert list(tmp_path.iterdir()) == []


def result(per_s: list[float], redis: list[float], p99: float = 2.0) -> dict[str, Any]:
    middle = sorted(per_s)[len(per_s) // 2]
    other = sorted(redis)[len(redis) // 2]
    return {
        "case": "queue",
        "penstock": {"per_s": middle, "p99_ms": p99},
        "peers": {"redis": {"per_s": other}},
        "ratio": {"redis": middle / other},
        "samples": {
            "penstock": [{"per_s": value, "p99_ms": p99} for value in per_s],
            "redis": [{"per_s": value} for value in redis],
        },
    }


def verdicts(a: dict[str, Any], b: dict[str, Any]) -> dict[str, str]:
    return {row["metric"]: row["verdict"] for row in compare(a, b)["metrics"]}


def test_compare_needs_more_than_noise() -> None:
    steady = result([99, 100, 101], [10, 10, 10])
    assert verdicts(steady, result([119, 120, 121], [10, 10, 10])) == {
        "per_s": "better",
        "p99_ms": "within noise",
        "ratio.redis": "better",
        "redis.per_s": "within noise",
    }
    shaky = result([80, 120, 130], [10, 10, 10])
    assert verdicts(steady, shaky)["per_s"] == "within noise"
    assert verdicts(shaky, steady)["per_s"] == "within noise"


def test_compare_knows_which_way_is_better() -> None:
    a = result([100, 100, 100], [10, 10, 10], p99=2.0)
    b = result([80, 80, 80], [10, 10, 10], p99=1.0)
    found = verdicts(a, b)
    assert (found["per_s"], found["p99_ms"]) == ("worse", "better")
    assert verdicts(b, a)["p99_ms"] == "worse"


@pytest.mark.parametrize("rounds", [1, 2])
def test_compare_does_not_judge_too_few_rounds(rounds: int) -> None:
    """Not one that is 3 % off, nor one that is twice as fast; and not when the other has enough (C9)."""
    few, enough = [100.0] * rounds, [100.0, 100.0, 100.0]
    for a, b in ((few, [97.0] * rounds), (few, [200.0] * 3), (enough, [50.0] * rounds)):
        change = compare(result(a, [10] * len(a)), result(b, [10] * len(b)))
        assert {row["verdict"] for row in change["metrics"]} == {"not enough rounds to tell"}
        assert {row["noise"] for row in change["metrics"]} == {None}
        assert compare_table(change).row_count == 4


def test_compare_survives_zero() -> None:
    a = result([100] * 3, [10] * 3, p99=0.0)
    row = compare(a, result([100] * 3, [10] * 3, p99=1.0))["metrics"][1]
    assert (row["change"], row["verdict"]) == (None, "within noise")
    with pytest.raises(InvalidInput, match="same case"):
        compare(a, a | {"case": "fanout"})


def test_compare_files_takes_one_result_or_many(tmp_path: Path) -> None:
    one, many, bad = (tmp_path / name for name in ("one.json", "many.json", "bad.json"))
    other = result([1], [1]) | {"case": "fanout"}
    one.write_text(json.dumps(result([100], [10])))
    many.write_text(json.dumps([other, result([200], [10])]))
    found = compare_files(one, many)
    assert [change["case"] for change in found["cases"]] == ["queue"]
    assert found["only_in_one"] == ["fanout"]
    assert compare_table(found["cases"][0]).row_count == 4
    for text in ("", "7", "{}", '[{"x": 1}]'):
        bad.write_text(text)
        with pytest.raises(InvalidInput, match="no benchmark result"):
            compare_files(one, bad)
    with pytest.raises(InvalidInput, match="no benchmark result"):
        compare_files(one, tmp_path / "absent.json")
    bad.write_text(json.dumps(other))
    with pytest.raises(InvalidInput, match="no case is in both"):
        compare_files(one, bad)
