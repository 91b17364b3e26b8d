"""Taste as tests: layers, names, sizes, the public surface. Lists of exceptions may only get shorter."""

from __future__ import annotations

import ast
import codecs
import functools
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.cli.app import COMMANDS
from penstock.model import errors

ROOT = Path(penstock.__file__).resolve().parent.parent
PACKAGE = ROOT / "penstock"
SOURCES = sorted(PACKAGE.rglob("*.py"))

LAYERS = (
    "model", "core", "log", "wire", "transport", "engines", "bus", "server", "pipelines", "testing",
    "bench", "cli",
)  # fmt: skip
"""Lowest first, as the first comment of penstock/__init__.py states them."""

MAX_FILE_LINES = 1_000
LONG_FILES: dict[str, int] = {}
"""Files that are too long, and how long they may be: lower the number when you shorten one."""

MAX_FUNCTION_LINES = 80
LONG_FUNCTIONS: dict[str, int] = {}

MAX_FOLDER_FILES = 20
FULL_FOLDERS = {"penstock/cli": 35}
"""Folders with more files than that, `__init__` not counted, and how many: lower the number with it."""

SHALLOW_LINES = 100
ROOMS = (
    "penstock/engines/", "penstock/server/transports/", "penstock/server/admin/",
    "penstock/bench/cases/", "penstock/pipelines/builtin/",
)  # fmt: skip
"""Folders with one file for each engine, transport, page of the API, case or pipeline, however short."""
SHALLOW_FILES = {
    "penstock/bench/crash.py",
    "penstock/bench/spark/bare.py",
    "penstock/bench/spark/replaying.py",
    "penstock/bus/replay.py",
    "penstock/testing/model/known.py",
    "penstock/testing/model/proxy.py",
    "penstock/testing/simulation/cursors.py",
}
"""Short files of a single importer that are not yet part of it."""

FOREIGN_PRIVATE_NAMES = {
    "penstock/bus/transaction.py: _leased",
    "penstock/pipelines/builtin/audit.py: _broken",
    "penstock/pipelines/builtin/audit.py: _checkpoint",
    "penstock/pipelines/builtin/audit.py: _checkpoints",
    "penstock/pipelines/builtin/audit.py: _disk",
    "penstock/pipelines/builtin/audit.py: _expect",
    "penstock/pipelines/builtin/audit.py: _file",
    "penstock/pipelines/builtin/audit.py: _file_first",
    "penstock/pipelines/builtin/audit.py: _hash",
    "penstock/pipelines/builtin/audit.py: _key",
    "penstock/pipelines/builtin/audit.py: _missing",
    "penstock/pipelines/builtin/audit.py: _records",
    "penstock/pipelines/builtin/audit.py: _ref",
    "penstock/pipelines/builtin/audit.py: _sequence",
    "penstock/server/metrics/engine_stats.py: _full",
    "penstock/server/metrics/engine_stats.py: _ingress",
    "penstock/server/metrics/engine_stats.py: _pending",
    "penstock/server/metrics/engine_stats.py: _tenant",
    "penstock/server/metrics/engine_stats.py: _tenants",
    "penstock/server/metrics/engine_stats.py: _tokens",
}
"""Private names of other modules that a module still uses."""

ONE_MEANING_LAYERS = ("model", "core", "log", "wire", "transport", "engines", "bus", "server")
AMBIGUOUS_CLASSES = {
    "Admission", "Call", "Commit", "Connection", "Delayed", "Delivery", "Entry", "FastPath",
    "Groups", "Identity", "Journal", "Outcome", "Pressure", "Problem", "Quarantine", "Refused",
    "Result", "Settle", "Subscribe", "TcpLink", "TenantLimits", "TopicPut", "Topics", "Transaction",
    "Waiting", "Wire",
}  # fmt: skip
"""Public class names with more than one meaning."""

