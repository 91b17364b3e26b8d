"""Without async: publish a whole Arrow table at once, read it back, take it apart with Arrow.

python examples/columns.py [FOLDER]
"""

import sys
import tempfile

import pyarrow as pa

import penstock

COUNT = 10_000


def main(folder: str) -> None:
    table = pa.table(
        {
            "key": pa.array([f"sensor-{n % 10}".encode() for n in range(COUNT)]),
            "payload": pa.array([b'{"celsius": %d}' % (n % 40) for n in range(COUNT)]),
        }
    )
    with penstock.connect_sync(folder) as bus:
        receipt = bus.publish_many("sensors.read.v1.acme", table, codec="json")
        print(f"{receipt.count} events on disk, the first at offset {receipt.offset}")

        warm = sum(event.value()["celsius"] > 30 for event in bus.replay("sensors.read.v1.acme"))
        print(f"{warm} of them are above 30 degrees")

        for info in bus.topics.list():
            print(f"{info.name} ends at offset {info.partitions[0].end_offset}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
