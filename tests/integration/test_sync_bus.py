"""The blocking facade: the same bus for code that has no event loop."""

from __future__ import annotations

import threading

import pytest

import penstock


def test_publish_subscribe_replay_and_desks(tmp_path) -> None:
    with penstock.connect_sync(tmp_path / "data") as bus:
        assert bus.publish("orders", {"id": 7}).offset == 0
        assert bus.publish_many("orders", [b"a", b"b"]).count == 2
        with bus.subscribe("orders", group="g") as events:
            for number, event in enumerate(events, 1):
                assert event.attempt == 1
                event.ack()
                if number == 3:
                    break
        assert [event.payload for event in bus.replay("orders")] == [b'{"id":7}', b"a", b"b"]
        assert [topic.name for topic in bus.topics.list()] == ["orders"]
        assert bus.groups.info("g").lag == 0
    with penstock.connect_sync(tmp_path / "data") as bus:
        assert len(list(bus.replay("orders"))) == 3


def test_get_with_a_timeout_and_nack() -> None:
    with penstock.connect_sync("mem:") as bus, bus.subscribe("orders", group="g") as events:
        assert events.get(timeout_s=0.05) is None
        bus.publish("orders", b"a")
        event = events.get(timeout_s=5)
        event.nack(delay_s=0.0)
        assert events.get(timeout_s=5).attempt == 2


def test_a_transaction_is_all_or_nothing() -> None:
    with penstock.connect_sync("mem:") as bus:
        with pytest.raises(ValueError, match="no"), bus.transaction() as tx:
            tx.publish("orders", b"never")
            raise ValueError("no")
        with bus.transaction() as tx:
            tx.publish("orders", b"yes")
        assert [event.payload for event in bus.replay("orders")] == [b"yes"]


def test_errors_come_through_as_they_are() -> None:
    with penstock.connect_sync("mem:") as bus:
        with pytest.raises(penstock.InvalidTopic):
            bus.publish("a b", b"")
        with pytest.raises(penstock.UnknownTopic):
            bus.topics.info("nothing")
        with pytest.raises(penstock.UnknownTopic):
            list(bus.replay("nothing"))


def test_many_threads_share_one_bus() -> None:
    with penstock.connect_sync("mem:") as bus:
        threads = [
            threading.Thread(target=lambda: [bus.publish("orders", b"x") for _ in range(20)])
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [event.offset for event in bus.replay("orders")] == list(range(160))


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    with penstock.connect_sync("mem:") as bus:
        bus.publish("orders", b"a")
    assert threading.active_count() <= before
