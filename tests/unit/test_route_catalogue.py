"""The versioned route catalogue (T2): resolution, versions, and bytes that show any damage."""

from __future__ import annotations

import doctest
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import routes as catalogue_module
from penstock.core.routes import FORMAT, MAX_PRIORITY, Route, RouteCatalogue
from penstock.model.errors import (
    Corrupted,
    FormatTooNew,
    InvalidInput,
    InvalidPattern,
    UnknownRoute,
)


def catalogue_of(*routes: Route) -> RouteCatalogue:
    catalogue = RouteCatalogue()
    for route in routes:
        assert catalogue.put(route)
    return catalogue


def destinations(catalogue: RouteCatalogue, topic: str, tenant: str | None = None) -> list[str]:
    return [route.destination for route in catalogue.resolve(topic, tenant)]


@pytest.fixture
def sample() -> RouteCatalogue:
    return catalogue_of(
        Route("orders.#", "archive"),
        Route("orders.created.v1.acme", "billing", type="direct", priority=5),
        Route("orders.*.v1.*", "audit", type="group", tenant="acme", enabled=False),
    )


def resealed(data: bytes, **changes: Any) -> bytes:
    """An encoded catalogue whose body was changed by someone who also fixed the checksum."""
    body = json.loads(data)["catalogue"] | changes
    raw = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(raw.encode()).hexdigest()
    return f'{{"format":{FORMAT},"sha256":"{digest}","catalogue":{raw}}}'.encode()


def test_routes_come_by_priority_then_precedence_then_destination() -> None:
    catalogue = catalogue_of(
        Route("#", "z-everything"),
        Route("orders.*", "b-star"),
        Route("orders.*", "a-star"),
        Route("orders.created", "exact"),
        Route("#", "urgent", priority=1),
        Route("orders.created", "last", priority=-1),
    )
    expected = ["urgent", "exact", "a-star", "b-star", "z-everything", "last"]
    assert destinations(catalogue, "orders.created") == expected
    assert destinations(catalogue, "_system.topic") == []


def test_a_route_of_a_tenant_serves_that_tenant_only() -> None:
    catalogue = catalogue_of(Route("#", "all"), Route("#", "hers", tenant="acme"))
    assert destinations(catalogue, "a.b", "acme") == ["all", "hers"]
    assert destinations(catalogue, "a.b", "other") == ["all"]
    assert destinations(catalogue, "a.b") == ["all"]


def test_disabled_routes_stay_but_do_not_apply(sample: RouteCatalogue) -> None:
    topic = "orders.created.v1.acme"
    assert destinations(sample, topic, "acme") == ["billing", "archive"]
    assert sample.enable("orders.*.v1.*", "audit")
    assert destinations(sample, topic, "acme") == ["billing", "audit", "archive"]
    assert sample.disable("orders.#", "archive")
    assert destinations(sample, topic, "acme") == ["billing", "audit"]
    assert len(sample) == 3


def test_version_counts_changes_and_nothing_else(sample: RouteCatalogue) -> None:
    assert sample.version == 3
    assert not sample.put(Route("orders.#", "archive"))
    assert not sample.enable("orders.#", "archive")
    sample.resolve("orders.x", None)
    assert sample.version == 3
    assert sample.put(Route("orders.#", "archive", priority=2))
    assert sample.disable("orders.#", "archive")
    removed = sample.remove("orders.#", "archive")
    assert (removed.priority, removed.enabled) == (2, False)
    assert (sample.version, len(sample)) == (6, 2)


def test_routes_of_one_pattern_are_removed_one_by_one() -> None:
    catalogue = catalogue_of(Route("a.*", "x"), Route("a.*", "y"))
    catalogue.remove("a.*", "x")
    assert destinations(catalogue, "a.b") == ["y"]
    catalogue.remove("a.*", "y")
    assert destinations(catalogue, "a.b") == []
    assert list(catalogue) == []


