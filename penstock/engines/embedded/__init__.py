"""The embedded engine: the whole bus in this process, on a folder or in memory (`mem:`).

`engine.py` opens the folder and connects the parts; `publisher.py`, `reader.py` and `admin.py` are as in
every engine (see `penstock.engines`). It has more files than other engines, because it does the work
that a server does for them:

    batching.py, commit.py, runtime.py      group commit: one write and one sync for what waits
    delivery.py, groups.py, log_groups.py   the consumer: queue groups, log groups, who reads a topic
    dead_letters.py, schedules.py           events that failed, events that are not due yet
    maintenance.py, lost_events.py          sealing and retention; what retention took from groups
    audit.py                                the audit chain of operators' actions
    follower.py                             the same folder, read-only (`?mode=ro`), beside its writer

There is no connection.py: the connection is the disk (`penstock.log.disk`).
"""
