"""Settings and their loader (issue 2 item 2; row Y1 for the durability settings)."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.errors import InvalidSettings
from penstock.model.parameter import parse, show, unit_of
from penstock.model.settings import (
    GIB,
    MIB,
    Admission,
    Delivery,
    Durability,
    Sealing,
    Settings,
    TenantLimits,
    field_types,
)
from penstock.model.settings_loader import (
    MAX_FILE_BYTES,
    check,
    conflicts,
    load,
    reference,
    unknown,
)

ROOT = Path(__file__).parents[2]
GROUPS = {**field_types(Settings), "tenant": TenantLimits}


def file(folder: Path, text: str) -> str:
    path = folder / "penstock.toml"
    path.write_text(text)
    return str(path)


def test_publishing_is_durable_by_default() -> None:
    """Y1: fsync before acknowledge unless somebody asks for less."""
    assert Settings().durability.fsync == "always"
    assert load() == Settings()


def test_the_defaults_have_no_conflicts() -> None:
    assert list(conflicts(Settings())) == []
    assert check() == []


def test_a_broker_is_where_it_was_promised_to_be() -> None:
    """Rows T1, T5, T13: addresses, lease and fast path of the seed, which its clients rely on."""
    settings = Settings()
    server, fastpath = settings.server, settings.fastpath
    assert (server.zmq, server.pub) == ("127.0.0.1:5555", "127.0.0.1:5556")
    assert (server.tcp, server.http) == ("127.0.0.1:5557", "127.0.0.1:5558")
    assert settings.delivery.lease_s == 30
    assert fastpath.cutover_bytes == 262_144
    assert (fastpath.enabled, fastpath.require, fastpath.fall_back) == (True, False, True)


def test_admission_is_off_by_default() -> None:
    """T11: the limits are the broker's; a bus in your own process starts without."""
    admission = msgspec.structs.asdict(Admission())
    assert admission.pop("tenants") == {}
    assert set(admission) == {
        "max_inflight_per_consumer",
        "max_per_topic_queue",
        "max_queued_direct",
        "max_global_ingress",
    }
    assert set(admission.values()) == {None}


def test_groups_are_frozen_and_keep_no_handle_to_what_was_passed_in() -> None:
    tenants = {"acme": TenantLimits(max_queued=5)}
    ladder = [1, 2]
    admission, delivery = Admission(tenants=tenants), Delivery(ladder_ms=ladder)  # type: ignore[arg-type]
    tenants.clear()
    ladder.clear()
    assert admission.tenants["acme"].max_queued == 5
    assert delivery.ladder_ms == (1, 2)
    with pytest.raises(AttributeError):
        delivery.max_attempts = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("group", "field", "value"),
    [
        (Durability, "fsync", "sometimes"),
        (Durability, "fsync_interval_ms", 0),
        (Delivery, "lease_s", float("nan")),
        (Delivery, "ladder_ms", ()),
        (Delivery, "ladder_ms", (100, -1)),
        (Delivery, "max_attempts", True),
        (Sealing, "zstd_level", 23),
        (Sealing, "grace_s", float("inf")),
        (Admission, "tenants", {"": TenantLimits()}),
        (Admission, "tenants", {"acme": {"nonsense": 1}}),
        (Settings, "delivery", 5),
    ],
)
def test_a_group_refuses_a_wrong_value_when_it_is_made(group: Any, field: str, value: Any) -> None:
    with pytest.raises(InvalidSettings) as caught:
        group(**{field: value})
    assert caught.value.key == field


def test_every_field_says_what_it_is_for_and_has_a_range() -> None:
    for group in GROUPS.values():
        for name, kind in field_types(group).items():
            schema = msgspec.json.schema(kind)
            assert schema["description"].endswith("."), name
            for part in schema.get("anyOf", [schema]):
                if part.get("type") in ("integer", "number"):
                    assert "maximum" in part, name
                    assert "minimum" in part or "exclusiveMinimum" in part, name


