"""How clients reach the broker: one file for each transport, all behind the Protocols in `link`.

`tcp` (with `tls`, and `legacy` for clients that never negotiate), `zeromq` (with `zeromq_peers` and
`curve`), and `fanout`, the one-way PUB socket. A new transport is a new file here: it gives the broker a
`Link` for each client, and passes frames to the `Connection` that it gets.
"""
