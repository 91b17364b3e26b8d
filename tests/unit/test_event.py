"""Event, message id, receipt: small values that say what they mean."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.batch import EventBatch
from penstock.model.errors import InvalidInput, NotLeased, UnknownTopic
from penstock.model.event import MessageId, Receipt


@given(
    st.from_regex(r"[a-z]{1,5}(\.[a-z0-9]{1,5}){0,3}", fullmatch=True),
    st.integers(0, 2**31),
    st.integers(0, 2**63),
)
def test_a_message_id_reads_back(topic: str, partition: int, offset: int) -> None:
    place = MessageId(topic, partition, offset)
    assert MessageId.parse(str(place)) == place


@pytest.mark.parametrize(
    "text",
    ["", "orders", "orders/0", "/0/1", "orders/x/1", "orders/0/-1", "orders/0/1/2", "orders/0/1.5"],
)
def test_what_is_no_message_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="no message id"):
        MessageId.parse(text)


def test_a_receipt_lists_every_message_across_partitions() -> None:
    parts = (Receipt("t", 1, 5, 2, b""), Receipt("t", 0, 9, 1, b""))
    assert [str(each) for each in Receipt("t", 1, 5, 3, b"", parts=parts).ids()] == [
        "t/1/5",
        "t/1/6",
        "t/0/9",
    ]


def test_an_event_tells_its_times_key_and_value() -> None:
    batch = EventBatch.build(
        "orders", [b'{"id": 7}'], keys=[b"k"], times_us=1_700_000_000_000_000, codec="json",
        expires_us=[0], priority=[4], tenant="acme",
    )  # fmt: skip
    event = batch.event(0)
    assert event.value() == {"id": 7}
    assert event.value(dict[str, int]) == {"id": 7}
    assert event.time == datetime.fromtimestamp(1_700_000_000, tz=UTC)
    assert (event.expires_us, event.priority, event.tenant, event.key) == (None, 4, "acme", b"k")


@pytest.mark.parametrize("call", ["ack", "nack", "extend", "reject"])
async def test_an_event_that_was_read_cannot_be_settled(call: str) -> None:
    event = EventBatch.build("orders", [b"a"]).event(0)
    with pytest.raises(NotLeased) as caught:
        await getattr(event, call)()
    assert caught.value.id == "orders/0/0"


def test_errors_keep_their_data_across_processes() -> None:
    error = pickle.loads(pickle.dumps(UnknownTopic("no topic", topic="orders")))
    assert (error.code, error.topic, error.message) == ("notfound.topic", "orders", "no topic")
    with pytest.raises(AttributeError):
        _ = error.nothing