def test_later_sources_win_field_by_field(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        """
        [durability]
        fsync = "interval"
        fsync_interval_ms = "20ms"
        [journal]
        file_bytes = "64MiB"
        [delivery]
        ladder_ms = [50, "1s"]
        max_attempts = 3
        """,
    )
    env = {
        "PENSTOCK_DURABILITY_FSYNC": "never",
        "PENSTOCK_JOURNAL_FILE_BYTES": "32MiB",
        "HOME": "/",
    }
    settings = load(path, env, {"journal.file_bytes": "16MiB"})
    assert settings.durability == Durability(fsync="never", fsync_interval_ms=20)
    assert settings.journal.file_bytes == 16 * MIB
    assert settings.delivery.ladder_ms == (50, 1000)
    assert load(path, env).journal.file_bytes == 32 * MIB
    assert load(path).journal.file_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("SEALING_ENABLED", "false", "sealing.enabled", False),
        ("DELIVERY_MAX_ATTEMPTS", "7", "delivery.max_attempts", 7),
        ("DELIVERY_LEASE_S", "5m", "delivery.lease_s", 300.0),
        ("DELIVERY_LEASE_S", "250ms", "delivery.lease_s", 0.25),
        ("DELIVERY_LADDER_MS", "100ms,2s, 1m", "delivery.ladder_ms", (100, 2000, 60_000)),
        ("DELIVERY_LADDER_MS", "[100, 200]", "delivery.ladder_ms", (100, 200)),
        ("DELIVERY_LADDER_MS", "1s", "delivery.ladder_ms", (1000,)),
        ("RETENTION_AGE_S", "none", "retention.age_s", None),
        ("RETENTION_AGE_S", "2h", "retention.age_s", 7200.0),
        ("RETENTION_MAX_BYTES", "1.5GiB", "retention.max_bytes", 3 * GIB // 2),
        ("MEDIA_COMPRESSOR", "none", "media.compressor", "none"),
        ("IDENTITY_TENANT", "5", "identity.tenant", "5"),
    ],
)
def test_text_becomes_what_the_field_wants(name: str, text: str, key: str, value: Any) -> None:
    group, _, field = key.partition(".")
    for settings in (load(env={f"PENSTOCK_{name}": text}), load(flags={key: text})):
        assert getattr(getattr(settings, group), field) == value


def test_tenants_come_from_tables_json_and_flags(tmp_path: Path) -> None:
    """T11: per-tenant overrides, merged limit by limit."""
    path = file(
        tmp_path,
        """
        [admission.tenants.acme]
        max_inflight = 10
        storage_bytes = "10GiB"
        bytes_per_s = "1MiB"
        """,
    )
    env = {
        "PENSTOCK_ADMISSION_TENANTS": json.dumps(
            {"acme": {"max_inflight": 20}, "b-c": {"max_queued": 1}}
        )
    }
    settings = load(path, env, {"admission.tenants.acme.events_per_s": "100"})
    assert settings.admission.tenants == {
        "acme": TenantLimits(
            max_inflight=20, storage_bytes=10 * GIB, bytes_per_s=MIB, events_per_s=100
        ),
        "b-c": TenantLimits(max_queued=1),
    }
    given_in_python = load(flags={"admission.tenants": settings.admission.tenants})
    assert given_in_python.admission == settings.admission


@pytest.mark.parametrize("name", ["bad tenant", "a.b", "", "ü", "x" * 65, "acme\n"])
def test_limits_are_for_tenants_that_can_exist(name: str, tmp_path: Path) -> None:
    """T11: the rule of tokens; limits under any other name would hold for nobody."""
    path = file(tmp_path, f"[admission.tenants.{json.dumps(name)}]\nmax_inflight = 10\n")
    (problem,) = check(path)
    assert problem.severity == "error"
    assert "no tenant can be called" in problem.message or not name
    for flags in ({f"admission.tenants.{name}.max_inflight": 1}, {"admission.tenants": {name: {"max_inflight": 1}}}):  # fmt: skip
        with pytest.raises(InvalidSettings):
            load(flags=flags)
    with pytest.raises(InvalidSettings):
        Admission(tenants={name: TenantLimits()})
    assert Admission(tenants={"x" * 64: TenantLimits()}).tenants


@pytest.mark.parametrize(
    ("flags", "nearest"),
    [
        ({"durability.fsnc": "never"}, "durability.fsync"),
        ({"durablity.fsync": "never"}, "durability.fsync"),
        ({"journal.fsync": "never"}, "durability.fsync"),
        ({"fsync": "never"}, "durability.fsync"),
        ({"admission.tenants.acme.max_inflght": 5}, "admission.tenants.acme.max_inflight"),
        ({"admission.tenants": {"acme": {"storage": 5}}}, "admission.tenants.acme.storage_bytes"),
    ],
)
def test_an_unknown_name_gets_the_nearest_known_one(flags: dict[str, Any], nearest: str) -> None:
    with pytest.raises(InvalidSettings, match=f"did you mean {nearest}\\?"):
        load(flags=flags)


