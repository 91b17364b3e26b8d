"""KernelSync: fdatasync beside the loop, without a thread of this process.

A thread that syncs needs the interpreter before and after, which a busy loop keeps for itself. The
kernel needs nobody: the loop submits a sync and hears of its end as it hears of bytes on a socket.
How a system is asked is a subclass's: penstock.engines.uring_sync, penstock.engines.aio_sync.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Iterable
from typing import Any

AT_ONCE = 8  # a journal syncs few commits at a time


class KernelSync(abc.ABC):
    """Syncs files for one event loop.

    Making one raises OSError where the system has no such thing, and NotImplementedError on a loop
    that cannot listen to files.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        if sys.platform != "linux" or sys.maxsize <= 2**32:  # 32 bits have other numbers
            raise OSError(errno.ENOSYS, "asynchronous syncs are known on Linux with 64 bits only")
        self._loop = loop
        # Unlike CDLL it keeps the interpreter: submitting and collecting never wait.
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._number = 0
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._eventfd)
            loop.add_reader(self._eventfd, self._completed)
            undo.callback(loop.remove_reader, self._eventfd)
            self._open()
            undo.pop_all()

    def sync(self, descriptor: int) -> asyncio.Future[None]:
        """Have a file's bytes on stable storage; raises OSError, now or later."""
        self._number += 1
        self._submit(self._number, descriptor)
        future = self._waiting[self._number] = self._loop.create_future()
        return future

    def _completed(self) -> None:
        os.eventfd_read(self._eventfd)
        self._tell(self._collect())

    def _tell(self, completions: Iterable[tuple[int, int]]) -> None:
        for number, result in completions:
            future = self._waiting.pop(number)
            if future.done():
                continue  # whoever waited was cancelled
            if result < 0:
                future.set_exception(OSError(-result, os.strerror(-result)))
            else:
                future.set_result(None)

    def _call(self, number: int, *arguments: Any) -> int:
        result: int = self._syscall(ctypes.c_long(number), *arguments)
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return result

    def close(self) -> None:
        """Give everything back once nothing is under way; nobody is told of its end any more."""
        self._loop.remove_reader(self._eventfd)
        self._close()

    @abc.abstractmethod
    def _open(self) -> None:
        """Get what requests need from the system."""

    @abc.abstractmethod
    def _submit(self, number: int, descriptor: int) -> None:
        """Have the system begin; it adds to the eventfd when it is done."""

    @abc.abstractmethod
    def _collect(self) -> list[tuple[int, int]]:
        """Numbers of requests that are done, with 0 or an error below it."""

    @abc.abstractmethod
    def _close(self) -> None:
        """Give everything back, the eventfd included."""
