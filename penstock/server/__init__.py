"""The daemon: the embedded engine, served over TCP, ZeroMQ and HTTP.

`daemon` starts and stops everything. A transport gives frames to `broker`, which finds the client's
`session`; the session passes them to `publish`, `subscriptions` or its own handlers. `auth`, `validation`,
`client_bytes` and `readiness` guard what comes in; `reload`, `logs` and `ports` are for operators.
A new kind of request joins `session`; a new way to reach the broker joins `transports`.
"""
