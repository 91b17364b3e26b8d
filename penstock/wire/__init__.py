"""The wire protocol, without I/O: frames, messages, and how both travel over ZeroMQ and TCP.

`frame.py` and `message.py` are the protocol; `stream.py` and `negotiation.py` carry it over TCP;
`encodings.py` and `protobuf.py` translate for clients without msgpack or batches; `limits.py` bounds what
a broker reads; `legacy.py` has the commands of clients that never negotiate.
"""
