"""Engines: the places where events live, all behind one Protocol (`penstock.engines.engine.Engine`).

Every engine passes the same tests, `penstock.testing.conformance`. What an engine cannot do is missing
in its `capabilities`, and it refuses such a request with Unsupported. `penstock.bus.connect` chooses the
engine by the scheme of the address.

An engine is a module here when it fits one file (`memory.py`), else a folder with these files, and no
others without a reason in its `__init__`:

    engine.py       the class with the methods of `Engine`, and `CAPABILITIES`
    connection.py   the way to where the events are (or one file for each transport)
    publisher.py    drafts in, receipts out; transactions
    consumer.py     feeds of queue groups and log groups; settling
    reader.py       stored batches, read back
    admin.py        answers to `penstock.engines.requests`

The engines of today: `memory.py` (`mem:`), `embedded/` (a folder, and the same folder read-only),
`broker/` (`penstock://`, over TCP or ZeroMQ). Later ones get a folder beside them: `jetstream/` (NATS
JetStream, `nats://`), `rabbitmq/` (`amqp://`) and `ring/` (shared memory, `ring://`; engine, connection,
publisher and consumer only).

Shared by all: `engine.py` (the Protocol), `requests.py` (what operators can ask) and `credential.py`
(the token of a client). Nothing is imported here, so one engine does not load the libraries of another.
"""