def test_an_unknown_variable_stops_no_program_and_is_told() -> None:  # A11
    env = {"PENSTOCK_DURABILITY_FSNC": "never", "PENSTOCK_NONSENSE": "1"}
    assert load(env=env) == Settings()
    found = check(env=env)
    assert [problem.severity for problem in found] == ["warning", "warning"]
    assert "did you mean durability.fsync?" in found[0].text
    assert [problem.source for problem in unknown(env)] == [each.source for each in found]
    with pytest.raises(InvalidSettings, match="PENSTOCK_DURABILITY_FSYNC"):  # a known one counts
        load(env={"PENSTOCK_DURABILITY_FSYNC": "sometimes"})
    env = {"PENSTOCK_URL": "mem:", "PENSTOCK_CONFIG": "x", "_PENSTOCK_COMPLETE": "y", "PATH": "z"}
    assert check(env=env) == []


@pytest.mark.parametrize("service", ["PENSTOCK", "PENSTOCK_BROKER", "PENSTOCK_SERVER"])
def test_what_kubernetes_sets_for_a_service_never_matters(service: str) -> None:  # A11
    env = {
        f"{service}_SERVICE_HOST": "10.0.0.7",
        f"{service}_SERVICE_PORT": "4711",
        f"{service}_SERVICE_PORT_HTTP": "4712",
        f"{service}_PORT": "tcp://10.0.0.7:4711",
        f"{service}_PORT_4711_TCP": "tcp://10.0.0.7:4711",
        f"{service}_PORT_4711_TCP_PROTO": "tcp",
        f"{service}_PORT_4711_TCP_PORT": "4711",
        f"{service}_PORT_4711_TCP_ADDR": "10.0.0.7",
    }
    assert check(env=env) == []
    assert load(env=env) == Settings()


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("durability.fsync", "sometimes", "one of `always`, `interval`, `never`"),
        ("journal.file_bytes", "1KiB", "1 MiB to 1 TiB"),
        ("journal.file_bytes", "64 miles", "unknown unit 'miles'"),
        ("journal.file_bytes", "-5", "is not a number with a unit"),
        ("journal.file_bytes", "0.5", "1 MiB to 1 TiB"),
        ("journal.file_bytes", 10**30, "1 MiB to 1 TiB"),
        ("journal.file_bytes", "none", "1 MiB to 1 TiB"),
        ("delivery.lease_s", "5M", "unknown unit 'M'"),
        ("delivery.max_attempts", 2.5, "1 to 1000"),
        ("delivery.ladder_ms", "", "1 to 32 values"),
        ("delivery.ladder_ms", {"a": 1}, "1 to 32 values"),
        ("sealing.enabled", "perhaps", "true or false"),
        ("admission.tenants", "{not json", "a table"),
        ("admission.tenants", 5, "a table"),
        ("admission.tenants.acme.max_queued", 0, "1 to 1000000000 or none"),
    ],
)
def test_a_wrong_value_is_named_with_source_and_range(key: str, value: Any, hint: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        load(flags={key: value})
    error = caught.value
    assert (error.key, error.source) == (key, "flag")
    assert hint in error.message
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


def test_the_source_is_named(tmp_path: Path) -> None:
    path = file(tmp_path, "[topics]\npartitions = 0\n")
    with pytest.raises(InvalidSettings) as caught:
        load(path)
    assert caught.value.source == f"file {path}"
    with pytest.raises(InvalidSettings) as caught:
        load(env={"PENSTOCK_TOPICS_PARTITIONS": "0"})
    assert caught.value.source == "environment PENSTOCK_TOPICS_PARTITIONS"


def test_text_is_no_number_in_a_file(tmp_path: Path) -> None:
    """A file has types; only the environment and flags are all text."""
    with pytest.raises(InvalidSettings, match=r"topics\.partitions"):
        load(file(tmp_path, '[topics]\npartitions = "2"\n'))


@pytest.mark.parametrize(
    "content",
    [
        b"[durability\n",
        b"\xff\xfe",
        b"durability = 5\n",
        b"[durability.fsync]\nx = 1\n",
        b"a = " + b"[" * 100_000,
        b"#" * (MAX_FILE_BYTES + 1),
    ],
    ids=["not-toml", "not-utf8", "not-a-table", "too-deep", "nested", "too-large"],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidSettings, match=r"broken\.toml"):
        load(str(path))
    assert [problem.severity for problem in check(str(path))] == ["error"]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match=r"nowhere\.toml"):
        load(str(tmp_path / "nowhere.toml"))


