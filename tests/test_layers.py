"""Every import of the package agrees with the table of layers."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "samplebatch"

VERSION = "samplebatch.__version__"
"""The one name that modules may take from the package itself."""

LAYERS = (
    "errors",
    "arguments",
    "exports",
    "names",
    "kernels",
    "deferred_kernels",
    "column",
    "batch",
    "returns",
    "tokens",
    "buffer",
    "transport",
    "storage",
    "env",
    "policy",
    "rollout",
    "workers",
    "convert",
    "service",
    "loggers",
    "learn",
    "testing",
    "cli",
    "__main__",
)
"""Each imports only from those before it, and from itself."""

FRONT_DOORS = {
    "samplebatch",
    "samplebatch.batch",
    "samplebatch.batch.nested",
    "samplebatch.column",
    "samplebatch.convert",
    "samplebatch.learn",
    "samplebatch.returns",
    "samplebatch.rollout",
    "samplebatch.service",
    "samplebatch.storage",
    "samplebatch.testing",
    "samplebatch.tokens",
    "samplebatch.transport",
}
"""Packages that only list names and their homes, in any layer."""

DOOR_USERS = {"cli"}
"""Layers that use public names as programs of users do: from the packages below that list them."""

STRANGERS = {frozenset({"buffer", "transport"})}
"""Layers that know nothing of each other, whatever their order."""

HAND_OVERS = {
    ("samplebatch.batch.sample_batch", "_multi_agent_batch"): {"samplebatch.batch"},
    ("samplebatch.batch.sample_batch", ""): {"samplebatch.tokens"},
    ("samplebatch.batch.sample_batch", "assign"): {"samplebatch.tokens"},
    ("samplebatch.batch.sample_batch", "balance"): {"samplebatch.tokens"},
    ("samplebatch.batch.sample_batch", "chunk"): {"samplebatch.tokens"},
    ("samplebatch.batch.sample_batch", "group_by"): {"samplebatch.tokens"},
    ("samplebatch.batch.delivery", "minibatches"): {"samplebatch.tokens"},
    ("samplebatch.batch.sample_batch", "pack"): {"samplebatch.tokens"},
    ("samplebatch.batch.sample_batch", "repeat"): {"samplebatch.tokens"},
    ("samplebatch.batch.sample_batch", "union"): {"samplebatch.tokens"},
    ("samplebatch.batch.sample_batch", "as_batch"): {"samplebatch.batch.nested"},
    ("samplebatch.batch.multi_agent", "save"): {"samplebatch.storage"},
    ("samplebatch.batch.sample_batch", "save"): {"samplebatch.storage"},
    ("samplebatch.batch.nested.batch", "save"): {"samplebatch.storage"},
    ("samplebatch.buffer.multi_agent", "load_state_dict"): {"samplebatch.storage"},
    ("samplebatch.buffer.multi_agent", "save"): {"samplebatch.storage"},
    ("samplebatch.buffer.multi_agent", "state_dict"): {"samplebatch.storage"},
    ("samplebatch.buffer.replay", "_keep_in"): {"samplebatch.storage"},
    ("samplebatch.buffer.replay", "load"): {"samplebatch.storage"},
    ("samplebatch.buffer.replay", "load_hdf5"): {"samplebatch.storage"},
    ("samplebatch.buffer.replay", "load_state_dict"): {"samplebatch.storage"},
    ("samplebatch.buffer.replay", "open"): {"samplebatch.storage"},
    ("samplebatch.buffer.replay", "save"): {"samplebatch.storage"},
    ("samplebatch.buffer.replay", "save_hdf5"): {"samplebatch.storage"},
    ("samplebatch.buffer.replay", "state_dict"): {"samplebatch.storage"},
}
"""Methods that hand over to a layer above, or to a class made of theirs: through its door, inside the method."""

LOADED_INSIDE = {
    ("samplebatch.cli.application", "application.collect_command"): {"samplebatch.cli.collecting"},
    ("samplebatch.cli.application", "application.inspect_command"): {"samplebatch.cli.collecting"},
    ("samplebatch.cli.application", "application.serve_command"): {"samplebatch.cli.serving"},
    ("samplebatch.cli.application", "application.top_command"): {"samplebatch.cli.serving"},
    ("samplebatch.cli.application", "application.train_command"): {
        "samplebatch.cli.training",
        "samplebatch.cli.experiments",
    },
    ("samplebatch.cli.application", "application.verify_command"): {"samplebatch.cli.collecting"},
    ("samplebatch.service.connection", "new_link"): {"samplebatch.service.link"},
    ("samplebatch.service.server", "_listen"): {"samplebatch.service.flight_server"},
}
"""Functions that load a neighbour when they are called, as it loads what importing the package can do without."""

MAX_LINES = 1200

ONE_IMPORTER = {
    "is a layer's door to the only layer above that needs it, or one of several behind such a door": {
        "samplebatch.service.fragment_items",
        "samplebatch.service.step_items",
    },
    "runs in a process of its own, or in place of that": {
        "samplebatch.env.async_vector",
    },
    "is loaded on demand, as it loads an optional library or much of the package": {
        "samplebatch.cli.collecting",
        "samplebatch.cli.experiments",
        "samplebatch.cli.recipes",
        "samplebatch.cli.serving",
        "samplebatch.service.flight_server",
    },
    "is a file format of its own": {
        "samplebatch.storage.buffers.segments",
        "samplebatch.storage.datasets.parts",
        "samplebatch.storage.foreign.parquet",
    },
}
"""Modules that only one other imports, and that are no home of a public name, by why they are not a part of it."""

EAGER = {"numpy", "pyarrow"}
"""What importing a module may load; every other package is imported inside the function that needs it."""

ON_DEMAND = {
    "samplebatch.env.atari": {"gymnasium"},
    "samplebatch.kernels": {"numba"},
    "samplebatch.service.flight_server": {"pyarrow"},
    "samplebatch.service.link": {"pyarrow"},
}
"""Modules that load more, and are therefore imported inside functions only."""

LEARNING = {"learn": {"torch", "gymnasium"}}
"""The layer whose modules are written in torch and know spaces; none below it may load these before it is asked to."""


@dataclass(frozen=True)
class Import:
    """Imported module, the position of the import, and whether it runs when the importing module is imported."""

    importer: str
    function: str
    target: str
    line: int
    typing_only: bool

    def __str__(self) -> str:
        inside = f", in {self.function}()" if self.function else ""
        return f"{self.importer}:{self.line}{inside}: imports {self.target}"


class Imports(ast.NodeVisitor):
    """Collects the imports of one module."""

    def __init__(self, module: str, modules: set[str]) -> None:
        self.module, self.modules = module, modules
        self.functions: list[str] = []
        self.typing_only = False
        self.found: list[Import] = []

    def add(self, target: str, line: int) -> None:
        self.found.append(Import(self.module, ".".join(self.functions), target, line, self.typing_only))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, f"{self.module}:{node.lineno}: imports are absolute"
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            is_internal = full in self.modules or full == VERSION
            self.add(full if is_internal else str(node.module), node.lineno)

    def visit_scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.functions.append(node.name)
        self.generic_visit(node)
        self.functions.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_scope

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.generic_visit(node)
            return
        self.typing_only = True
        for statement in node.body:
            self.visit(statement)
        self.typing_only = False
        for statement in node.orelse:
            self.visit(statement)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {module: ast.parse(path.read_text()) for module, path in SOURCES.items()}


def imports_of(module: str, tree: ast.Module) -> list[Import]:
    visitor = Imports(module, set(SOURCES))
    visitor.visit(tree)
    return visitor.found


@cache
def all_imports() -> list[Import]:
    return [actual for module, tree in TREES.items() for actual in imports_of(module, tree)]


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def breach(actual: Import) -> str | None:
    """Return the layer rule that an import violates, if any."""
    if actual.target.split(".")[0] != "samplebatch" or actual.importer in FRONT_DOORS or actual.target == VERSION:
        return None
    importer_layer, target_layer = layer(actual.importer), layer(actual.target)
    where = actual.importer, actual.function
    if actual.target in HAND_OVERS.get(where, ()):
        return None if actual.target in FRONT_DOORS else f"hands over to a module of {target_layer}, not to its door"
    if importer_layer in DOOR_USERS and actual.target in FRONT_DOORS and target_layer:
        return (
            None
            if LAYERS.index(target_layer) < LAYERS.index(importer_layer)
            else f"{target_layer} stands after {importer_layer}"
        )
    if actual.target in FRONT_DOORS | {"samplebatch.exports"}:
        return "takes a name from the package's front door, not from the module that has it"
    if frozenset({importer_layer, target_layer}) in STRANGERS:
        return f"{importer_layer} and {target_layer} know nothing of each other"
    if LAYERS.index(target_layer) > LAYERS.index(importer_layer):
        return f"{target_layer} stands after {importer_layer}"
    if importer_layer == target_layer and actual.function and actual.target not in LOADED_INSIDE.get(where, ()):
        return "imports a neighbour inside a function that LOADED_INSIDE does not list"
    return None


def test_every_module_has_a_layer() -> None:
    unknown = {layer(module) for module in SOURCES} - {"", *LAYERS}
    assert not unknown, f"give these a place in LAYERS: {sorted(unknown)}"


def test_the_architecture_page_shows_every_layer() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page[page.index("| layer |") : page.index("## The life of a step")]
    text = {name for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)}
    present = {layer(module) for module in SOURCES} - {"", "exports"}
    assert present <= text <= set(LAYERS)


def test_the_picture_of_the_layers_shows_each() -> None:
    picture = (ROOT / "docs" / "images" / "layers.svg").read_text()
    boxes = re.findall(r'class="name">(.*?)<', picture)
    assert {name for box in boxes for name in box.split(" · ")} == {*LAYERS} - {"__main__"}


def test_imports_only_target_lower_layers() -> None:
    breaches = [f"{actual}: {why}" for actual in all_imports() if (why := breach(actual))]
    assert not breaches, "\n".join(breaches)


def test_every_listed_import_exists_in_the_code() -> None:
    present = {(actual.importer, actual.function, actual.target) for actual in all_imports()}
    listed = {(*where, target) for where, targets in (HAND_OVERS | LOADED_INSIDE).items() for target in targets}
    assert listed <= present, f"no longer in the code: {sorted(listed - present)}"


def is_listing(statement: ast.stmt) -> bool:
    """Return whether a statement of a package's `__init__` only defines names: imports, constants or exported names."""
    if isinstance(statement, ast.If):
        return "TYPE_CHECKING" in ast.unparse(statement.test) and all(map(is_listing, statement.body))
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.Assign | ast.Expr)


