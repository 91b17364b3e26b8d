"""The printed pages are what the suite and the engines say now (Y3)."""

import inspect
from pathlib import Path

from penstock.testing import capabilities, conformance
from penstock.testing.conformance.declared import Declared
from penstock.testing.conformance.harness import Contract
from tools.reference import capabilities as capabilities_page
from tools.reference import conformance as conformance_page

DOCS = Path(__file__).parents[2] / "docs" / "reference"


async def test_capabilities_page() -> None:
    assert (DOCS / "capabilities.md").read_text() == await capabilities_page.page()


def test_conformance_page() -> None:
    assert (DOCS / "conformance.md").read_text() == conformance_page.page()


def suites() -> list[type[Contract]]:
    return [
        member
        for name in conformance.__all__
        if isinstance(member := getattr(conformance, name), type) and issubclass(member, Contract)
    ]


def test_every_capability_has_its_tests() -> None:
    named = [suite.capability for suite in suites() if issubclass(suite, Declared)]
    assert sorted(named) == sorted(capabilities.CAPABILITIES)


def test_every_test_states_its_sentence() -> None:
    for suite in suites():
        for name, member in vars(suite).items():
            if name.startswith("test_"):
                first = (inspect.getdoc(member) or "").partition("\n")[0]
                assert first.endswith("."), f"{suite.__name__}.{name}"
