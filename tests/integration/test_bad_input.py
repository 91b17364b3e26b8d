"""Bad input, each with a test: damage at rest, the wrong folder, a second writer, values nobody can store."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.engines.embedded.engine import EmbeddedEngine

ROOT = Path(penstock.__file__).resolve().parent.parent
FILLER = [random.Random(n).randbytes(8_000) for n in range(40)]
DEADLINE_S = 30.0


def python(code: str, *args: object, **options: Any) -> subprocess.Popen[str]:
    """A real second process."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(code), *map(str, args)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, **options,
    )  # fmt: skip


# -- damage at rest -------------------------------------------------------------------------------


async def fill(path: Path, small: Any) -> None:
    """A folder with everything in it: segments, journal, snapshot, side file, routes, audit."""
    settings = small(journal__side_file_bytes=50_000, sealing__grace_s=0.0)
    async with penstock.connect(path, settings=settings) as bus:
        await bus.publish_many("orders", [b"sealed %d" % n for n in range(50)])
        async with bus.subscribe("orders", group="billing") as sub:
            await (await sub.get(timeout_s=5)).ack()
        await bus.routes.put(penstock.Route("orders", "billing"))
        engine = bus.engine
        assert isinstance(engine, EmbeddedEngine)
        for _ in range(10):
            await bus.publish_many("filler", FILLER)
        for _ in range(200):
            await engine.maintenance.settle()
            if engine.log.manifest.sealed_to >= engine.journal.base:
                break
            await asyncio.sleep(0.01)
        await bus.publish("orders", random.Random(1).randbytes(60_000))
        await bus.publish("orders", b"last")


@pytest.fixture(scope="module")
def full_folder(tmp_path_factory, small) -> Path:
    path = tmp_path_factory.mktemp("full") / "data"
    asyncio.run(fill(path, small))
    return path


