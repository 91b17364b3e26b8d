"""UringSync: syncs by io_uring, whose workers run on any processor.

Requests and completions lie in two rings that the kernel shares with the process. Only the calls
that submit touch the first, and the eventfd says when to look at the second: no other barrier is
needed between the two sides.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import struct

from penstock.engines.kernel_sync import AT_ONCE, KernelSync

MACHINES = (
    "x86_64",
    "aarch64",
)  # calls since 5.1 have one number everywhere; others are not tested
SETUP, ENTER, REGISTER = 425, 426, 427
REGISTER_EVENTFD = 4
REQUESTS_AT = 0x10000000  # IORING_OFF_SQES
ONE_MAP = 1  # IORING_FEAT_SINGLE_MMAP: both rings in one mapping, since 5.4
# struct io_uring_params: sizes and features, then where things lie in each ring.
PARAMS = struct.Struct("<5I I 4I 10I 10I")
# struct io_uring_sqe: opcode, flags, priority, file, offset, address, length, fsync flags, number.
REQUEST = struct.Struct("<BBHiQQIIQ24x")
FSYNC, DATA_ONLY = 3, 1
COMPLETION = struct.Struct("<QiI")
UINT = 1 << 32


class UringSync(KernelSync):
    """Syncs by io_uring."""

    def _open(self) -> None:
        if platform.machine() not in MACHINES:
            raise OSError(errno.ENOSYS, "io_uring is not known here")
        params = ctypes.create_string_buffer(PARAMS.size)
        self._ring = self._call(SETUP, ctypes.c_uint(AT_ONCE), params)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._ring)
            self._map(PARAMS.unpack(params.raw))
            self._call(
                REGISTER, ctypes.c_uint(self._ring), ctypes.c_uint(REGISTER_EVENTFD),
                ctypes.byref(ctypes.c_int(self._eventfd)), ctypes.c_uint(1),
            )  # fmt: skip
            undo.pop_all()

    def _map(self, params: tuple[int, ...]) -> None:
        requests, completions, features = params[0], params[1], params[5]
        if not features & ONE_MAP:
            raise OSError(errno.ENOSYS, "this io_uring is too old")
        _, tail, mask, _, _, _, order = params[10:17]
        head, end, end_mask, _, _, done = params[20:26]
        size = max(order + 4 * requests, done + COMPLETION.size * completions)
        self._shared = mmap.mmap(self._ring, size)
        self._requests = mmap.mmap(self._ring, REQUEST.size * requests, offset=REQUESTS_AT)
        self._words = memoryview(self._shared)[: size // 4 * 4].cast("I")
        self._tail, self._order, self._mask = tail // 4, order // 4, self._words[mask // 4]
        self._head, self._end, self._end_mask = head // 4, end // 4, self._words[end_mask // 4]
        self._done = done

    def _submit(self, number: int, descriptor: int) -> None:
        words, tail = self._words, self._words[self._tail]
        at = tail & self._mask
        REQUEST.pack_into(
            self._requests, at * REQUEST.size, FSYNC, 0, 0, descriptor, 0, 0, 0, DATA_ONLY, number
        )
        words[self._order + at] = at
        words[self._tail] = (tail + 1) % UINT
        try:
            self._call(
                ENTER, ctypes.c_uint(self._ring), ctypes.c_uint(1), ctypes.c_uint(0),
                ctypes.c_uint(0), None, ctypes.c_size_t(0),
            )  # fmt: skip
        except OSError:
            words[self._tail] = tail  # the kernel did not take it
            raise

    def _collect(self) -> list[tuple[int, int]]:
        words, found = self._words, []
        head, end = words[self._head], words[self._end]
        while head != end:
            at = self._done + (head & self._end_mask) * COMPLETION.size
            number, result, _ = COMPLETION.unpack_from(self._shared, at)
            found.append((number, result))
            head = (head + 1) % UINT
        words[self._head] = head
        return found

    def _close(self) -> None:
        self._words.release()
        self._shared.close()
        self._requests.close()
        os.close(self._ring)
        os.close(self._eventfd)
