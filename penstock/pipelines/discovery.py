"""Finding pipelines by name: those that come with Penstock, of installed packages, and of a folder."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path

from penstock.model.errors import InvalidInput, NotFound
from penstock.model.nearest import did_you_mean
from penstock.pipelines import builtin
from penstock.pipelines.pipeline import Pipeline, Pipelines, registered

FOLDER = "pipelines"
"""Where a project's own pipelines are looked for, unless another folder is named."""
GROUP = "penstock.pipelines"
"""The entry points by which packages bring pipelines; each names a module."""


def discover(folder: str | Path | None = None) -> Pipelines:
    """Load everything there is and return it by name; needs PySpark, and no session."""
    builtin.load()
    for point in entry_points(group=GROUP):
        point.load()
    chosen = Path(folder if folder is not None else FOLDER)
    if folder is not None and not chosen.is_dir():
        raise NotFound(f"there is no folder {str(chosen)!r} with pipelines")
    for path in sorted(chosen.glob("*.py")):
        _load(path)
    return registered


def _load(path: Path) -> None:
    """Run a file of a folder as a module; importable by the workers, which get its functions whole."""
    name = f"penstock_pipelines_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InvalidInput(
            f"{path} cannot be loaded: {type(error).__name__}: {error}. The other pipelines are "
            "not affected; correct the file or move it away",
            path=str(path),
        ) from error


def find(name: str, folder: str | Path | None = None) -> Pipeline:
    """A pipeline by its name; an unknown one is answered with the nearest."""
    known = discover(folder)
    if name not in known:
        raise NotFound(
            f"there is no pipeline {name!r}. {did_you_mean(name, known)}There is "
            f"{', '.join(sorted(known))}",
            name=name,
        )
    return known[name]
