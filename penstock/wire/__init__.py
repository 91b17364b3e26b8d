"""The wire protocol, without I/O: frames, messages, and how both travel over ZeroMQ and TCP."""
