"""AioSync: syncs by Linux's first asynchronous I/O, which containers allow that forbid io_uring.

The kernel's worker runs on the processor that asked, when it is free: a loop that goes on working
holds its own syncs up. io_uring does better where there is one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading

from penstock.engines.kernel_sync import AT_ONCE, KernelSync

# io_setup, io_destroy, io_submit, io_getevents: no library has them, but the kernel does.
CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
FDSYNC = 3  # IOCB_CMD_FDSYNC
TELL_EVENTFD = 1  # IOCB_FLAG_RESFD


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


class AioSync(KernelSync):
    """Syncs by io_submit."""

    def _open(self) -> None:
        numbers = CALLS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, "the numbers of these calls are not known here")
        self._destroy_call, self._submit_call, self._events_call = numbers[1:]
        self._context = ctypes.c_ulong(0)
        self._request = _Request(opcode=FDSYNC, flags=TELL_EVENTFD, eventfd=self._eventfd)
        self._requests = (ctypes.c_void_p * 1)(ctypes.addressof(self._request))
        self._completions = (_Completion * AT_ONCE)()
        self._call(numbers[0], ctypes.c_uint(AT_ONCE), ctypes.byref(self._context))

    def _submit(self, number: int, descriptor: int) -> None:
        self._request.number, self._request.descriptor = number, descriptor
        self._call(self._submit_call, self._context, ctypes.c_long(1), self._requests)

    def _collect(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        count = AT_ONCE
        while count == AT_ONCE:  # there may be more
            count = self._call(
                self._events_call, self._context, ctypes.c_long(0), ctypes.c_long(AT_ONCE),
                self._completions, None,
            )  # fmt: skip
            found += [(each.number, each.result) for each in self._completions[:count]]
        return found

    def _close(self) -> None:
        # The system takes tens of milliseconds for it, which nobody need wait for.
        threading.Thread(target=self._destroy, name="penstock-sync-end", daemon=True).start()

    def _destroy(self) -> None:
        try:
            ctypes.CDLL(None).syscall(ctypes.c_long(self._destroy_call), self._context)
        finally:
            os.close(self._eventfd)