@pytest.mark.parametrize("door", sorted(FRONT_DOORS))
def test_front_modules_contain_no_code(door: str) -> None:
    actual = [ast.unparse(statement) for statement in TREES[door].body if not is_listing(statement)]
    assert not actual, f"{door} is to list names only, it has: {actual}"


def import_graph() -> dict[str, set[str]]:
    """Map every module to its imports, including imports inside functions; `__init__` modules have none."""
    graph: dict[str, set[str]] = {module: set() for module in SOURCES}
    for actual in all_imports():
        if actual.target in graph and not (actual.typing_only or actual.importer in FRONT_DOORS):
            graph[actual.importer].add(actual.target)
    return graph


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Find the strongly connected components of a graph."""

    def reachable(start: str) -> set[str]:
        observed: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - observed
            observed |= new
            waiting += new
        return observed

    reach = {node: reachable(node) for node in graph}
    return {frozenset(other for other in reach[node] if node in reach[other]) for node in graph if node in reach[node]}


def test_import_cycles_are_detected() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(graph) == {frozenset("bc")}


def test_no_modules_have_cyclic_imports() -> None:
    actual = sorted(map(sorted, circles(import_graph())))
    assert not actual, f"modules that import each other: {actual}"


def test_files_are_short() -> None:
    lengths = {module: path.read_text().count("\n") for module, path in SOURCES.items()}
    long = {module: lines for module, lines in lengths.items() if lines > MAX_LINES}
    assert not long, f"files of more than {MAX_LINES} lines: {long}"


def public_homes() -> set[str]:
    """List the modules that define public names."""
    return {actual.target for actual in all_imports() if actual.importer in FRONT_DOORS}


def test_modules_with_a_single_importer_have_a_reason() -> None:
    importers: dict[str, set[str]] = {module: set() for module in SOURCES}
    for actual in all_imports():
        if actual.target in importers and actual.importer not in FRONT_DOORS and actual.target not in FRONT_DOORS:
            importers[actual.target].add(actual.importer)
    listed, homes = set().union(*ONE_IMPORTER.values()), public_homes()
    alone = {module: part for module, part in importers.items() if len(part) == 1 and module not in listed | homes}
    assert not alone, f"merge these into the only module that imports them, or say in ONE_IMPORTER why not: {alone}"
    stale = sorted(module for module in listed if module in homes or len(importers.get(module, ())) != 1)
    assert not stale, f"take these out of ONE_IMPORTER: {stale}"


def loads_at_once(actual: Import) -> bool:
    """Return whether an import of the package's modules also imports a package that must be imported later."""
    if actual.function or actual.typing_only:
        return False
    root = actual.target.split(".")[0]
    if root == "samplebatch":
        return actual.target in ON_DEMAND
    if root in LEARNING.get(layer(actual.importer), ()):
        return False
    return (
        root not in EAGER | ON_DEMAND.get(actual.importer, set()) | sys.stdlib_module_names
        or "pyarrow." in actual.target
    )