@pytest.mark.parametrize("call", ["get", "remove", "enable", "disable"])
def test_unknown_routes_are_named(sample: RouteCatalogue, call: str) -> None:
    for pattern, destination in (("orders.#", "nowhere"), ("none", "archive")):
        with pytest.raises(UnknownRoute) as caught:
            getattr(sample, call)(pattern, destination)
        assert (caught.value.pattern, caught.value.destination) == (pattern, destination)
    assert sample.version == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("destination", ""),
        ("destination", "two words"),
        ("destination", "x" * 256),
        ("destination", "line\n"),
        ("destination", None),
        ("type", "topic"),
        ("type", ["fanout"]),
        ("priority", MAX_PRIORITY + 1),
        ("priority", -MAX_PRIORITY - 1),
        ("priority", 1.5),
        ("priority", True),
        ("enabled", 1),
        ("tenant", ""),
        ("tenant", "a.b"),
        ("tenant", 7),
    ],
)
def test_bad_fields_are_refused_and_nothing_changes(field: str, value: Any) -> None:
    catalogue = RouteCatalogue()
    with pytest.raises(InvalidInput) as caught:
        catalogue.put(Route(**{"pattern": "a.*", "destination": "b", field: value}))
    assert caught.value.field == field
    assert (catalogue.version, len(catalogue)) == (0, 0)


def test_bad_patterns_are_refused() -> None:
    with pytest.raises(InvalidPattern):
        RouteCatalogue().put(Route("a..b", "x"))


def test_the_number_of_routes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue_module, "MAX_ROUTES", 2)
    catalogue = catalogue_of(Route("a", "x"), Route("b", "x"))
    with pytest.raises(InvalidInput) as caught:
        catalogue.put(Route("c", "x"))
    assert caught.value.field == "count"
    assert catalogue.put(Route("b", "x", priority=1))


def test_encoding_keeps_everything_and_is_readable(sample: RouteCatalogue) -> None:
    data = sample.encode()
    again = RouteCatalogue.decode(data)
    assert list(again) == list(sample)
    assert again.version == sample.version == 3
    assert again.encode() == data
    assert again.resolve("orders.x", None) == sample.resolve("orders.x", None)
    content = json.loads(data)
    assert content["format"] == FORMAT
    assert content["catalogue"]["routes"][0]["pattern"] == "orders.created.v1.acme"


def test_encoding_does_not_depend_on_the_order_of_adding() -> None:
    routes = [Route("a.*", "y"), Route("a.*", "x"), Route("a.b", "x")]
    assert catalogue_of(*routes).encode() == catalogue_of(*reversed(routes)).encode()


def test_every_truncation_is_detected(sample: RouteCatalogue) -> None:
    data = sample.encode()
    for length in range(len(data)):
        with pytest.raises(Corrupted):
            RouteCatalogue.decode(data[:length])
    with pytest.raises(Corrupted):
        RouteCatalogue.decode(data + b" ")


def test_every_flipped_bit_is_detected(sample: RouteCatalogue) -> None:
    """A flip in the format number may read as a newer format; it is still refused."""
    data = sample.encode()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises((Corrupted, FormatTooNew)):
            RouteCatalogue.decode(bytes(flipped))


def test_a_changed_route_fails_the_checksum(sample: RouteCatalogue) -> None:
    with pytest.raises(Corrupted, match="SHA-256 does not match"):
        RouteCatalogue.decode(sample.encode().replace(b"billing", b"killing"))


@given(st.binary(max_size=200))
def test_foreign_bytes_are_corrupted(data: bytes) -> None:
    with pytest.raises(Corrupted):
        RouteCatalogue.decode(data)


@pytest.mark.parametrize("data", [b'{"format":2}', b'{"format":99,"new":{"things":[]}}'])
def test_a_newer_format_is_told_apart(data: bytes) -> None:
    with pytest.raises(FormatTooNew) as caught:
        RouteCatalogue.decode(data)
    assert caught.value.supported == FORMAT


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 0},
        {"version": -1},
        {"version": "3"},
        {"routes": [{"pattern": "a..b", "destination": "x"}]},
        {"routes": [{"pattern": "a", "destination": ""}]},
        {"routes": [{"pattern": "a", "destination": "x", "surprise": 1}]},
        {"surprise": 1},
    ],
)
def test_content_that_breaks_the_rules_is_corrupted_even_with_a_right_checksum(
    sample: RouteCatalogue, changes: dict[str, Any]
) -> None:
    with pytest.raises(Corrupted):
        RouteCatalogue.decode(resealed(sample.encode(), **changes))


def test_a_route_twice_is_corrupted(sample: RouteCatalogue) -> None:
    data = sample.encode()
    assert RouteCatalogue.decode(resealed(data)).version == 3
    routes = json.loads(data)["catalogue"]["routes"]
    with pytest.raises(Corrupted):
        RouteCatalogue.decode(resealed(data, routes=[*routes, routes[0]]))


def test_examples_in_docstrings_run() -> None:
    result = doctest.testmod(catalogue_module)
    assert result.attempted > 3
    assert result.failed == 0