METAPHORS = {
    "asking", "bite", "brake", "census", "coldline", "courtesy", "desk", "detour", "dial",
    "doorkeeper", "ending", "errand", "errands", "expanding", "fit", "gauge", "glimpse", "graveyard",
    "haste", "helping", "helpings", "holdback", "housekeeper", "housekeeping", "intake", "keyring",
    "line", "mention", "notice", "outbox", "outgoing", "outlet", "patience", "portion", "recall",
    "respite", "rest", "room", "rubbish", "shipment", "stable", "standing", "storing", "stranger",
    "strangers", "takeup", "timekeeper", "trouble", "troubles", "turnstile", "visit", "wish",
}  # fmt: skip
"""Words that once named modules; a newcomer cannot guess what such a module does."""
METAPHORICAL_MODULES: set[str] = set()

VAGUE_NAMES = {"base", "common", "helper", "helpers", "manager", "misc", "tools", "util", "utils"}

PURE_LAYERS = ("model", "core", "wire")
IMPURE = {
    "asyncio", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "shutil", "socket",
    "subprocess", "tempfile", "threading", "time",
}  # fmt: skip
MAY_READ = {"penstock/model/settings_loader.py", "penstock/model/column.py"}
"""Exceptions in the pure layers: one opens the settings file it was given, one imports a library
in a thread, which changes how fast values are made and nothing else."""

WITHOUT_EXAMPLE = {"Reject", "RetryLater", "SyncBus", "errors"}
"""Public names whose example stands elsewhere: docs/guide/handlers.md, `connect_sync`, the error tree."""

ROWS = {
    *(f"T{n}" for n in range(1, 17)), *(f"X{n}" for n in range(1, 16)), *(f"Q{n}" for n in range(1, 19)),
    *(f"F{n}" for n in range(1, 16)), *(f"B{n}" for n in range(1, 22)), *(f"S{n}" for n in range(1, 10)),
    *(f"Y{n}" for n in range(1, 14)),
}  # fmt: skip
BUILT = {
    "T1", "T2", "T3", "T4", "T5", "T6", "T7", "T8", "T9", "T10", "T11", "T12", "T13", "T15", "T16", "X10", "X11", "Q1", "Q10", "X4", "X5", "X6", "Q2", "Q3", "Q6", "Q7", "Q13",
    "Y1", "Y2", "Y3", "Y4", "Y6", "Y7", "Y13",
}  # fmt: skip
"""Requirements that this release claims; each needs a test that names it."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(path: Path) -> str | None:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> Iterator[str]:
    """Every module a file imports, names taken from modules included; types-only imports too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# -- layers ----------------------------------------------------------------------------------------


def test_layers_are_those_of_the_comment() -> None:
    comment = (PACKAGE / "__init__.py").read_text().partition('"""')[0]
    assert tuple(re.findall(r"^#   (\w+) ", comment, re.MULTILINE)) == LAYERS
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(LAYERS)


def test_nothing_lower_imports_anything_higher() -> None:
    wrong = []
    for path in SOURCES:
        layer = layer_of(path)
        if layer is None:
            continue
        allowed = LAYERS[: LAYERS.index(layer) + 1]
        for name in imports_of(path):
            inside = name.startswith("penstock.")
            if inside and name.split(".")[1] in LAYERS and name.split(".")[1] not in allowed:
                wrong.append(f"{name_of(path)} imports {name}")
            if name == "penstock" and layer not in ("testing", "bench", "cli"):
                wrong.append(f"{name_of(path)} uses the front door")
    assert not wrong


def test_model_and_core_are_pure() -> None:
    """No files, clocks, threads or randomness in the lower layers."""
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in SOURCES
        if layer_of(path) in PURE_LAYERS and name_of(path) not in MAY_READ
        for name in imports_of(path)
        if name.split(".")[0] in IMPURE
    ]
    assert not wrong


