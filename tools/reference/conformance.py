"""Every sentence the conformance suite proves: docs/reference/conformance.md."""

from __future__ import annotations

import inspect

from penstock.testing import conformance
from penstock.testing.capabilities import CAPABILITIES
from penstock.testing.conformance.declared import REFUSAL, Declared
from penstock.testing.conformance.harness import Contract

HEAD = """# The conformance suite

One suite states what every engine promises; each engine's tests run the same classes. The first
part is mandatory. Each section of the second part belongs to a
[capability](capabilities.md): it runs where the capability is declared, and where it is not, the
call must raise `Unsupported`.

To hold an engine to it, give pytest a fixture named `harness` and import the classes
(`asyncio_mode = auto` of pytest-asyncio is assumed):

```python
import pytest_asyncio

from penstock.testing.conformance import *


@pytest_asyncio.fixture
async def harness():
    async with UrlHarness("mem:", capabilities={"ttl", "priority"}) as harness:
        yield harness
```

`UrlHarness` fits engines that live in the same process. Any other object will do that has
`connect(**flags)` (a new open connection to the same data), `restart()` (close every connection,
stop the engine cleanly, start it again), `capabilities` and `supports_second_connection`.
Topics and groups have fresh names in each test, so one running server can serve the whole suite.

Delivery is at least once. Order is promised within a partition only.
"""


def page() -> str:
    """The whole page: every sentence the suite proves, by class."""
    suites = [
        member
        for name in conformance.__all__
        if isinstance(member := getattr(conformance, name), type) and issubclass(member, Contract)
    ]
    core = sorted((each for each in suites if not issubclass(each, Declared)), key=_title)
    order = list(CAPABILITIES)
    declared = sorted(
        (each for each in suites if issubclass(each, Declared)),
        key=lambda each: order.index(each.capability),
    )
    lines = [HEAD, "## Mandatory core"]
    for suite in core:
        lines += ["", f"### {_title(suite)}", "", *_sentences(suite)]
    lines += ["", "## Declared capabilities"]
    for suite in declared:
        title = f"### {_title(suite)} (`{suite.capability}`)"
        lines += ["", title, "", *_sentences(suite), f"- Not declared: {_refusal(suite)}"]
    return "\n".join(lines) + "\n"


def _title(suite: type[Contract]) -> str:
    return _first_line(suite)


def _sentences(suite: type[Contract]) -> list[str]:
    tests = [member for name, member in vars(suite).items() if name.startswith("test_")]
    return [f"- {_first_line(test)}" for test in tests if test.__name__ != REFUSAL]


def _refusal(suite: type[Declared]) -> str:
    refusal = vars(suite).get(REFUSAL)
    if refusal is not None:
        return _first_line(refusal)
    what = (inspect.getdoc(suite.call) or "").rstrip(".").lower()
    return f"to {what} raises Unsupported."


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]
