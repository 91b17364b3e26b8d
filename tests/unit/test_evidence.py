"""Sample evidence, its books and the rules file, without Spark (S5, X13)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from typing import Any

import pytest

import penstock
from penstock.model.errors import FormatTooNew, InvalidSettings
from penstock.pipelines.builtin import risk_rules
from penstock.pipelines.builtin.evidence import LATE_BY_US, Counts, Mix, Producer, Sample
from penstock.pipelines.builtin.risk_tags import BAD, SOURCE_HEADER, TAGS, balance, take_stock

NOW_US = 1_772_000_000_000_000


def evidence_id(payload: bytes) -> str | None:
    """The id of good evidence; None for a bad row."""
    with contextlib.suppress(ValueError):
        found = json.loads(payload)
        if found["kind"] in risk_rules.KINDS and type(found.get("port", 0)) is int:
            name: str | None = found.get("evidence_id")
            return name
    return None


def test_it_is_known_exactly_how_many_of_each_sort_were_made() -> None:
    """S5: duplicates repeat an event made before, late ones are hours old, bad ones are no evidence."""
    sample = Sample(seed=3, mix=Mix(duplicates=0.2, late=0.1, bad=0.1))
    total, late, ids = Counts(), 0, Counter[str]()
    for turn in range(5):
        now_us = NOW_US + turn * 1_000_000
        for made in sample.make("acme", 400, now_us):
            total += made.counts
            assert len(made.payloads) == made.counts.events
            for payload, time_us in zip(made.payloads, made.event_times, strict=True):
                late += time_us < now_us - LATE_BY_US
                if (name := evidence_id(payload)) is not None:
                    ids[name] += 1
    assert total.events == 2_000
    assert total.late == late
    assert ids.total() - len(ids) == total.duplicates > 0
    assert len(ids) == total.good + total.late
    assert total.events - ids.total() == total.bad > 0


def test_duplicates_are_never_so_old_that_they_would_be_late() -> None:
    sample = Sample(mix=Mix(duplicates=1.0, late=0, bad=0))
    first = sum((made.counts for made in sample.make("acme", 10, NOW_US)), Counts())
    later = sum((made.counts for made in sample.make("acme", 10, NOW_US + 61_000_000)), Counts())
    assert first.good == later.good > 0


def test_runs_and_tenants_have_ids_of_their_own() -> None:
    def ids(**options: Any) -> set[bytes]:
        return {
            each for made in Sample(**options).make("acme", 50, NOW_US) for each in made.payloads
        }

    good = Mix(0, 0, 0)
    assert ids(mix=good) == ids(mix=good)
    assert not ids(mix=good) & ids(mix=good, run="monday")


def test_a_hundred_thousand_a_second_can_be_made() -> None:
    """S5: the generator is not what limits a run; half the goal is left for a busy machine."""
    sample = Sample()
    began = time.process_time()
    for turn in range(10):
        sample.make("acme", 5_000, NOW_US + turn)
    assert 50_000 / (time.process_time() - began) > 50_000


async def test_a_producer_counts_what_the_bus_took_and_the_books_see_it() -> None:
    """S5, X13: in = out + duplicates + late + bad, checked from the topics alone."""
    async with penstock.connect("mem:") as bus:
        producer = Producer(bus, Sample(seed=5), rate=2_000, tenants={"acme": 1.0})
        stopping = asyncio.Event()
        task = asyncio.create_task(producer.run(stopping))
        while producer.published["acme"].events < 300:
            await asyncio.sleep(0.01)
        stopping.set()
        await task
        made = producer.published["acme"]
        books = (await take_stock(bus, ["acme"]))["acme"]
        assert (books.events, books.lost, books.balanced) == (made.events, made.events, False)
        # What the pipeline would write, by hand.
        seen: set[str] = set()
        events = [event async for event in bus.replay("evidence.#")]
        for event in events:
            source, name = str(event.id), evidence_id(event.payload)
            if name is None:
                await bus.publish(f"{BAD}.acme", event.payload, headers={SOURCE_HEADER: source})
            elif name not in seen:
                seen.add(name)
                await bus.publish(f"{TAGS}.acme", {"evidence_id": name, "source": source})
        books = (await take_stock(bus, ["acme"]))["acme"]
        assert books.balanced
        assert (books.bad, books.duplicates) == (made.bad, made.duplicates)
        await bus.publish(f"{TAGS}.acme", {"evidence_id": name, "source": source})
        assert not (await take_stock(bus, ["acme"]))["acme"].balanced


def test_the_books_name_what_does_not_add_up() -> None:
    one = ("e/0/0", b'{"evidence_id": "a"}')
    assert balance([one], [("e/0/0", "a")], ["e/0/0"], []).repeated == 1
    assert balance([one], [("e/0/7", "a")], [], []).repeated == 1
    assert balance([one], [], [], []).examples == ("e/0/0",)


RULE = {"tag": "t", "severity": "low", "why": "w", "kinds": ["job"],
        "all": [{"field": "port", "is": "equal", "to": 1}]}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"severity": "odd"}, r"rules\[0\].severity"),
        ({"kinds": []}, "needs a kind and a condition"),
        ({"all": []}, "needs a kind and a condition"),
        ({"extra": 1}, "extra"),
        ({"all": [{"field": "prot", "is": "equal", "to": 1}]}, "Did you mean 'port'"),
        ({"all": [{"field": "port", "is": "equals", "to": 1}]}, "Invalid enum value 'equals'"),
        ({"all": [{"field": "port", "is": "equal", "to": "1"}]}, "'port' is INT, and '1' is not"),
        ({"all": [{"field": "port", "is": "equal", "to": True}]}, "'port' is INT, and True is not"),
        ({"all": [{"field": "port", "is": "in", "to": 1}]}, "give a list"),
        ({"all": [{"field": "port", "is": "equal", "to": [1]}]}, "give a value"),
        ({"all": [{"field": "port", "is": "between", "to": [1]}]}, "between two values"),
        ({"all": [{"field": "port", "is": "matching", "to": "1"}]}, "cannot be matching"),
        ({"all": [{"field": "exposed", "is": "below", "to": True}]}, "cannot be below"),
        ({"all": [{"field": "cve", "is": "matching", "to": "("}]}, "no regular expression"),
        ({"all": [{"field": "version", "is": "version-below", "to": "3.x"}]}, "is no version"),
    ],
)
def test_a_wrong_rule_is_named_with_what_is_wrong(change: dict[str, Any], message: str) -> None:
    """S5: rules are data, so their mistakes are found before anything runs."""
    data = json.dumps({"format": 1, "rules": [RULE | change]}).encode()
    with pytest.raises(InvalidSettings, match=message):
        risk_rules.parse(data)


def test_rules_files_are_checked_as_a_whole() -> None:
    with pytest.raises(InvalidSettings, match="two rules for the tag 't'"):
        risk_rules.parse(json.dumps({"format": 1, "rules": [RULE, RULE]}).encode())
    with pytest.raises(FormatTooNew):
        risk_rules.parse(b'{"format": 2, "rules": []}')
    assert len({rule.tag for rule in risk_rules.load().rules}) == 9