def test_check_lists_everything_and_errors_first(tmp_path: Path) -> None:
    path = file(tmp_path, '[durability]\nfsync = "never"\n[topics]\npartitons = 1\n')
    problems = check(path, {"PENSTOCK_DELIVERY_MAX_ATTEMPTS": "0"}, {"limits.max_headers": "x"})
    assert [(problem.severity, problem.key) for problem in problems] == [
        ("error", "topics.partitons"),
        ("error", "delivery.max_attempts"),
        ("error", "limits.max_headers"),
        ("warning", "durability.fsync"),
    ]
    with pytest.raises(InvalidSettings, match="2 more"):
        load(path, {"PENSTOCK_DELIVERY_MAX_ATTEMPTS": "0"}, {"limits.max_headers": "x"})


@pytest.mark.parametrize(
    ("flags", "severity"),
    [
        ({"journal.tenant_quantum_bytes": "9MiB"}, "error"),
        ({"journal.side_file_bytes": "9MiB"}, "error"),
        ({"journal.commit_max_bytes": "65MiB"}, "error"),
        ({"sealing.min_segment_bytes": "65MiB"}, "error"),
        ({"limits.max_payload_bytes": "257MiB"}, "error"),
        ({"journal.file_bytes": "5GiB"}, "error"),
        ({"delivery.max_attempts": 3}, "warning"),
        ({"durability.fsync": "never"}, "warning"),
        ({"sealing.enabled": False}, "warning"),
        ({"media.codec": "yaml"}, "warning"),
        ({"media.compressor": "brotli"}, "warning"),
        ({"retention.write_once": True, "retention.max_bytes": "1GB"}, "warning"),
    ],
)
def test_fields_that_do_not_fit_together(flags: dict[str, Any], severity: str) -> None:
    (problem,) = check(flags=flags)
    assert (problem.severity, problem.source, problem.key) == (severity, "flag", next(iter(flags)))
    if severity == "error":
        with pytest.raises(InvalidSettings):
            load(flags=flags)
    else:
        load(flags=flags)


def test_a_rule_stays_silent_about_a_value_that_is_already_wrong() -> None:
    flags = {"sealing.min_segment_bytes": "65MiB", "sealing.target_segment_bytes": "x"}
    assert [problem.key for problem in check(flags=flags)] == ["sealing.target_segment_bytes"]


@given(
    name=st.sampled_from(
        [f"{g}.{f}" for g in field_types(Settings) for f in field_types(GROUPS[g])]
    )
    | st.text(),
    value=st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.lists(st.integers()),
)
def test_whatever_is_written_gives_settings_or_a_typed_error(name: str, value: Any) -> None:
    try:
        settings = load(flags={name: value})
    except InvalidSettings:
        return
    assert msgspec.convert(msgspec.to_builtins(settings), Settings) == settings


@given(value=st.integers(1, 2**50), unit=st.sampled_from(["bytes", "s", "ms"]))
def test_a_shown_quantity_reads_back(value: int, unit: str) -> None:
    assert parse(show(value, unit).replace("min", "m"), unit) == value


@pytest.mark.parametrize("text", ["", "MiB", "1e5", "1,5", "0x10", "9" * 19, "1 2", "²"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text, "bytes")


def test_units_come_from_names() -> None:
    assert unit_of("fsync_interval_ms") == "ms"
    assert (
        unit_of("replays_per_minute") == unit_of("max_headers") == unit_of("max_batch_events") == ""
    )


def test_the_reference_page_is_what_the_settings_print() -> None:
    """Print it again: python -c "from penstock.model.settings_loader import reference; print(reference(), end='')"."""
    assert (ROOT / "docs/reference/settings.md").read_text() == reference()
