"""`WorkerThread` runs calls one after another, returns results and errors, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from penstock.engines.embedded.runtime import WorkerThread


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    worker = WorkerThread("test-worker")
    yield worker
    worker.close()


async def test_a_result_comes_back_from_the_one_thread(worker: WorkerThread) -> None:
    assert await worker.run(divmod, 7, 3) == (2, 1)
    threads = {await worker.run(threading.current_thread) for _ in range(3)}
    assert {thread.name for thread in threads} == {"test-worker"}
    assert len(threads) == 1


async def test_work_is_done_in_the_order_it_came(worker: WorkerThread) -> None:
    done: list[int] = []
    await asyncio.gather(*(worker.run(done.append, number) for number in range(100)))
    assert done == list(range(100))


class Halt(BaseException):
    """What no `except Exception` catches: a simulated crash is such a thing."""


@pytest.mark.parametrize("error", [ValueError("no"), Halt()])
async def test_an_exception_is_passed_on_and_the_thread_lives_on(
    worker: WorkerThread, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await worker.run(fail)
    assert caught.value is error
    assert await worker.run(int) == 0


async def test_a_closed_worker_takes_no_work(worker: WorkerThread) -> None:
    await worker.run(int)
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="test-worker is closed"):
        await worker.run(int)


async def test_a_worker_that_never_worked_can_be_closed(worker: WorkerThread) -> None:
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        await worker.run(int)


async def test_what_waits_when_it_is_closed_is_done_first(worker: WorkerThread) -> None:
    go, done = threading.Event(), []
    tasks = [asyncio.create_task(worker.run(go.wait))]
    tasks += [asyncio.create_task(worker.run(done.append, number)) for number in range(3)]
    await asyncio.sleep(0)
    assert done == []
    threading.Timer(0.05, go.set).start()
    worker.close()
    assert done == [0, 1, 2]
    await asyncio.gather(*tasks)
