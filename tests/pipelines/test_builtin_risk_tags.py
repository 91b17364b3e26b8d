"""Evidence to risk tags: equal to an independent engine's answer, nothing lost, nothing twice (S5, X13)."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from penstock.model.errors import InvalidSettings
from penstock.pipelines.builtin.evidence import Counts, Mix, Sample
from penstock.pipelines.builtin.risk_tags import (
    BAD,
    FAULT_HEADER,
    LATE,
    SOURCE_HEADER,
    TAGS,
    balance,
    risk_tags,
)
from penstock.pipelines.testkit import run_on_rows, stream_on_rows

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
TENANTS = ("acme", "globex")

# The shipped rules once more, by hand and in another dialect: an independent answer.
BY_HAND = """
WITH good AS (
    SELECT tenant, p->>'evidence_id' AS evidence_id, p->>'kind' AS kind, p->>'service' AS service,
           (p->>'exposed') = 'true' AS exposed, p->>'product' AS product, p->>'version' AS version,
           CAST(p->>'port' AS INT) AS port, CAST(p->>'score' AS DOUBLE) AS score,
           (p->>'exploited') = 'true' AS exploited, p->>'cve' AS cve, p->>'state' AS state,
           CAST(p->>'open_ports' AS INT) AS open_ports
    FROM (SELECT DISTINCT tenant, CAST(payload AS JSON) AS p FROM events)
),
earned AS (
    SELECT *, 'exposed-database' AS tag, 4 AS grade FROM good WHERE kind = 'fingerprint'
        AND service IN ('postgresql', 'mysql', 'mongodb', 'redis') AND exposed
    UNION ALL SELECT *, 'cleartext-service', 3 FROM good WHERE kind = 'fingerprint'
        AND service IN ('telnet', 'ftp', 'rlogin')
    UNION ALL SELECT *, 'outdated-tls', 3 FROM good WHERE kind = 'fingerprint'
        AND product = 'openssl'
        AND list_transform(string_split(version, '.'), lambda x: CAST(x AS INT)) < [3, 0, 12]
    UNION ALL SELECT *, 'admin-port-open', 2 FROM good WHERE kind = 'fingerprint'
        AND exposed AND (port IN (22, 3389) OR port BETWEEN 5900 AND 5909)
    UNION ALL SELECT *, 'critical-vulnerability', 5 FROM good
        WHERE kind = 'vulnerability' AND score >= 9
    UNION ALL SELECT *, 'known-exploited', 5 FROM good WHERE kind = 'vulnerability' AND exploited
    UNION ALL SELECT *, 'old-vulnerability', 3 FROM good
        WHERE kind = 'vulnerability' AND CAST(substr(cve, 5, 4) AS INT) BETWEEN 1990 AND 2019
    UNION ALL SELECT *, 'wide-open-host', 4 FROM good
        WHERE kind = 'job' AND state = 'finished' AND open_ports >= 100
    UNION ALL SELECT *, 'scan-failed', 2 FROM good
        WHERE kind = 'job' AND state IN ('failed', 'timed-out')
)
SELECT good.tenant, good.evidence_id,
       list_sort(list(tag) FILTER (tag IS NOT NULL)) AS tags,
       ['none', 'low', 'medium', 'high', 'critical'][coalesce(max(grade), 1)] AS risk
