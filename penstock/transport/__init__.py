"""Sockets without a protocol: what client and broker both need to send and receive bytes on the asyncio loop.

`tcp.py` has the send buffer of a TCP connection and memory for large messages, `zeromq.py` sockets of
libzmq and their send buffer.
"""
