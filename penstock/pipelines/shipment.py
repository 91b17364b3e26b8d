"""Penstock as one file for the workers of a cluster: they run the driver's version, not their own.

The file holds Python only. What Penstock itself needs (pyarrow, msgspec and so on) must be
installed where the workers run.
"""

from __future__ import annotations

import importlib.util
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from penstock.model.errors import UnfitEnvironment

PACKAGES = ("penstock", "pyspark_penstock")
NAME = "penstock-packages.zip"
_OLD = (1980, 1, 1, 0, 0, 0)  # the same files give the same bytes
_METADATA = ("METADATA", "entry_points.txt")


def pack(folder: Path) -> Path:
    """Write the archive into a folder: the packages, and the entry points that name codecs."""
    archive = folder / NAME
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for package in PACKAGES:
            root = _folder_of(package)
            for path in sorted(root.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    _add(packed, f"{package}/{path.relative_to(root)}", path.read_bytes())
        for name, text in _metadata().items():
            _add(packed, name, text.encode())
    return archive


def _add(packed: zipfile.ZipFile, name: str, content: bytes) -> None:
    packed.writestr(zipfile.ZipInfo(name, _OLD), content, zipfile.ZIP_DEFLATED, compresslevel=1)


def _folder_of(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise UnfitEnvironment(
            f"the package {package!r} cannot be imported here, so it cannot be sent to the "
            "workers: install Penstock anew with pip install 'penstock[spark]'",
            package=package,
        )
    return Path(found.origin).parent


def _metadata() -> dict[str, str]:
    """Codecs and compressors are found by entry point; a run from bare sources has none."""
    try:
        installed = distribution("penstock")
    except PackageNotFoundError:
        return {}
    texts = {name: installed.read_text(name) for name in _METADATA}
    return {
        f"penstock-{installed.version}.dist-info/{name}": text
        for name, text in texts.items()
        if text is not None
    }