def test_modules_load_nothing_but_numpy_and_pyarrow() -> None:
    heavy = [str(actual) for actual in all_imports() if loads_at_once(actual)]
    assert not heavy, "\n".join(heavy)


PACKAGES = {"PIL": "pillow", "cv2": "opencv-python-headless"}
"""Packages by their modules, where their names differ."""


def required_modules() -> Iterator[tuple[str, str, str]]:
    """Yield position, module and extra of every call of `errors.require`."""
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "require":
                name, extra = (ast.literal_eval(argument) for argument in node.args)
                yield f"{module}:{node.lineno}", name, extra


def test_required_modules_belong_to_the_extra_they_mention() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for where, name, extra in required_modules():
        assert extra in extras, f"{where}: there is no extra {extra!r}"
        packages = {requirement.split(">")[0].split("=")[0].split("[")[0] for requirement in extras[extra]}
        root = name.split(".")[0]
        assert PACKAGES.get(root, root.replace("_", "-")) in packages, (
            f"{where}: extra {extra!r} does not bring {name!r}"
        )


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        ("samplebatch.column.tensor", "import samplebatch.batch.tree", "stands after"),
        ("samplebatch.buffer.ring", "from samplebatch.transport import encode", "know nothing"),
        ("samplebatch.transport.encode", "def f():\n    import samplebatch.buffer", "know nothing"),
        ("samplebatch.batch.tree", "from samplebatch import SampleBatch", "front door"),
        ("samplebatch.learn.ppo", "from samplebatch import service", "front door"),
        ("samplebatch.cli.recipes", "from samplebatch import SampleBatch", "front door"),
        ("samplebatch.batch.tree", "def f():\n    import samplebatch.batch.concat", "LOADED_INSIDE"),
        ("samplebatch.batch.tree", "def save():\n    import samplebatch.storage.saving", "stands after"),
    ],
)
def test_layer_violations_are_detected(module: str, source: str, why: str) -> None:
    (actual,) = imports_of(module, ast.parse(source))
    assert why in str(breach(actual))
