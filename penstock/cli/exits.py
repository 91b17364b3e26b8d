"""Exit codes: what a script learns from `$?`, and which error code leads to which."""

from __future__ import annotations

OK = 0
FAILED = 1
INVALID = 2
NOT_FOUND = 3
REFUSED = 4
REJECTED = 5
STORAGE = 6
TIMEOUT = 7
INTERRUPTED = 130
TERMINATED = 143

MEANINGS: dict[int, str] = {
    OK: "It worked. Also when the reader of a pipe went away early, as `head` does.",
    FAILED: "The operation failed, or a check found problems; any error code not named below.",
    INVALID: "Wrong usage or invalid input (`invalid.*`), or a part that is not installed (`missing.*`).",
    NOT_FOUND: "The name or id does not exist (`notfound.*`).",
    REFUSED: "Understood, and not allowed: a missing confirmation, write-once data (`refused.*`), a token that is missing or does not suffice (`access.*`).",
    REJECTED: "A limit was reached (`rejected.*`); try again later.",
    STORAGE: "The data folder or the disk (`storage.*`): locked, damaged, not there.",
    TIMEOUT: "No answer in time (`timeout.*`).",
    INTERRUPTED: "Interrupted with Ctrl-C. `publish` says how many events were acknowledged.",
    TERMINATED: "Ended by SIGTERM; the same promise as for Ctrl-C.",
}

_BY_FAMILY = {
    "invalid": INVALID,
    "missing": INVALID,
    "notfound": NOT_FOUND,
    "refused": REFUSED,
    "access": REFUSED,
    "rejected": REJECTED,
    "storage": STORAGE,
    "timeout": TIMEOUT,
}


def exit_code(error_code: str) -> int:
    """The exit code for an error code of docs/reference/errors.md.

    >>> exit_code("notfound.topic"), exit_code("delivery.fenced")
    (3, 1)
    """
    return _BY_FAMILY.get(error_code.partition(".")[0], FAILED)
