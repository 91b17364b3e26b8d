"""Admission: every limit of T11 with its answer, quotas of X5, replays of X6, and fairness."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import admission as module
from penstock.core.admission import (
    ADMITTED,
    Admission,
    AdmissionLimits,
    Decision,
    Incoming,
    Refusal,
    TenantLimits,
    Waiting,
)
from penstock.model.errors import Deferred, Dropped, Rejected, ReplayLimited, Throttled

OFF = AdmissionLimits(
    max_inflight_per_consumer=None,
    max_per_topic_queue=None,
    max_queued_direct=None,
    max_global_ingress=None,
)


def tenant(**limits: object) -> Admission:
    return Admission(msgspec.structs.replace(OFF, default=TenantLimits(**limits)))  # type: ignore[arg-type]


def publish(admission: Admission, events: int = 1, size: int = 0, **more: object) -> Decision:
    name = more.pop("tenant", "acme")
    return admission.admit(name, "orders", events, size, **{"now_s": 0.0, **more})  # type: ignore[arg-type]


def verdict(decision: Decision) -> tuple[str, str]:
    return decision.kind, decision.limit


def test_the_defaults_are_those_of_t11() -> None:
    limits = AdmissionLimits()
    assert limits.max_inflight_per_consumer == 1024
    assert limits.max_per_topic_queue == 256
    assert limits.max_queued_direct == 4096
    assert limits.max_global_ingress == 8192


def test_with_everything_off_everything_comes_in() -> None:
    admission = Admission(OFF)
    for _ in range(5):
        assert publish(admission, 1_000_000, 10**12) is ADMITTED
    assert admission.admit_replay("acme", 0.0) is ADMITTED


def test_queues_of_direct_consumers_count_events_not_frames() -> None:
    admission = Admission(AdmissionLimits())
    assert publish(admission, 5000) is ADMITTED, "nobody reads it directly"
    admission.ingress_done("acme", 5000, 0)
    behind = Waiting(of_topic=200, of_consumer=4000)
    assert publish(admission, 56, waiting=behind) is ADMITTED
    assert verdict(publish(admission, 57, waiting=behind)) == ("deferred", "max_per_topic_queue")
    far = Waiting(of_topic=0, of_consumer=4000)
    assert publish(admission, 96, waiting=far) is ADMITTED
    assert verdict(publish(admission, 97, waiting=far)) == ("deferred", "max_queued_direct")
    assert publish(admission, 5000, waiting=Waiting(0, 0)) is ADMITTED, "or it never would be"


def test_a_peek_refuses_what_is_over_the_rate_and_takes_nothing() -> None:
    admission = tenant(events_per_s=10.0, burst_s=1.0)
    assert admission.peek("acme", "orders", 1_000, 0.0) is ADMITTED  # not met yet
    assert publish(admission, 6) is ADMITTED
    for _ in range(3):
        assert admission.peek("acme", "orders", 4, 0.0) is ADMITTED
    refusal = admission.peek("acme", "orders", 5, 0.0)
    assert verdict(refusal) == ("throttled", "events_per_s")
    assert refusal.retry_after_s == pytest.approx(0.25)
    assert publish(admission, 4) is ADMITTED


def test_the_global_ingress_ends_exactly_at_its_limit() -> None:
    admission = Admission(AdmissionLimits(max_per_topic_queue=None))
    assert publish(admission, 8000) is ADMITTED
    assert verdict(publish(admission, 193)) == ("deferred", "max_global_ingress")
    assert publish(admission, 192) is ADMITTED
    assert verdict(publish(admission, 1)) == ("deferred", "max_global_ingress")
    admission.ingress_done("acme", 8000, 0)
    assert publish(admission, 8000) is ADMITTED
    assert verdict(publish(admission, 8193)) == ("dropped", "max_global_ingress")


def test_a_tenant_below_its_fair_share_comes_in_when_others_used_up_the_rest() -> None:
    admission = Admission(msgspec.structs.replace(OFF, max_global_ingress=100))
    assert publish(admission, 100, tenant="noisy") is ADMITTED
    assert verdict(publish(admission, 51, tenant="quiet")) == ("deferred", "max_global_ingress")
    assert publish(admission, 50, tenant="quiet") is ADMITTED
    assert verdict(publish(admission, 1, tenant="quiet")) == ("deferred", "max_global_ingress")
    assert verdict(publish(admission, 1, tenant="noisy")) == ("deferred", "max_global_ingress")
    assert publish(admission, 33, tenant="third") is ADMITTED
    admission.ingress_done("noisy", 100, 0)
    assert publish(admission, 17, tenant="noisy") is ADMITTED


def test_tenants_that_are_done_no_longer_shrink_the_share() -> None:
    admission = Admission(msgspec.structs.replace(OFF, max_global_ingress=100))
    for name in "abcdefgh":
        publish(admission, 5, tenant=name)
        admission.ingress_done(name, 5, 0)
    publish(admission, 100, tenant="noisy")
    assert publish(admission, 50, tenant="quiet") is ADMITTED


def test_fair_shares_stop_at_twice_the_limit() -> None:
    admission = Admission(msgspec.structs.replace(OFF, max_global_ingress=100))
    publish(admission, 100, tenant="noisy")
    admitted = 100
    for number in range(2, 50):
        if publish(admission, 100 // number, tenant=f"t{number}") is ADMITTED:
            admitted += 100 // number
    assert 150 < admitted <= 200


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60), st.booleans()), max_size=80))
def test_the_shared_limit_is_bounded_fair_and_balanced(
    steps: list[tuple[str, int, bool]],
) -> None:
    admission = Admission(msgspec.structs.replace(OFF, max_global_ingress=100))
    used = dict.fromkeys("abcd", 0)
    for name, events, done in steps:
        if done:
            admission.ingress_done(name, used[name], 0)
            used[name] = 0
            continue
        total = sum(used.values())
        active = sum(1 for other in used if used[other] or other == name)
        fair = used[name] + events <= 100 // active and total + events <= 200
        admitted = publish(admission, events, tenant=name) is ADMITTED
        assert admitted == (total + events <= 100 or fair)
        used[name] += events if admitted else 0
        assert sum(used.values()) <= 200


@given(
    st.lists(
        st.tuples(st.sampled_from(["noisy", "quiet"]), st.integers(1, 30), st.integers(0, 3000)),
        max_size=60,
    )
)
def test_a_noisy_neighbour_changes_nothing_for_others(steps: list[tuple[str, int, int]]) -> None:
    """The quiet tenant gets the same answers whether the noisy one exists or not."""
    limits = msgspec.structs.replace(
        AdmissionLimits(),
        max_global_ingress=None,
        default=TenantLimits(
            events_per_s=40, bytes_per_s=4000, storage_bytes=30_000, replays_per_minute=3
        ),
    )

    def answers(names: set[str]) -> list[Decision]:
        admission, found = Admission(limits), []
        for now, (name, events, size) in enumerate(steps):
            if name not in names:
                continue
            decision = admission.admit(name, "orders", events, size, now / 10)
            replay = admission.admit_replay(name, now / 10)
            if decision is ADMITTED:
                admission.ingress_done(name, events, size)
                admission.stored(name, size)
            if name == "quiet":
                found += [decision, replay]
        return found

    assert answers({"quiet"}) == answers({"quiet", "noisy"})


def test_overrides_replace_the_limits_of_everyone() -> None:
    admission = Admission(
        AdmissionLimits(
            tenants={"acme": TenantLimits(max_inflight=5000, max_queued=300, max_ingress=400)}
        )
    )
    assert verdict(publish(admission, 401)) == ("dropped", "max_ingress")
    assert publish(admission, 300) is ADMITTED
    assert verdict(publish(admission, 101)) == ("deferred", "max_ingress")
    admission.ingress_done("acme", 300, 0)
    crowd = Waiting(of_topic=1, of_consumer=4096, of_tenant=200)
    assert verdict(publish(admission, 101, waiting=crowd)) == ("deferred", "max_queued")
    assert publish(admission, 100, waiting=crowd) is ADMITTED


def test_a_rate_throttles_with_the_exact_time_to_wait() -> None:
    admission = tenant(events_per_s=100)
    assert publish(admission, 100) is ADMITTED
    refused = publish(admission, 25)
    assert verdict(refused) == ("throttled", "events_per_s")
    assert refused.retry_after_s == pytest.approx(0.25)
    assert publish(admission, 25, now_s=0.24).kind == "throttled"
    assert publish(admission, 25, now_s=0.25) is ADMITTED
    assert verdict(publish(admission, 101, now_s=99.0)) == ("dropped", "events_per_s")


def test_the_byte_rate_and_the_event_rate_are_taken_together_or_not_at_all() -> None:
    admission = tenant(events_per_s=10, bytes_per_s=1000, burst_s=2.0)
    assert publish(admission, 1, 2000) is ADMITTED
    refused = publish(admission, 15, 500)
    assert verdict(refused) == ("throttled", "bytes_per_s")
    assert refused.retry_after_s == pytest.approx(0.5)
    # The refused batch took no events: 19 of 20 are still there.
    assert publish(admission, 19, 0) is ADMITTED
    assert verdict(publish(admission, 1, 2001)) == ("dropped", "bytes_per_s")


def test_a_refused_batch_moves_no_gauge() -> None:
    admission = Admission(AdmissionLimits(default=TenantLimits(bytes_per_s=10)))
    publish(admission, 1, 10)
    for _ in range(100):
        assert publish(admission, 100, 5).kind == "throttled"
    admission.ingress_done("acme", 1, 10)
    with pytest.raises(AssertionError):
        admission.ingress_done("acme", 1, 0)


def test_time_that_runs_back_earns_nothing() -> None:
    admission = tenant(events_per_s=10)
    assert publish(admission, 10, now_s=1000.0) is ADMITTED
    for now in (0.0, 999.0, 5.0, 1000.0):
        assert publish(admission, 1, now_s=now).kind == "throttled"
    assert publish(admission, 1, now_s=1000.1) is ADMITTED
    assert publish(admission, 1, now_s=1000.1).kind == "throttled"


def test_the_storage_quota_counts_what_is_on_its_way() -> None:
    """X5: batches admitted together cannot overrun the quota between them."""
    admission = tenant(storage_bytes=1000)
    assert publish(admission, 1, 600) is ADMITTED
    assert verdict(publish(admission, 1, 401)) == ("throttled", "storage_bytes")
    assert publish(admission, 1, 400) is ADMITTED
    admission.ingress_done("acme", 1, 600)
    admission.stored("acme", 600)
    assert publish(admission, 1, 1).kind == "throttled"
    admission.stored("acme", -300)
    assert publish(admission, 1, 300) is ADMITTED
    assert verdict(publish(admission, 1, 1001)) == ("dropped", "storage_bytes")


def test_replays_are_limited_by_the_minute() -> None:
    """X6."""
    admission = tenant(replays_per_minute=2)
    assert admission.admit_replay("acme", 0.0) is ADMITTED
    assert admission.admit_replay("acme", 0.0) is ADMITTED
    refused = admission.admit_replay("acme", 10.0)
    assert refused.retry_after_s == pytest.approx(20.0)
    assert isinstance(refused.error(), ReplayLimited)
    assert "replay again after 20 s" in str(refused.error())
    assert admission.admit_replay("globex", 10.0) is ADMITTED
    assert admission.admit_replay("acme", 30.0) is ADMITTED
    never = tenant(replays_per_minute=0).admit_replay("acme", 0.0)
    assert isinstance(never.error(), ReplayLimited)


@pytest.mark.parametrize(
    ("kind", "error"), [("deferred", Deferred), ("throttled", Throttled), ("dropped", Dropped)]
)
def test_each_refusal_has_its_error(kind: str, error: type[Rejected]) -> None:
    refusal = Refusal(kind, "max_ingress", 7, 0.5)  # type: ignore[arg-type]
    decision = Decision(kind=refusal.kind, tenant="acme", topic="orders", refusal=refusal)
    raised = decision.error()
    assert type(raised) is error
    assert raised.data == {
        "limit": "max_ingress",
        "setting": "admission.tenants.acme.max_ingress",
        "value": 7,
        "tenant": "acme",
        "topic": "orders",
        "retry_after_s": 0.5,
    }
    assert "admission.tenants.acme.max_ingress = 7" in raised.message
    assert "nothing was stored" in raised.message


def test_a_used_up_rate_is_asked_again_when_that_is_worth_it() -> None:
    admission = tenant(events_per_s=1000)
    assert publish(admission, 1000) is ADMITTED
    assert publish(admission, 1).retry_after_s == pytest.approx(0.25)
    assert publish(admission, 400).retry_after_s == pytest.approx(0.4)
    assert publish(admission, 1, now_s=0.001) is ADMITTED, "it is advice, and no lock"


def test_limits_change_while_running() -> None:
    admission = tenant(events_per_s=10)
    assert publish(admission, 10) is ADMITTED
    raised = msgspec.structs.replace(OFF, default=TenantLimits(events_per_s=1000))
    admission.reload(raised)
    assert publish(admission, 300).retry_after_s == pytest.approx(0.3)
    admission.reload(OFF)
    assert publish(admission, 10**9) is ADMITTED
    admission.reload(msgspec.structs.replace(OFF, max_global_ingress=5))
    assert verdict(publish(admission, 1)) == ("deferred", "max_global_ingress")


def test_idle_tenants_are_forgotten_and_busy_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWEEP_TENANTS", 10)
    admission = tenant(events_per_s=10)
    publish(admission, 10, tenant="busy")
    admission.stored("keeper", 5)
    for number in range(1_000):
        name = f"t{number}"
        assert publish(admission, 1, tenant=name, now_s=float(number)) is ADMITTED
        admission.ingress_done(name, 1, 0)
    assert len(admission._tenants) <= 20
    assert {"busy", "keeper"} <= set(admission._tenants)


def batch(events: int, tenant: str = "acme", size: int = 0, **more: object) -> Incoming:
    return Incoming(tenant, "orders", events, size, **more)  # type: ignore[arg-type]


def test_the_batches_of_a_transaction_are_judged_as_one_and_taken_together() -> None:
    """T11: two that fit alone may be too much together, and then none of them uses anything up."""
    admission = tenant(events_per_s=10, max_ingress=12)
    assert verdict(admission.admit_together([batch(6), batch(6)], 0.0)) == (
        "dropped",
        "events_per_s",
    )
    assert verdict(admission.admit_together([batch(9), batch(9)], 0.0)) == (
        "dropped",
        "max_ingress",
    )
    refused = [batch(1, "other"), batch(4), batch(8)]
    assert admission.admit_together(refused, 0.0) is not ADMITTED
    assert admission.use() == {"acme": (0, 0), "other": (0, 0)}
    assert admission.admit_together([batch(4), batch(6), batch(3, "other")], 0.0) is ADMITTED
    assert admission.use() == {"acme": (0, 10), "other": (0, 3)}
    late = admission.admit_together([batch(1)], 0.0)
    assert (late.kind, late.limit, late.topic) == ("throttled", "events_per_s", "orders")
    for events in (4, 6):
        admission.ingress_done("acme", events, 0)
    assert admission.use()["acme"] == (0, 0)


def test_a_transaction_meets_every_limit_of_a_publish() -> None:
    """T11: queues of direct consumers, stored bytes and the ingress of all."""
    full = [batch(1, waiting=Waiting(256, 256))]
    assert verdict(Admission(AdmissionLimits()).admit_together(full, 0.0)) == (
        "deferred", "max_per_topic_queue",
    )  # fmt: skip
    parts = [batch(1, size=60), batch(1, size=60)]
    assert verdict(tenant(storage_bytes=100).admit_together(parts, 0.0)) == (
        "dropped", "storage_bytes",
    )  # fmt: skip
    admission = Admission(msgspec.structs.replace(OFF, max_global_ingress=10))
    assert publish(admission, 9) is ADMITTED
    assert admission.admit_together([batch(500)], 0.0) is ADMITTED, "it cannot come in pieces"
    assert verdict(admission.admit_together([batch(1)], 0.0)) == ("deferred", "max_global_ingress")
    assert publish(admission).kind == "deferred", "and it counts for everybody"
