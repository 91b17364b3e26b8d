"""The blocking facade: the same bus for code that has no event loop."""

from __future__ import annotations

import concurrent.futures
import gc
import inspect
import signal
import subprocess
import sys
import threading

import pytest

import penstock
from penstock.bus import admin, drafting, sync


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


def test_handlers_of_a_blocking_bus_handle_retry_and_answer() -> None:
    handled: list[int] = []
    done = threading.Event()
    bus = penstock.connect_sync("mem:")

    @bus.handler("orders", group="billing", retry=penstock.Retry(ladder_ms=(1,), max_attempts=3))
    def bill(order: dict, event: penstock.Event) -> None:
        if order["id"] == 2 and event.attempt == 1:
            raise RuntimeError("not yet")
        bus.publish("bills", {"order": order["id"]})  # a handler may call its bus
        handled.append(order["id"])
        if len(handled) == 3:
            done.set()

    with bus:

        @bus.handler("double", group="answers")
        def double(value: int) -> int:
            return 2 * value

        bus.ready()
        for number in (1, 2, 3):
            bus.publish("orders", {"id": number})
        assert done.wait(30)
        assert sorted(handled) == [1, 2, 3]
        assert {event.value()["order"] for event in bus.replay("bills")} == {1, 2, 3}
        assert bus.request("double", 21, timeout_s=30) == 42


def test_events_of_a_blocking_bus_are_events_and_show_what_they_are() -> None:
    with penstock.connect_sync("mem:") as bus, bus.subscribe("orders", group="g") as events:
        bus.publish("orders", b"a", key="k")
        event = next(iter(events))
        assert isinstance(event, penstock.Event)
        assert (event.key, event.attempt) == (b"k", 1)
        assert repr(event) == "SyncEvent(id='orders/0/0', attempt=1, payload=b'a')"
        events.ack([event])
        assert repr(bus) == "<SyncBus>"
        bus.flush()
        assert bus.groups.info("g").lag == 0
        assert next(bus.replay("orders")).payload == b"a"


def test_a_bus_that_is_dropped_refused_or_closed_twice_leaves_no_thread(tmp_path) -> None:
    before = set(threading.enumerate())
    bus = penstock.connect_sync("mem:")
    bus.open()
    bus.close()
    bus.close()
    with pytest.raises(penstock.BusClosed):
        bus.publish("orders", b"")
    (tmp_path / "file").write_text("no folder")
    with (
        pytest.raises((OSError, penstock.PenstockError)),
        penstock.connect_sync(tmp_path / "file" / "data"),
    ):
        pass
    with pytest.raises(penstock.UnknownScheme):
        penstock.connect_sync("what://ever")
    for _ in range(3):
        penstock.connect_sync("mem:").handler("orders", group="g")  # never opened, never closed
    gc.collect()
    assert set(threading.enumerate()) <= before


def test_replay_hands_whole_batches_from_thread_to_thread(tmp_path) -> None:
    """The cost that made a blocking replay a hundred times slower was one crossing for each event."""
    with penstock.connect_sync(tmp_path / "data") as bus:
        bus.publish_many("orders", [b"x"] * 20_000)
        crossings = 0
        thread = threading.current_thread()
        wait = concurrent.futures.Future.result

        def counted(self, timeout=None):
            nonlocal crossings
            crossings += threading.current_thread() is thread
            return wait(self, timeout)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(concurrent.futures.Future, "result", counted)
            assert sum(1 for _ in bus.replay("orders")) == 20_000
        assert crossings < 100


def test_waiting_on_the_loop_itself_is_refused() -> None:
    with penstock.connect_sync("mem:") as bus:
        seen: list[BaseException] = []
        told = threading.Event()

        @bus.handler("orders", group="g", retry=penstock.Retry(ladder_ms=(1,), max_attempts=1))
        async def wrong(value: int) -> None:
            try:
                bus.publish("other", value)
            except penstock.InvalidInput as error:
                seen.append(error)
            told.set()

        bus.publish("orders", 1)
        assert told.wait(30)
        assert "plain function" in str(seen[0])


def test_a_handler_may_close_its_blocking_bus() -> None:
    """B8: it returns at once there, and `run` ends when the handlers have finished."""
    bus = penstock.connect_sync("mem:")
    seen: list[int] = []

    @bus.handler("orders", group="g")
    def last(value: int) -> None:
        seen.append(value)
        bus.close()
        seen.append(value)

    bus.open()
    bus.publish("orders", 1)
    bus.run()
    assert seen == [1, 1]
    with pytest.raises(penstock.BusClosed):
        bus.publish("orders", 2)


