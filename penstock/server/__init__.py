"""The daemon: the embedded engine served over ZeroMQ, TCP and HTTP."""
