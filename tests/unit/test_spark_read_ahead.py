"""`read_ahead` yields what its reader yields, and its thread ends with the caller (S1)."""

from __future__ import annotations

import threading

import pytest

from penstock.pipelines.source import read_ahead

NAME = "penstock-read-ahead"


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == NAME]


def test_pieces_come_in_order_and_the_thread_ends():
    assert list(read_ahead(iter(range(1_000)))) == list(range(1_000))
    assert threads() == []


def test_the_next_piece_is_read_while_one_is_in_hand():
    read = [threading.Event() for _ in range(4)]

    def pieces():
        for number, each in enumerate(read):
            each.set()
            yield number

    ahead = read_ahead(pieces())
    assert next(ahead) == 0
    assert read[1].wait(10)
    assert read[2].wait(10)  # one waits, and one is made
    assert not read[3].is_set()
    assert list(ahead) == [1, 2, 3]


def test_an_error_comes_behind_the_pieces_before_it():
    def pieces():
        yield 1
        raise OSError("the disk is gone")

    ahead = read_ahead(pieces())
    assert next(ahead) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert threads() == []


def test_who_stops_early_leaves_no_reader_behind():
    """The next task of a worker reads with the same store, which is nobody else's then."""
    closed = threading.Event()

    def pieces():
        try:
            yield from range(1_000)
        finally:
            closed.set()

    ahead = read_ahead(pieces())
    assert next(ahead) == 0
    ahead.close()
    assert threads() == []
    assert closed.is_set()
