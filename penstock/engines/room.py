"""Room for large messages: memory that goes back to the system without holding up the interpreter.

Python gives memory back with the interpreter in its hands: 2.6 ms for 16 MiB, in whichever thread
lets go of it last, and everybody else waits. A thread does it here, in a call that needs nobody.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import weakref

FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_leaving: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()  # its `put` suits a finalizer
_starting = threading.Lock()
_thread: threading.Thread | None = None


def large_room(size: int) -> memoryview:
    """Bytes to write into, all zero; raises OSError when there are none. Meant for a MiB and more.

    >>> room = large_room(1 << 20)
    >>> room[:3] = b"abc"
    >>> bytes(room[:4]), len(room)
    (b'abc\\x00', 1048576)
    """
    _start()
    address = _libc.mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    if address == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    room = (ctypes.c_ubyte * size).from_address(address)
    # Called when no view of it is left, in any thread.
    weakref.finalize(room, _leaving.put, (address, size)).atexit = False
    return memoryview(room).cast("B")


def _start() -> None:
    global _thread
    with _starting:
        if _thread is None or not _thread.is_alive():  # a child of a fork has no threads
            _thread = threading.Thread(target=_give_back, name="penstock-room", daemon=True)
            _thread.start()


def _give_back() -> None:
    while True:
        address, size = _leaving.get()
        _libc.munmap(address, size)