def test_the_layer_check_notices(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("from penstock.cli import app\nimport penstock.bus.bus\n")
    assert {"penstock.cli", "penstock.cli.app", "penstock.bus.bus"} <= set(imports_of(file))


# -- names and sizes -------------------------------------------------------------------------------


def test_files_are_nouns() -> None:
    assert not [name_of(path) for path in SOURCES if {path.stem, path.parent.name} & VAGUE_NAMES]


def test_files_are_short() -> None:
    """A file that grows past the limit holds two ideas: find the seam."""
    long = {}
    for path in [*SOURCES, *sorted((ROOT / "examples").glob("*.py"))]:
        lines = len(path.read_text().splitlines())
        if lines > LONG_FILES.get(name_of(path), MAX_FILE_LINES):
            long[name_of(path)] = lines
    assert not long


def long_functions(limit: int) -> dict[str, int]:
    """Functions of more lines than the limit, and how many lines they have."""
    return {
        f"{name_of(path)}:{node.name}": lines
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > limit
    }


def test_functions_fit_a_screen() -> None:
    found = long_functions(MAX_FUNCTION_LINES)
    assert not {name: lines for name, lines in found.items() if lines > LONG_FUNCTIONS.get(name, 0)}


def test_exceptions_are_still_needed() -> None:
    """What was brought below the limit leaves its list."""
    for name in LONG_FILES:
        assert len((ROOT / name).read_text().splitlines()) > MAX_FILE_LINES, name
    assert set(LONG_FUNCTIONS) <= set(long_functions(MAX_FUNCTION_LINES))


def only_shorter(found: set[str], exceptions: set[str]) -> None:
    """A list of exceptions holds what there is: nothing new, and nothing that was mended."""
    assert not found - exceptions
    assert not exceptions - found, "mended: take it off the list of exceptions"


def test_folders_are_short() -> None:
    """A folder that grows past the limit is more than a reader takes in at a glance."""
    files = Counter(name_of(path.parent) for path in SOURCES if path.name != "__init__.py")
    full = {name: count for name, count in files.items() if count > MAX_FOLDER_FILES}
    assert full == FULL_FOLDERS


def importers() -> dict[str, set[Path]]:
    """The files of the package that import each of its modules."""
    found: dict[str, set[Path]] = {module_of(path): set() for path in SOURCES}
    for path in SOURCES:
        for name in imports_of(path):
            if name in found and name != module_of(path):
                found[name].add(path)
    return found


def test_modules_are_deep() -> None:
    """A short file that one other file imports is part of that file, outside the rooms."""
    using, ways_in = importers(), entry_points()
    shallow = {
        name_of(path)
        for path in SOURCES
        if not path.stem.startswith("__")
        and not name_of(path).startswith(ROOMS)
        and module_of(path) not in ways_in
        and len(using[module_of(path)]) == 1
        and len(path.read_text().splitlines()) < SHALLOW_LINES
    }
    only_shorter(shallow, SHALLOW_FILES)


def is_private(name: str) -> bool:
    """Whether a name is one of its module's own; the methods of named tuples only look so."""
    return (
        name.startswith("_")
        and not name.startswith("__")
        and name not in ("_asdict", "_fields", "_make", "_replace")
    )


def defined_in(tree: ast.Module) -> set[str]:
    """The names a file gives to its functions, classes, variables and attributes."""
    names = {
        text for node in ast.walk(tree) if isinstance(node, ast.Assign) for text in slots_of(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            names.add(node.attr)
    return names


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def slots_of(node: ast.Assign) -> set[str]:
    """The attributes that `__slots__ = ...` names."""
    if not any(
        isinstance(target, ast.Name) and target.id == "__slots__" for target in node.targets
    ):
        return set()
    constants = (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def private_names_used(tree: ast.Module) -> set[str]:
    """Private names a file takes from another module of the package, by import or as an attribute.

    As an attribute: of an imported module or name, or of any object when the file itself defines
    no such name.
    """
    imported: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("penstock"):
            imported |= {alias.asname or alias.name for alias in node.names}
            used |= {alias.name for alias in node.names if is_private(alias.name)}
        elif isinstance(node, ast.Import):
            names = (alias for alias in node.names if alias.name.startswith("penstock"))
            imported |= {alias.asname or "penstock" for alias in names}
    mine = defined_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            of_import = isinstance(root, ast.Name) and root.id in imported
            if of_import or node.attr not in mine:
                used.add(node.attr)
    return used


def test_private_names_stay_in_their_module() -> None:
    """Tests, mutants of the simulator and benchmarks may look inside; the product may not."""
    product = [path for path in SOURCES if layer_of(path) not in ("testing", "bench")]
    ours = set().union(*(defined_in(tree_of(path)) for path in product))
    used = {
        f"{name_of(path)}: {name}"
        for path in product
        for name in private_names_used(tree_of(path)) & ours
    }
    only_shorter(used, FOREIGN_PRIVATE_NAMES)


def test_the_check_of_private_names_notices() -> None:
    taken = "from penstock.core import _a\nfrom penstock.core import state\nstate.x._b\nother._c\n"
    own = "class A:\n    __slots__ = ('_d',)\n    def _e(self): self._f = other._d\n"
    set_there = "other._g = 1\n"
    assert private_names_used(ast.parse(taken + own + set_there)) == {"_a", "_b", "_c", "_g"}


def test_class_names_have_one_meaning() -> None:
    """Below the pipelines, a public class name is defined once."""
    names = Counter(
        node.name
        for path in SOURCES
        if layer_of(path) in ONE_MEANING_LAYERS
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not is_private(node.name)
    )
    only_shorter({name for name, count in names.items() if count > 1}, AMBIGUOUS_CLASSES)


def test_modules_are_not_named_by_metaphors() -> None:
    """The words of the product name modules, and the files of tests too."""
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py")]
    named = {
        name_of(path) for path in files if {*path.stem.split("_"), path.parent.name} & METAPHORS
    }
    only_shorter(named, METAPHORICAL_MODULES)


def entry_points() -> set[str]:
    """Modules that are used from outside: by commands, by packaging, by other people's tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    values = [*project["scripts"].values()]
    for group in project["entry-points"].values():
        values += group.values()
    return {
        "penstock",
        "penstock.pipelines.source",  # found by Spark through pyspark_penstock
        *(value.partition(":")[0] for value in values),
        *(f"penstock.cli.{name}" for name in COMMANDS),
    }


def test_no_module_is_dead() -> None:
    """Each module is imported by another one, runs with `python -m`, or is a way in."""
    used = entry_points()
    for path in SOURCES:
        mine = module_of(path)
        for name in imports_of(path):
            if name != mine:
                used.add(name)
    texts = "".join(path.read_text() for path in (*SOURCES, ROOT / "Makefile"))
    dead = []
    for path in SOURCES:
        name = module_of(path)
        if path.name == "__main__.py" or path.name == "__init__.py" or name in used:
            continue
        runs_itself = '__name__ == "__main__"' in path.read_text()
        public = name.startswith("penstock.testing.")
        if not runs_itself and not public and f'"{name}"' not in texts:
            dead.append(name)
    assert not dead


# -- the public surface ----------------------------------------------------------------------------


def test_all_is_what_there_is() -> None:
    assert len(penstock.__all__) == len(set(penstock.__all__))
    assert all(hasattr(penstock, name) for name in penstock.__all__)
    public = {
        name
        for name, value in vars(penstock).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public | {"errors"} == set(penstock.__all__)


def test_all_errors_are_in_the_tree() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.PenstockError)
    }
    assert classes == set(errors.__all__)
    codes = [getattr(errors, name).code for name in classes]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("name", penstock.__all__)
def test_public_names_say_what_they_are_for(name: str) -> None:
    text = inspect.getdoc(getattr(penstock, name)) or ""
    assert len(text.splitlines()[0]) > 10
    if name not in WITHOUT_EXAMPLE and name not in errors.__all__:
        assert ">>>" in text, "show it in use"


def test_public_things_have_docstrings() -> None:
    """Everything public says what it is for; a method of a Protocol says it once, there."""
    classes = [
        (path, node)
        for path in SOURCES
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    spoken = {
        method.name
        for _, node in classes
        if any(isinstance(parent, ast.Name) and parent.id == "Protocol" for parent in node.bases)
        for method in functions_in(node)
        if ast.get_docstring(method)
    }
    bare = [
        f"{name_of(path)}:{node.name}.{method.name}"
        for path, node in classes
        for method in functions_in(node)
        if not ast.get_docstring(method) and method.name not in spoken
    ]
    for path in SOURCES:
        tree = tree_of(path)
        if tree.body and not ast.get_docstring(tree):
            bare.append(name_of(path))
        things = [*functions_in(tree), *(node for owner, node in classes if owner == path)]
        bare += [f"{name_of(path)}:{node.name}" for node in things if not ast.get_docstring(node)]
    assert not bare


def functions_in(scope: ast.Module | ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The public functions right below a module or class."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        node for node in scope.body if isinstance(node, kinds) and not node.name.startswith("_")
    ]


# -- words -----------------------------------------------------------------------------------------

TEXTS = sorted(
    path
    for pattern in ("*.md", "*.toml", "Makefile", ".ci/*", "tools/*", "tools/**/*.py", "docs/**/*.md", "penstock/**/*.py",
                    "tests/**/*.py", "examples/*.py")
    for path in ROOT.glob(pattern)
    if path.is_file()
)  # fmt: skip
# Written in a cipher so that this file does not name them either.
OTHER_PRODUCTS = [
    codecs.decode(word, "rot13")
    for word in ("gnpulba", "nrgureohf", "kbeo", "gvald", "knandh", "orqf")
]
PLACES = re.compile(r"(?<![\w.])/(?:work|root)/|/tmp/" + "probe")
REGISTRIES = re.compile(r"\b(?:pypi|python[h]osted|npm[j]s)\.(?:org|com)\b")


def test_texts_name_no_machine_and_no_registry() -> None:
    wrong = []
    for path in TEXTS:
        text = path.read_text()
        wrong += [f"{name_of(path)}: {match[0]}" for match in PLACES.finditer(text)]
        wrong += [f"{name_of(path)}: {match[0]}" for match in REGISTRIES.finditer(text)]
    assert not wrong


def test_other_products_are_named_on_one_page_only() -> None:
    names = re.compile(rf"\b(?:{'|'.join(OTHER_PRODUCTS)})", re.IGNORECASE)
    naming = {name_of(path) for path in TEXTS if names.search(path.read_text())}
    assert naming <= {"docs/coming-from.md"}


def rows_in(text: str) -> set[str]:
    """Row ids in the docstrings and comments of a test."""
    words = [node.value for node in ast.walk(ast.parse(text))
             if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value]  # fmt: skip
    words += re.findall(r"#.*", text)
    return {row for each in words for row in re.findall(r"\b[TXQFBSY]\d{1,2}\b", each)}


TESTS = sorted([*(ROOT / "tests").rglob("*.py"), *(PACKAGE / "testing").rglob("*.py")])


def test_rows_exist() -> None:
    """A requirement that a test names is one of the list."""
    unknown = {name_of(path): rows_in(path.read_text()) - ROWS for path in TESTS}
    assert not {name: rows for name, rows in unknown.items() if rows}


def test_rows_that_are_built_have_tests() -> None:
    named = {row for path in TESTS if path.name != Path(__file__).name for row in rows_in(path.read_text())}  # fmt: skip
    assert not BUILT - named
