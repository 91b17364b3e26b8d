"""The events of an auction house: people, auctions and bids as Arrow tables, the same for each seed.

Proportions, hot items and sizes are those of the public Nexmark generator: of 50 events one is a
person, three are auctions and 46 are bids; half of all bids go to one hot auction, three quarters
of all bids and auctions come from one hot bidder and one hot seller. Texts are made by the hundred
thousand, in columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.model.errors import InvalidInput

# -- events ---------------------------------------------------------------------------------------

PEOPLE, AUCTIONS, BIDS = 1, 3, 46
EPOCH = PEOPLE + AUCTIONS + BIDS
# Drawn together, whatever is asked for, so that a shorter run is the beginning of a longer one.
CHUNK_EVENTS = 2_000 * EPOCH

FIRST_ID = 1_000
FIRST_CATEGORY = 10
CATEGORIES = 5
ACTIVE_PEOPLE = 1_000
AUCTIONS_IN_FLIGHT = 100
LEAD = 10  # ids not there yet that an event may name already
HOT_EVERY = 100  # the first auction and the first two people of so many are hot
HOT_AUCTION, HOT_SELLER, HOT_BIDDER, HOT_CHANNEL = 2, 4, 4, 2  # one in so many is not hot
PERSON_BYTES, AUCTION_BYTES, BID_BYTES = 200, 500, 100

STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES = ("Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond",
          "Seattle", "Kent", "Cheyenne")  # fmt: skip
FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter",
               "Walter")  # fmt: skip
LAST_NAMES = (
    "Shultz",
    "Abrams",
    "Spencer",
    "White",
    "Bartels",
    "Walton",
    "Smith",
    "Jones",
    "Noris",
)
HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
CHANNELS = 10_000

TIME = pa.timestamp("us", tz="UTC")
PERSON = pa.schema(
    [("id", pa.int64()), ("name", pa.string()), ("email_address", pa.string()),
     ("credit_card", pa.string()), ("city", pa.string()), ("state", pa.string()),
     ("date_time", TIME), ("extra", pa.string())]
)  # fmt: skip
AUCTION = pa.schema(
    [("id", pa.int64()), ("item_name", pa.string()), ("description", pa.string()),
     ("initial_bid", pa.int64()), ("reserve", pa.int64()), ("date_time", TIME), ("expires", TIME),
     ("seller", pa.int64()), ("category", pa.int64()), ("extra", pa.string())]
)  # fmt: skip
BID = pa.schema(
    [("auction", pa.int64()), ("bidder", pa.int64()), ("price", pa.int64()),
     ("channel", pa.string()), ("url", pa.string()), ("date_time", TIME), ("extra", pa.string())]
)  # fmt: skip


class Events(NamedTuple):
    """The three tables of a stretch of events; `date_time` is the event time."""

    persons: pa.Table
    auctions: pa.Table
    bids: pa.Table

    @property
    def total(self) -> int:
        """Events in all three."""
        return sum(table.num_rows for table in self)


@dataclass(frozen=True)
class Generator:
    """Events of a seed, in the order of their event time.

    >>> made = Generator(events=100).generate()
    >>> [table.num_rows for table in made]
    [2, 6, 92]
    >>> made.bids.schema.names
    ['auction', 'bidder', 'price', 'channel', 'url', 'date_time', 'extra']
    """

    events: int = 1_000_000
    seed: int = 0
    events_per_s: int = 10_000
    """Events in one second of event time."""
    start_ms: int = 1_767_225_600_000
    """Event time of the first event, milliseconds since 1970: 2026-01-01."""

    def __post_init__(self) -> None:
        if self.events < 1 or self.events_per_s < 1 or self.seed < 0:
            raise InvalidInput(
                f"events and events_per_s are at least 1 and seed at least 0, not {self.events}, "
                f"{self.events_per_s} and {self.seed}"
            )

    def generate(self) -> Events:
        """All events."""
        chunks = list(self.chunks())
        return Events(*(pa.concat_tables(tables) for tables in zip(*chunks, strict=True)))

    def chunks(self) -> Iterator[Events]:
        """All events in stretches of 100,000, for runs that do not fit into memory."""
        for number, first in enumerate(range(0, self.events, CHUNK_EVENTS)):
            yield self._chunk(number, min(CHUNK_EVENTS, self.events - first))

    def _chunk(self, number: int, count: int) -> Events:
        rng = np.random.default_rng([self.seed, number])
        first = number * CHUNK_EVENTS
        ids = np.arange(first, first + CHUNK_EVENTS, dtype=np.int64).reshape(-1, EPOCH)
        texts, (channels, urls) = _texts(self.seed), _channels(self.seed)
        last = first + count  # what lies behind it was drawn and is not wanted
        return Events(
            self._persons(rng, texts, ids[:, 0]).slice(0, int((ids[:, 0] < last).sum())),
            self._auctions(rng, texts, ids[:, PEOPLE : PEOPLE + AUCTIONS].ravel()).slice(
                0, int((ids[:, PEOPLE : PEOPLE + AUCTIONS] < last).sum())
            ),
            self._bids(rng, texts, channels, urls, ids[:, PEOPLE + AUCTIONS :].ravel()).slice(
                0, int((ids[:, PEOPLE + AUCTIONS :] < last).sum())
            ),
        )

    def _time_ms(self, ids: Any) -> Any:
        return self.start_ms + ids * 1000 // self.events_per_s

    def _persons(self, rng: np.random.Generator, texts: Texts, ids: Any) -> pa.Table:
        count = len(ids)
        name = pc.binary_join_element_wise(
            _pick(rng, FIRST_NAMES, count), _pick(rng, LAST_NAMES, count), " "
        )
        email = pc.binary_join_element_wise(
            texts.words(rng, count, 7, "_"), "@", texts.words(rng, count, 5, "_"), ".com", ""
        )
        card = pc.binary_join_element_wise(
            *(_digits(rng.integers(0, 10_000, count)) for _ in range(4)), " "
        )
        city, state = _pick(rng, CITIES, count), _pick(rng, STATES, count)
        used = 8 + sum(_sizes(each) for each in (name, email, card, city, state))
        extra = padded(rng, used, PERSON_BYTES, texts)
        columns = [ids // EPOCH + FIRST_ID, name, email, card, city, state,
                   _times(self._time_ms(ids)), extra]  # fmt: skip
        return pa.table(columns, schema=PERSON)

    def _auctions(self, rng: np.random.Generator, texts: Texts, ids: Any) -> pa.Table:
        count, now_ms = len(ids), self._time_ms(ids)
        seller = np.where(
            rng.integers(0, HOT_SELLER, count) > 0,
            ids // EPOCH // HOT_EVERY * HOT_EVERY,
            _some_person(rng, ids),
        )
        category = FIRST_CATEGORY + rng.integers(0, CATEGORIES, count)
        initial_bid = _prices(rng, count)
        reserve = initial_bid + _prices(rng, count)
        # Long enough, on average, that so many auctions are open at a time.
        ahead_ms = self._time_ms(ids + AUCTIONS_IN_FLIGHT * EPOCH // AUCTIONS) - now_ms
        expires_ms = now_ms + 1 + rng.integers(0, np.maximum(2 * ahead_ms, 1))
        name, description = texts.words(rng, count, 20), texts.words(rng, count, 100)
        extra = padded(rng, 48 + _sizes(name) + _sizes(description), AUCTION_BYTES, texts)
        columns = [_last_auction(ids) + FIRST_ID, name, description, initial_bid, reserve,
                   _times(now_ms), _times(expires_ms), seller + FIRST_ID, category, extra]  # fmt: skip
        return pa.table(columns, schema=AUCTION)

    def _bids(self, rng: np.random.Generator, texts: Texts, channels: pa.Array, urls: pa.Array, ids: Any) -> pa.Table:  # fmt: skip
        count = len(ids)
        newest = _last_auction(ids)
        oldest = np.maximum(newest - AUCTIONS_IN_FLIGHT, 0)
        auction = np.where(
            rng.integers(0, HOT_AUCTION, count) > 0,
            newest // HOT_EVERY * HOT_EVERY,
            oldest + rng.integers(0, newest - oldest + 1 + LEAD),
        )
        bidder = np.where(
            rng.integers(0, HOT_BIDDER, count) > 0,
            # The second of a hundred, so that the hot bidder is not the hot seller.
            ids // EPOCH // HOT_EVERY * HOT_EVERY + 1,
            _some_person(rng, ids),
        )
        hot = rng.integers(0, HOT_CHANNEL, count) > 0
        place = np.where(
            hot,
            rng.integers(0, len(HOT_CHANNELS), count),
            len(HOT_CHANNELS) + rng.integers(0, CHANNELS, count),
        )
        extra = padded(rng, np.full(count, 32), BID_BYTES, texts)
        columns = [auction + FIRST_ID, bidder + FIRST_ID, _prices(rng, count),
                   channels.take(pa.array(place)), urls.take(pa.array(place)),
                   _times(self._time_ms(ids)), extra]  # fmt: skip
        return pa.table(columns, schema=BID)


@lru_cache(maxsize=4)
def _texts(seed: int) -> Texts:
    return Texts(seed)


@lru_cache(maxsize=4)
def _channels(seed: int) -> tuple[pa.Array, pa.Array]:
    """Names and addresses of all channels, the hot ones first."""
    rng, texts = np.random.default_rng([seed, CHANNELS]), _texts(seed)
    count = len(HOT_CHANNELS) + CHANNELS
    folders = [texts.words(rng, count, 5, "_") for _ in range(3)]
    ids = pa.array([str(int(f"{number:032b}"[::-1], 2)) for number in range(count)])
    # One cold channel in ten does not say which it is, nor do the hot ones.
    silent = (rng.integers(0, 10, count) == 0) | (np.arange(count) < len(HOT_CHANNELS))
    tail = pc.if_else(pa.array(silent), "", pc.binary_join_element_wise("&channel_id=", ids, ""))
    urls = pc.binary_join_element_wise(
        "https://www.nexmark.com/", folders[0], "/", folders[1], "/", folders[2],
        "/item.htm?query=1", tail, "",
    )  # fmt: skip
    names = [*HOT_CHANNELS, *(f"channel-{number}" for number in range(CHANNELS))]
    return pa.array(names), urls


def _some_person(rng: np.random.Generator, ids: Any) -> Any:
    """A person active at that event, or soon after it."""
    people = ids // EPOCH + 1
    active = np.minimum(people, ACTIVE_PEOPLE)
    return people - active + rng.integers(0, active + LEAD)


def _last_auction(ids: Any) -> Any:
    """The newest auction at an event that is an auction or a bid, the event itself included."""
    return ids // EPOCH * AUCTIONS + np.minimum(ids % EPOCH - PEOPLE, AUCTIONS - 1)


def _prices(rng: np.random.Generator, count: int) -> Any:
    return np.rint(10.0 ** (rng.random(count) * 6) * 100).astype(np.int64)


def _pick(rng: np.random.Generator, names: tuple[str, ...], count: int) -> pa.Array:
    return pa.array(names).take(pa.array(rng.integers(0, len(names), count)))


def _digits(numbers: Any) -> pa.Array:
    return pc.utf8_lpad(pc.cast(pa.array(numbers), pa.string()), 4, "0")


def _sizes(texts: pa.Array) -> Any:
    return pc.binary_length(texts).to_numpy()


def _times(milliseconds: Any) -> pa.Array:
    return pa.array(milliseconds * 1000).view(TIME)


# -- random texts ---------------------------------------------------------------------------------

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)
# Texts are cut out of one long text: that costs a copy each, and two are hardly ever the same.
POOL_BYTES = 1 << 20
MIN_TEXT_BYTES = 3
# One letter in so many is the special one: a blank in descriptions, an underscore in addresses.
SPECIAL_EVERY = 13


class Texts:
    """Texts of a seed: letters only, or words with something between them.

    >>> source = Texts(7)
    >>> sizes = np.array([3, 5])
    >>> again = Texts(7).letters(np.random.default_rng(1), sizes)
    >>> source.letters(np.random.default_rng(1), sizes).equals(again), again[1].as_py().isalpha()
    (True, True)
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, POOL_BYTES])
        self._letters = rng.choice(LETTERS, POOL_BYTES)
        special = rng.integers(0, SPECIAL_EVERY, POOL_BYTES) == 0
        self._words = np.where(special, np.uint8(ord(" ")), self._letters)

    def letters(self, rng: np.random.Generator, sizes: Any) -> pa.Array:
        """Texts of letters, each as long as `sizes` says."""
        return _cut(rng, self._letters, sizes)

    def words(
        self, rng: np.random.Generator, count: int, below: int, special: str = " "
    ) -> pa.Array:
        """Texts of at least three letters and fewer than `below`; some letters are the special one.

        Blanks at the ends are cut off.
        """
        sizes = rng.integers(MIN_TEXT_BYTES, below, count)
        found = _cut(rng, self._words, sizes)
        return pc.utf8_trim(found, " ") if special == " " else pc.replace_substring(found, " ", special)  # fmt: skip


def padded(rng: np.random.Generator, used_bytes: Any, average_bytes: int, texts: Texts) -> pa.Array:
    """Texts that bring records to an average size: each has 80 to 120 % of the missing bytes."""
    missing = np.maximum(average_bytes - used_bytes, 0)
    spread = np.rint(missing * 0.2).astype(np.int64)
    return texts.letters(rng, missing - spread + rng.integers(0, np.maximum(2 * spread, 1)))


def _cut(rng: np.random.Generator, pool: Any, sizes: Any) -> pa.Array:
    widest = max(1, int(sizes.max(initial=1)))
    windows = np.lib.stride_tricks.sliding_window_view(pool, widest)
    places = rng.integers(0, len(windows), len(sizes))
    data = windows[places][np.arange(widest) < sizes[:, None]]
    offsets = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return pa.StringArray.from_buffers(len(sizes), pa.py_buffer(offsets), pa.py_buffer(data))
