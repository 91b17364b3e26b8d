"""The corpus of the fuzzer, replayed: what once broke the broker does so no more (T1, Q1).

Files with names in words are findings that were repaired and what honest clients send; files named
by a hash were found by coverage. run_atheris.py goes on from them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_targets import TARGETS

CORPUS = Path(__file__).resolve().parent / "corpus"
MAX_FILES, MAX_BYTES = 300, 200_000


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_replayed(name: str) -> None:
    """Nothing in it harms anybody; a file that does is named."""
    inputs = sorted((CORPUS / name).iterdir())
    assert inputs, "a corpus that is empty proves nothing"
    harmful = {}
    for path in inputs:
        try:
            TARGETS[name](path.read_bytes())
        except BaseException as error:
            harmful[path.name] = repr(error)[:2_000]
    assert not harmful


def test_the_corpus_stays_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert len(files) < MAX_FILES
    assert sum(path.stat().st_size for path in files) < MAX_BYTES
