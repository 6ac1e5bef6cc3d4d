"""Every class of the library in a public signature has a public name and a page in the reference."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("batch", "column", "returns", "rollout", "testing", "tokens", "transport")
DOORS = ("samplebatch", *(f"samplebatch.{package}" for package in PACKAGES))
OPEN_MODULES = ("samplebatch.errors", "samplebatch.names")
"""Modules whose every name is public; the reference has them whole."""
MADE_BY_FUNCTIONS = (
    "Producer", "Consumer", "Publisher", "Subscription", "Reservation", "PolicyAdapter", "DatasetBatches"
)  # fmt: skip
"""Classes that `channel`, `broadcast`, `reserve`, `as_policy` and `iter_batches` make, and nobody else."""


def public_names() -> dict[str, Any]:
    doors = {door: import_module(door) for door in DOORS}
    return {f"{path}.{name}": getattr(door, name) for path, door in doors.items() for name in door.__all__}


@cache
def imported_names(module: str) -> dict[str, tuple[str, str]]:
    """Map the names that a module's annotations may use to their origin, including imports for type checkers."""
    tree = ast.parse(inspect.getsource(import_module(module)))
    actual = {node.name: (module, node.name) for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            actual |= {alias.asname or alias.name: (str(node.module), alias.name) for alias in node.names}
    return actual


def functions_of(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a public function itself, or the public methods and properties of a class, including inherited ones."""
    if inspect.isfunction(value):
        yield path, value
    elif inspect.isclass(value):
        for name in dir(value):
            stored = inspect.getattr_static(value, name)
            stored = stored.fget if isinstance(stored, property) else getattr(stored, "__func__", stored)
            public = not name.startswith("_") or name in ("__iter__", "__enter__", "__getitem__")
            public |= name == "__init__" and value.__name__ not in MADE_BY_FUNCTIONS
            if public and inspect.isfunction(stored) and stored.__module__.startswith("samplebatch"):
                yield f"{path}.{name}", stored


def classes_named(function: Any) -> Iterator[type]:
    """Yield the classes of the library in a function's annotations."""
    imported = imported_names(function.__module__)
    for annotation in function.__annotations__.values():
        for name in re.findall(r"(?<![.\w])\w+", str(annotation)):
            module, original = imported.get(name, ("", ""))
            actual = getattr(import_module(module), original, None) if module.startswith("samplebatch") else None
            if inspect.isclass(actual) and actual.__module__.startswith("samplebatch"):
                yield actual


def mentions() -> dict[type, str]:
    """Map every class that a public signature names to one such signature."""
    actual: dict[type, str] = {}
    for path, value in public_names().items():
        for where, function in functions_of(path, value):
            for named in classes_named(function):
                actual.setdefault(named, where)
    return actual


def without(named: set[int]) -> list[str]:
    """List the classes in public signatures that are not among some objects."""
    return sorted(
        f"{cls.__module__}.{cls.__name__}, named by {where}"
        for cls, where in mentions().items()
        if id(cls) not in named and cls.__module__ not in OPEN_MODULES
    )


def test_classes_in_public_signatures_have_public_names() -> None:
    hidden = without({id(value) for value in public_names().values()})
    assert not hidden, "\n".join(hidden)


def test_classes_in_public_signatures_are_in_the_reference() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*/index.md"))
    listed = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    missing = without({id(value) for path, value in public_names().items() if path in listed})
    assert not missing, "\n".join(missing)


def test_the_search_includes_inherited_methods_and_functions() -> None:
    actual = {named.__name__ for named in mentions()}
    assert {"Producer", "Consumer", "Subscription", "SampleBatch", "Batch", "CollectStats"} <= actual