SERVING = """
import penstock, sys, threading, time
bus = penstock.connect_sync(sys.argv[1])
@bus.handler("orders", group="g")
def slow(value: int) -> None:
    print("begun", flush=True)
    time.sleep(1)
    print("done", flush=True)
threading.Timer(0.5, lambda: bus.publish("orders", 1)).start()
bus.run()
print("closed", flush=True)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, -signal.SIGINT)])
def test_signals_let_a_blocking_handler_finish(tmp_path, number: int, code: int) -> None:
    """B2: SIGTERM ends `run`, Ctrl-C too; what is at work is finished and settled."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVING, str(tmp_path / "data")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert out.startswith("done\n")
    assert process.returncode == code
    with penstock.connect_sync(tmp_path / "data") as bus:
        assert bus.groups.info("g").lag == 0


EARLY = """
import penstock, signal, sys, threading
from penstock.bus.bus import Bus
run = Bus.run
async def terminated_first(self, **options):
    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
    await run(self, **options)
Bus.run = terminated_first
bus = penstock.connect_sync(sys.argv[1])
bus.handler("orders", group="g")(lambda value: None)
if sys.argv[2] == "opened":
    bus.open()
bus.run()
print("closed", flush=True)
"""


@pytest.mark.parametrize("state", ["opened", "new"])
def test_a_signal_that_comes_as_run_begins_is_heeded(tmp_path, state: str) -> None:
    """B2: whether the bus is open by then or not."""
    words = [sys.executable, "-c", EARLY, str(tmp_path / "data"), state]
    for _ in range(3):
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


PAIRS = [
    (penstock.Bus, sync.SyncBus),
    (admin.Topics, sync.SyncTopics),
    (admin.Groups, sync.SyncGroups),
    (admin.DeadLetters, sync.SyncDeadLetters),
    (admin.Audit, sync.SyncAudit),
    (admin.Routes, sync.SyncRoutes),
    (admin.Schedules, sync.SyncSchedules),
    (penstock.Subscription, sync.SyncSubscription),
    (penstock.Transaction, sync.SyncTransaction),
    (penstock.Event, sync.SyncEvent),
]
ONLY_ASYNC = {
    "Bus": {"draft", "draft_many", "place", "wall_us"},  # for engines and tests
    "Subscription": {"at_hand", "cursor"},  # for handlers and transactions
}


@pytest.mark.parametrize(("original", "blocking"), PAIRS, ids=lambda each: each.__name__)
def test_each_method_has_a_blocking_form_with_the_same_parameters(original, blocking) -> None:
    for name, method in vars(original).items():
        if name.startswith("_") or name in ONLY_ASYNC.get(original.__name__, ()):
            continue
        form = getattr(blocking, name)
        if inspect.isfunction(method):
            assert inspect.getdoc(form), f"{blocking.__name__}.{name}"
            assert not inspect.iscoroutinefunction(inspect.getattr_static(blocking, name))
            theirs = list(inspect.signature(form).parameters.values())
            ours = list(inspect.signature(method).parameters.values())
            assert [each.name for each in theirs] == [each.name for each in ours]
            for each, our in zip(theirs[1:], ours[1:], strict=True):
                assert each.annotation.removeprefix("Sync") == our.annotation, (
                    f"{name}({each.name})"
                )


def test_connect_sync_takes_what_connect_takes() -> None:
    """D1: a token, for example."""
    theirs, ours = (inspect.signature(each) for each in (penstock.connect_sync, penstock.connect))
    assert theirs.parameters == ours.parameters


@pytest.mark.parametrize(
    ("options", "method"),
    [
        (drafting.PublishOptions, penstock.Bus.publish),
        (drafting.PublishManyOptions, penstock.Bus.publish_many),
    ],
    ids=["publish", "publish_many"],
)
def test_a_transaction_names_the_options_of_its_publishes(options, method) -> None:
    """D1, D7: an editor completes them, and a type checker knows a misspelt one."""
    taken = inspect.signature(method).parameters.values()
    named = {each.name: each.annotation for each in taken if each.kind is each.KEYWORD_ONLY}
    for never in ("delay_s", "deliver_at"):
        del named[never]
    assert {name: hint.__forward_arg__ for name, hint in options.__annotations__.items()} == named
