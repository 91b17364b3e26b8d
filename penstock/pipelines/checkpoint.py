"""What Spark's checkpoint of a query says, read without Spark: where it is and how far behind."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from penstock.model.errors import InvalidInput, NotFound
from penstock.pipelines.plan import Place


class Standing(msgspec.Struct, frozen=True):
    """How far a query is."""

    query: str
    """Its id, the same in every run from this checkpoint."""
    batch: int
    """The last batch that was done; -1 before the first."""
    planned: int
    """The last batch that was begun."""
    places: list[Place]
    """Where each of its inputs is after the last batch that was done."""


def standing(checkpoint: str | Path) -> Standing:
    """Read a checkpoint; one that was never begun is not there."""
    folder = Path(checkpoint)
    try:
        query = json.loads((folder / "metadata").read_text())["id"]
    except FileNotFoundError:
        raise NotFound(
            f"there is no checkpoint in {folder}: the pipeline has not run with it yet"
        ) from None
    except (ValueError, KeyError):
        raise InvalidInput(
            f"{folder / 'metadata'} is not what Spark writes into a checkpoint"
        ) from None
    done, planned = _newest(folder / "commits"), _newest(folder / "offsets")
    return Standing(query, done, planned, _places(folder / "offsets" / str(done)))


def _newest(folder: Path) -> int:
    if not folder.is_dir():
        return -1
    return max((int(each.name) for each in folder.iterdir() if each.name.isdigit()), default=-1)


def _places(path: Path) -> list[Place]:
    """Spark writes a version, a line about the batch, and a line of offsets for each input."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()[2:]
    return [Place.from_json(json.loads(line)) for line in lines if line.strip() not in ("", "-")]
