"""KernelSync: fdatasync beside the loop, without a thread of this process.

A thread that syncs needs the interpreter before and after, which a busy loop keeps for itself.
Linux's own asynchronous I/O needs nobody: the loop submits a sync and hears of its end as it hears
of bytes on a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import platform
import sys
import threading
from typing import Any

# io_setup, io_destroy, io_submit, io_getevents: no library has them, but the kernel does.
CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
FDSYNC = 3  # IOCB_CMD_FDSYNC
TELL_EVENTFD = 1  # IOCB_FLAG_RESFD
AT_ONCE = 8  # a journal syncs one commit at a time


class _Request(ctypes.Structure):
    """struct iocb."""

    _fields_ = (
        ("number", ctypes.c_uint64), ("key", ctypes.c_uint32), ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16), ("priority", ctypes.c_int16), ("descriptor", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64), ("size", ctypes.c_uint64), ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("eventfd", ctypes.c_uint32),
    )  # fmt: skip


class _Completion(ctypes.Structure):
    """struct io_event."""

    _fields_ = (
        ("number", ctypes.c_uint64), ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64), ("result2", ctypes.c_int64),
    )  # fmt: skip


class KernelSync:
    """Syncs files for one event loop.

    Making one raises OSError where the system has no such thing, and NotImplementedError on a loop
    that cannot listen to files.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        wide = sys.platform == "linux" and sys.maxsize > 2**32  # 32 bits have other numbers
        numbers = CALLS.get(platform.machine()) if wide else None
        if numbers is None:
            raise OSError(errno.ENOSYS, "asynchronous syncs are known on Linux with 64 bits only")
        self._loop = loop
        self._destroy_call, self._submit_call, self._events_call = numbers[1:]
        # Unlike CDLL it keeps the interpreter: submitting and collecting never wait.
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall
        self._context = ctypes.c_ulong(0)
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._eventfd)
            loop.add_reader(self._eventfd, self._completed)
            undo.callback(loop.remove_reader, self._eventfd)
            self._call(numbers[0], ctypes.c_uint(AT_ONCE), ctypes.byref(self._context))
            undo.pop_all()
        self._request = _Request(opcode=FDSYNC, flags=TELL_EVENTFD, eventfd=self._eventfd)
        self._requests = (ctypes.c_void_p * 1)(ctypes.addressof(self._request))
        self._completions = (_Completion * AT_ONCE)()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._number = 0

    def sync(self, descriptor: int) -> asyncio.Future[None]:
        """Have a file's bytes on stable storage; raises OSError, now or later."""
        self._number += 1
        self._request.number, self._request.descriptor = self._number, descriptor
        self._call(self._submit_call, self._context, ctypes.c_long(1), self._requests)
        future = self._waiting[self._number] = self._loop.create_future()
        return future

    def _completed(self) -> None:
        os.eventfd_read(self._eventfd)
        count = AT_ONCE
        while count == AT_ONCE:  # there may be more
            count = self._call(
                self._events_call, self._context, ctypes.c_long(0), ctypes.c_long(AT_ONCE),
                self._completions, None,
            )  # fmt: skip
            self._tell(self._completions[:count])

    def _tell(self, completions: list[_Completion]) -> None:
        for completion in completions:
            future = self._waiting.pop(completion.number)
            if future.done():
                continue  # whoever waited was cancelled
            if completion.result < 0:
                error = -completion.result
                future.set_exception(OSError(error, os.strerror(error)))
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
        # The system takes tens of milliseconds for it, which nobody need wait for.
        threading.Thread(target=self._destroy, name="penstock-sync-end", daemon=True).start()

    def _destroy(self) -> None:
        try:
            ctypes.CDLL(None).syscall(ctypes.c_long(self._destroy_call), self._context)
        finally:
            os.close(self._eventfd)