@pytest.fixture
def full(full_folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    shutil.copytree(full_folder, target)
    return target


def one(path: Path, pattern: str) -> Path:
    found = sorted(path.glob(pattern))
    assert found, f"no {pattern} in the folder"
    return found[-1]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    # Not near the end, where an interrupted write would be: in the middle of what is there.
    written = len(bytes(data).rstrip(b"\0"))
    data[0 if path.suffix == ".json" else written // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data.rstrip(b"\0")) // 2])


DAMAGE = {"missing": Path.unlink, "flipped": flip, "cut": cut}


async def use(path: Path, small: Any) -> None:
    """Open the folder, read all of it, verify the audit chain."""
    async with penstock.connect(path, settings=small()) as bus:
        payloads = [event.payload async for event in bus.replay("orders")]
        assert len(payloads) == 52
        assert payloads[:50] == [b"sealed %d" % n for n in range(50)]
        async for event in bus.replay("filler"):
            assert event.payload in FILLER
        await bus.routes.list()
        verdict = await bus.audit.verify()
        if not verdict.ok:
            raise penstock.Corrupted("the audit chain is broken")


async def test_the_folder_is_fine_before_it_is_damaged(full: Path, small) -> None:
    for pattern in ("journal/*.jnl", "segments/*.parquet", "segments/manifest*", "state/*.snap",
                    "side/*", "audit/*", "routes.json"):  # fmt: skip
        one(full, pattern)
    await use(full, small)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize(
    "pattern",
    [
        "journal/*.jnl", "segments/*.parquet", "segments/manifest*.log", "state/*.snap", "side/*",
        "routes.json", "penstock.json", "audit/*.ndjson",
    ],
)  # fmt: skip
async def test_damage_is_detected_and_nothing_is_deleted(
    full: Path, small, hashes_of, pattern: str, kind: str
) -> None:
    target = one(full, pattern)
    DAMAGE[kind](target)
    if pattern == "routes.json" and kind == "missing":
        pytest.skip("a folder without routes has no such file: it cannot be told")
    before = hashes_of(full)
    with pytest.raises(penstock.PenstockError) as caught:
        await use(full, small)
    assert isinstance(caught.value, penstock.StorageError | penstock.InvalidInput), caught.value
    if (pattern, kind) != ("segments/manifest*.log", "cut"):  # half a record is cut off as torn
        name = str(target.relative_to(full))
        assert hashes_of(full).get(name) == before.get(name), "the damaged file was changed"
    kept = hashes_of(full)
    assert all(
        name in kept for name in before if name.startswith(("segments/seg", "side/", "audit/"))
    )


# -- folders and writers --------------------------------------------------------------------------


async def test_a_folder_of_a_newer_format_is_refused_and_left_alone(full, small, hashes_of) -> None:
    (full / "penstock.json").write_text(json.dumps({"format": 99}))
    before = hashes_of(full)
    with pytest.raises(penstock.FormatTooNew) as caught:
        await use(full, small)
    assert caught.value.version == 99
    assert hashes_of(full) == before


async def test_what_is_no_data_folder_is_refused_and_left_alone(tmp_path, hashes_of) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(penstock.NotADataFolder):
        await penstock.connect(tmp_path).open()
    assert list(hashes_of(tmp_path)) == ["thesis.tex"]
    with pytest.raises(penstock.PenstockError):
        await penstock.connect(f"{tmp_path}/nothing?mode=ro").open()
    assert not (tmp_path / "nothing").exists()


async def test_a_path_that_is_a_file_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises((penstock.StorageError, OSError)):
        await penstock.connect(tmp_path / "file").open()


HOLD = """
    import asyncio, sys, penstock
    async def main():
        async with penstock.connect(sys.argv[1]) as bus:
            await bus.publish("orders", b"mine")
            print("open", flush=True)
            sys.stdin.readline()
    asyncio.run(main())
"""


async def test_a_second_writer_is_refused_by_the_name_of_the_first(tmp_path) -> None:
    first = python(HOLD, tmp_path / "data", stdin=subprocess.PIPE)
    try:
        assert first.stdout.readline() == "open\n"
        with pytest.raises(penstock.FolderLocked) as caught:
            await penstock.connect(tmp_path / "data").open()
        assert json.loads(caught.value.holder)["pid"] == first.pid
        assert f"process {first.pid} on " in caught.value.message
        assert "mode=ro" in caught.value.message
        async with penstock.connect(f"{tmp_path}/data?mode=ro") as reader:
            assert [e.payload async for e in reader.replay("orders")] == [b"mine"]
        first.kill()
        first.wait()
        async with penstock.connect(tmp_path / "data") as bus:  # the lock died with its holder
            await bus.publish("orders", b"ours")
    finally:
        first.kill()
        first.communicate()


CTRL_C = """
    import asyncio, sys, penstock
    async def main():
        async with penstock.connect(sys.argv[1]) as bus:
            number = 0
            while True:
                payloads = [b"%d" % n for n in range(number, number + 500)]
                receipt = await bus.publish_many("orders", payloads)
                number += 500
                print(receipt.offset + receipt.count, flush=True)
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        sys.exit(130)
"""


async def test_ctrl_c_in_the_middle_of_publish_many_keeps_what_was_acknowledged(tmp_path) -> None:
    process = python(CTRL_C, tmp_path / "data")
    acked = 0
    for _ in range(3):
        acked = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, errors
    for line in rest.split():
        acked = int(line)
    async with penstock.connect(tmp_path / "data") as bus:
        payloads = [event.payload async for event in bus.replay("orders")]
    assert len(payloads) >= acked
    assert len(payloads) % 500 == 0, "half a batch was stored"
    assert payloads == [b"%d" % n for n in range(len(payloads))]


async def test_kill_minus_nine_keeps_what_was_acknowledged(tmp_path) -> None:
    process = python(CTRL_C, tmp_path / "data")
    acked = int(process.stdout.readline())
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    rest, _ = process.communicate(timeout=DEADLINE_S)
    for line in rest.split("\n")[:-1]:
        acked = int(line)
    async with penstock.connect(tmp_path / "data") as bus:
        payloads = [event.payload async for event in bus.replay("orders")]
        assert len(payloads) >= acked
        assert payloads == [b"%d" % n for n in range(len(payloads))]
        assert (await bus.publish("orders", b"next")).offset == len(payloads)


# -- values ---------------------------------------------------------------------------------------

BAD_PUBLISHES = {
    "empty topic": ({"topic": ""}, penstock.InvalidTopic),
    "wildcard topic": ({"topic": "orders.*"}, penstock.InvalidTopic),
    "topic with a space": ({"topic": "orders created"}, penstock.InvalidTopic),
    "long topic": ({"topic": "a." * 200 + "a"}, penstock.InvalidTopic),
    "topic of the bus": ({"topic": "_dlq.acme"}, penstock.InvalidTopic),
    "header that is a number": ({"headers": {"a": 1}}, penstock.InvalidHeaders),
    "header name that is bytes": ({"headers": {b"a": "b"}}, penstock.InvalidHeaders),
    "too many headers": ({"headers": {str(n): "" for n in range(65)}}, penstock.InvalidHeaders),
    "headers too large": ({"headers": {"a": "x" * 20_000}}, penstock.InvalidHeaders),
    "header with half a character": ({"headers": {"a": "\ud800"}}, penstock.InvalidInput),
    "key that is a number": ({"key": 7}, penstock.InvalidInput),
    "key too large": ({"key": b"x" * 2_000}, penstock.InvalidInput),
    "unknown codec": ({"codec": "morse"}, penstock.UnknownCodec),
    "value the codec cannot take": ({"value": object()}, penstock.EncodeFailed),
    "raw that is not bytes": ({"value": "text", "codec": "raw"}, penstock.EncodeFailed),
    "token of a wrong size": ({"token": b"short"}, penstock.InvalidInput),
    "token and key": ({"token": bytes(16), "idempotency_key": "a"}, penstock.InvalidInput),
    "priority too high": ({"priority": 10}, penstock.InvalidInput),
    "priority below zero": ({"priority": -1}, penstock.InvalidInput),
    "ttl of nothing": ({"ttl_s": 0}, penstock.InvalidInput),
    "delay below zero": ({"delay_s": -1}, penstock.InvalidInput),
    "delay and time": ({"delay_s": 1, "deliver_at": 5.0}, penstock.InvalidInput),
    "time nobody can read": ({"deliver_at": "next tuesday-ish"}, penstock.InvalidInput),
    "partition that is not there": ({"partition": 5}, penstock.NotFound),
    "payload over the limit": ({"value": b"x" * 1_100_000}, penstock.PayloadTooLarge),
}


@pytest.mark.parametrize("name", BAD_PUBLISHES)
async def test_a_publish_nobody_can_store_is_refused_and_leaves_nothing(name: str) -> None:
    change, error = BAD_PUBLISHES[name]
    options = {"topic": "orders", "value": b"x", **change}
    async with penstock.connect("mem:", limits__max_payload_bytes=1 << 20) as bus:
        await bus.publish("orders", b"fine")
        with pytest.raises(error) as caught:
            await bus.publish(options.pop("topic"), options.pop("value"), **options)
        assert caught.value.code
        assert [event.payload async for event in bus.replay("orders")] == [b"fine"]
        await asyncio.wait_for(bus.publish("orders", b"goes on"), 5)


BAD_BATCHES = {
    "nothing": ([], {}),
    "keys too short": ([b"a", b"b"], {"keys": ["k"]}),
    "headers too long": ([b"a"], {"headers": [{}, {}]}),
    "tokens too short": ([b"a", b"b"], {"tokens": [bytes(16)]}),
    "keys of idempotency too short": ([b"a", b"b"], {"idempotency_keys": ["x"]}),
    "times too short": ([b"a", b"b"], {"event_times": [1]}),
    "priorities too long": ([b"a"], {"priorities": [1, 2]}),
    "a string": ("abc", {}),
    "one number": (7, {}),
    "a table without payload": (pa.table({"value": [b"a"]}), {}),
    "a table with keys beside it": (pa.table({"payload": [b"a"]}), {"keys": ["k"]}),
    "an empty table": (pa.table({"payload": pa.array([], pa.binary())}), {}),
    "a value the codec cannot take": ([b"a", object()], {}),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
async def test_a_batch_nobody_can_store_is_refused_as_a_whole(mem, name: str) -> None:
    values, options = BAD_BATCHES[name]
    await mem.publish("orders", b"fine")
    with pytest.raises(penstock.InvalidInput):
        await mem.publish_many("orders", values, **options)
    assert [event.payload async for event in mem.replay("orders")] == [b"fine"]


async def test_too_many_events_in_a_call_are_refused(small) -> None:
    async with penstock.connect("mem:", limits__max_batch_events=3) as bus:
        with pytest.raises(penstock.InvalidBatch):
            await bus.publish_many("orders", [b"x"] * 4)


@pytest.mark.parametrize(
    "pattern", ["", "orders..created", "a b", "#.#.#" * 60, "or*ders", "a.", ".a"]
)
async def test_a_pattern_outside_the_grammar_is_refused(mem, pattern: str) -> None:
    with pytest.raises(penstock.InvalidInput):
        mem.subscribe(pattern, group="g")
    with pytest.raises(penstock.InvalidInput):
        _ = [event async for event in mem.replay(pattern)]


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "stream"}, {"order": "random"}, {"max_inflight": 0}, {"lease_s": 0},
        {"group": "_hidden"}, {"group": "x" * 200}, {"group": ""}, {"start": "someday"},
    ],
)  # fmt: skip
async def test_a_subscription_that_makes_no_sense_is_refused(mem, options) -> None:
    with pytest.raises(penstock.InvalidInput):
        async with mem.subscribe("orders", **{"group": "g", **options}):
            pass


@pytest.mark.parametrize(
    "url", ["nats://localhost", "penstock://", "ftp://x", "./data?mode=rx", "./data?what=1"]
)
def test_a_url_nobody_serves_is_refused(url: str) -> None:
    with pytest.raises(penstock.UnknownScheme):
        penstock.connect(url)


def test_a_compressor_that_is_not_there_and_settings_that_are_wrong() -> None:
    with pytest.raises(penstock.InvalidSettings):
        penstock.connect("mem:", durability__fsync="sometimes")
    with pytest.raises(penstock.InvalidSettings):
        penstock.connect("mem:", durability__speed="fast")
    with pytest.raises(penstock.InvalidSettings):
        penstock.connect("mem:", settings=penstock.Settings(), durability__fsync="never")


async def test_an_unknown_compressor_is_refused_when_the_bus_opens(tmp_path) -> None:
    for url in ("mem:", str(tmp_path / "data")):
        with pytest.raises(penstock.UnknownCompressor):
            await asyncio.wait_for(penstock.connect(url, media__compressor="shrinkray").open(), 5)
    async with penstock.connect(tmp_path / "data") as bus:  # the lock was let go
        await bus.publish("orders", b"fine")