FROM good LEFT JOIN earned USING (tenant, evidence_id)
GROUP BY ALL
"""


def micro(time_us: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=time_us)


def sampled(
    count: int, turns: int, mix: Mix
) -> tuple[list[list[dict[str, Any]]], dict[str, Counts]]:
    """Batches of rows, as the source would give them, and how many of each sort they hold."""
    sample = Sample(seed=11, mix=mix)
    counts = {tenant: Counts() for tenant in TENANTS}
    batches: list[list[dict[str, Any]]] = []
    for turn in range(turns):
        rows: list[dict[str, Any]] = []
        now = NOW + timedelta(seconds=turn)
        for tenant in TENANTS:
            for made in sample.make(tenant, count, int(now.timestamp()) * 1_000_000):
                counts[tenant] += made.counts
                rows += [
                    {"topic": made.topic, "payload": payload, "key": key.encode(),
                     "event_time": micro(time_us), "append_time": now}
                    for payload, key, time_us in zip(
                        made.payloads, made.keys, made.event_times, strict=True)
                ]  # fmt: skip
        batches.append(rows)
    return batches, counts


def results_of(rows: list[dict[str, Any]], topic: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["topic"].startswith(topic)]


def tags_of(rows: list[dict[str, Any]]) -> set[tuple[str, str, tuple[str, ...], str]]:
    found = [json.loads(row["payload"]) for row in results_of(rows, TAGS)]
    return {
        (each["tenant"], each["evidence_id"], tuple(sorted(t["tag"] for t in each["tags"])), each["risk"])
        for each in found
    }  # fmt: skip


def by_hand(rows: list[dict[str, Any]]) -> set[tuple[str, str, tuple[str, ...], str]]:
    table = pa.table({
        "tenant": [row["topic"].rpartition(".")[2] for row in rows],
        "payload": [row["payload"].decode() for row in rows],
    })  # fmt: skip
    with duckdb.connect() as engine:
        engine.register("events", table)
        found = engine.execute(BY_HAND).fetchall()
    return {(tenant, id_, tuple(tags or ()), risk) for tenant, id_, tags, risk in found}


def evidence(number: int, **changes: Any) -> dict[str, Any]:
    payload = {"evidence_id": f"e{number}", "kind": "job", "asset": "a", "state": "failed"}
    return {"topic": "evidence.jobs.v1.acme", "payload": payload | changes,
            "append_time": NOW, "event_time": NOW}  # fmt: skip


def test_tags_equal_an_independent_query_over_the_same_events(spark: Any) -> None:
    """S5: Spark's columns made from the rules file agree with DuckDB's SQL written by hand."""
    ((rows,), counts) = sampled(600, 1, Mix(duplicates=0.1, late=0, bad=0))
    out = run_on_rows("risk-tags", spark, rows)
    expected = by_hand(rows)
    assert tags_of(out) == expected
    assert len(out) == len(expected) == sum(each.good for each in counts.values())
    assert len({tag for _, _, tags, _ in expected for tag in tags}) == 9, "every rule was used"
    assert {risk for _, _, _, risk in expected} == {"none", "low", "medium", "high", "critical"}


def test_the_books_balance_for_each_tenant_in_a_stream(spark: Any) -> None:
    """S5, X13: with duplicates, late and bad rows among them, in = out + duplicates + late + bad."""
    batches, counts = sampled(250, 3, Mix(duplicates=0.1, late=0.05, bad=0.05))
    # The first batch has nothing to be late against, and the generator's late rows are taken there.
    early, later = batches[0], [row for batch in batches[1:] for row in batch]
    out = stream_on_rows(risk_tags, spark, batches)
    offsets: dict[str, int] = {}
    sources = []
    for row in early + later:
        offset = offsets.get(row["topic"], 0)
        offsets[row["topic"]] = offset + 1
        sources.append((f"{row['topic']}/0/{offset}", row["payload"]))
    for tenant in TENANTS:
        results = [json.loads(row["payload"]) for row in results_of(out, f"{TAGS}.{tenant}")]
        aside = {
            topic: [row["headers"][SOURCE_HEADER] for row in results_of(out, f"{topic}.{tenant}")]
            for topic in (LATE, BAD)
        }
        books = balance(
            [(source, payload) for source, payload in sources if f".{tenant}/" in source],
            [(each["source"], each["evidence_id"]) for each in results],
            aside[LATE],
            aside[BAD],
        )
        made = counts[tenant]
        assert books.balanced, books
        assert (books.events, books.duplicates, books.bad) == (
            made.events,
            made.duplicates,
            made.bad,
        )
        assert 0 < books.late < made.late
        assert books.out == made.good + made.late - books.late


def test_injected_duplicates_give_no_second_tag(spark: Any) -> None:
    """X13: the same evidence three times, within a micro-batch and across them, is one result."""
    batches = [[evidence(1), evidence(2), evidence(1)], [evidence(2), evidence(3)], [evidence(1)]]
    out = stream_on_rows("risk-tags", spark, batches)
    assert sorted(json.loads(row["payload"])["evidence_id"] for row in out) == ["e1", "e2", "e3"]


def test_bad_and_late_rows_keep_their_bytes_and_say_why(spark: Any) -> None:
    """S5: whatever cannot be judged lies whole on a topic of its own."""
    hour = timedelta(hours=1)
    bad = {
        "not a JSON object": evidence(1)
        | {"payload": b"\xff not json", "headers": {"trace": "t1"}},
        "does not fit": evidence(2, port="eighty"),
        "evidence_id is missing": evidence(3, evidence_id=None),
        "kind is missing": evidence(4, kind=None),
        "kind is rumour": evidence(5, kind="rumour"),
        "event_time is more than 1m": evidence(6) | {"event_time": NOW + hour},
    }
    late = evidence(8) | {"event_time": NOW - hour, "key": b"k"}
    just_in_time = evidence(9) | {"event_time": NOW - timedelta(minutes=10)}
    batches = [[*bad.values(), evidence(7)], [evidence(10)], [late, just_in_time]]
    out = stream_on_rows("risk-tags", spark, batches)
    found = {row["headers"][FAULT_HEADER]: row for row in results_of(out, f"{BAD}.acme")}
    assert len(found) == len(bad)
    for text, given in bad.items():
        (row,) = [row for reason, row in found.items() if text in reason]
        payload = given["payload"]
        assert row["payload"] == payload if isinstance(payload, bytes) else json.loads(row["payload"]) == payload  # fmt: skip
    assert any(row["headers"].get("trace") == "t1" for row in found.values())
    (kept,) = results_of(out, f"{LATE}.acme")
    assert (kept["key"], kept["headers"]) == (b"k", {SOURCE_HEADER: "evidence.jobs.v1.acme/0/8"})
    assert json.loads(kept["payload"]) == late["payload"]
    assert {row[1] for row in tags_of(out)} == {"e7", "e9", "e10"}


def test_its_own_side_topics_are_not_read_again(spark: Any) -> None:
    own = [evidence(1) | {"topic": f"{topic}.acme", "payload": b"?"} for topic in (BAD, LATE)]
    assert run_on_rows("risk-tags", spark, own) == []


def test_products_are_known_in_capitals_too(spark: Any) -> None:
    """F8: scanners write OpenSSL, openssl and OPENSSL."""
    found = {"version": "1.0.2", "kind": "fingerprint"}
    rows = [
        evidence(number, product=product, **found)
        for number, product in enumerate(("openssl", "OpenSSL", "OPENSSL", "LibreSSL"))
    ]
    tags = [row[2] for row in tags_of(run_on_rows("risk-tags", spark, rows))]
    assert sorted(map(list, tags)) == [[], *[["outdated-tls"]] * 3]


def test_rules_are_data_and_change_without_code(spark: Any, tmp_path: Any) -> None:
    """S5: a file of one's own replaces the rules; every comparison there is does what it says."""
    tests = {
        "equal": ("port", 22, True), "not-equal": ("port", 23, True), "in": ("port", [21, 22], True),
        "not-in": ("port", [22], False), "at-least": ("port", 22, True), "below": ("score", 7.5, False),
        "between": ("port", [1, 22], True), "matching": ("service", "^ss", True),
        "version-below": ("version", "9.10", True), "present": ("product", True, False),
    }  # fmt: skip
    rules = [
        {"tag": test, "severity": "low", "why": "", "kinds": ["job"],
         "all": [{"field": field, "is": test, "to": to}]}
        for test, (field, to, _) in tests.items()
    ]  # fmt: skip
    rules.append({"tag": "absent", "severity": "low", "why": "", "kinds": ["job"],
                  "all": [{"field": "product", "is": "not-equal", "to": "x"}]})  # fmt: skip
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"format": 1, "rules": rules}))
    row = evidence(1, port=22, score=7.5, service="ssh", version="9.9p1")
    out = run_on_rows("risk-tags", spark, [row], {"rules": str(path)})
    ((_, _, tags, _),) = tags_of(out)
    assert set(tags) == {test for test, (_, _, holds) in tests.items() if holds}
    with pytest.raises(InvalidSettings, match=r"cannot be read"):
        run_on_rows("risk-tags", spark, [], {"rules": str(tmp_path / "none.json")})
