"""The page of names lists every public name of Tianshou and its counterpart."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import samplebatch
import samplebatch.batch
import samplebatch.learn
import samplebatch.returns
import samplebatch.rollout

pytest.importorskip("tianshou.data")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tianshou.data

    from benchmarks.training.tianshou_setup import discrete, q_policy

PAGE = Path(__file__).parents[2] / "docs" / "tianshou-names.md"
DOORS = (samplebatch, samplebatch.batch, samplebatch.rollout)
MODULES = ("batch", "buffer.buffer_base", "collector", "stats", "types", "utils.converter", "utils.segtree")
"""Modules of `tianshou.data` with public names of their own."""


def rows() -> Iterator[tuple[str, set[str], str]]:
    """Yield the owner of the names in a row, the names, and the text of the row."""
    table = PAGE.read_text()
    for line in table.splitlines():
        cells = line.strip("|").split(" | ")
        if line.startswith("| `"):
            yield cells[0].strip(" `"), set(re.findall(r"`(\w+)`", cells[1])), cells[2].strip()


def describe(owner: str) -> dict[str, str]:
    actual: dict[str, str] = {}
    for whose, names, verdict in rows():
        if whose == owner:
            assert not actual.keys() & names, f"twice: {actual.keys() & names}"
            actual |= dict.fromkeys(names, verdict)
    return actual


def instance(cls: type) -> Any:
    """Create an object with the attributes that `__init__` sets."""
    data = tianshou.data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if issubclass(cls, data.BaseCollector):
            return data.Collector(q_policy(envs := discrete()), envs, data.VectorReplayBuffer(4, 2))
        if issubclass(cls, data.CachedReplayBuffer):
            return cls(data.ReplayBuffer(3), 2, 3)
        if issubclass(cls, data.ReplayBuffer):
            options: dict[str, Any] = {"alpha": 1.0, "beta": 1.0} if "Prioritized" in cls.__name__ else {}
            options |= {"compute_reward_fn": len, "horizon": 3} if "HER" in cls.__name__ else {}
            name = cls.__name__.removesuffix("Manager")
            if name != cls.__name__:
                return cls([getattr(data, name)(2, **options)])
            return cls(2, 1, **options) if "Vector" in name else cls(2, **options)
    return cls


PUBLIC = {name: getattr(tianshou.data, name) for name in tianshou.data.__all__}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}
HERE = {name: next((getattr(door, name) for door in DOORS if hasattr(door, name)), None) for name in PUBLIC}


def public_names(cls: type) -> set[str]:
    names = set(dir(cls)) | vars(instance(cls)).keys() | getattr(cls, "__dataclass_fields__", {}).keys()
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("name", [name for name in sorted(CLASSES) if HERE[name] is not None])
def test_every_name_of_a_class_is_on_the_page(name: str) -> None:
    cls, here = CLASSES[name], HERE[name]
    verdicts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        verdicts |= describe(base.__name__)
    names = public_names(cls)
    assert names <= verdicts.keys(), f"not mentioned: {sorted(names - verdicts.keys())}"
    own = set(dir(here)) | getattr(here, "__dataclass_fields__", {}).keys() | _instance_names(here)
    for attribute in names:
        verdict = verdicts[attribute]
        assert verdict.startswith(("yes", "differs", "left out")), verdict
        if verdict.startswith("yes"):
            assert attribute in own, attribute
        if verdict.startswith("left out"):
            assert attribute not in own, attribute


def _instance_names(here: Any) -> set[str]:
    """Return the attributes in the docstring of a library class, which only instances have."""
    listed: set[str] = set()
    for cls in here.__mro__:
        text = (cls.__doc__ or "").partition("Attributes\n")[2]
        listed |= {name for line in re.findall(r"^ *((?:\w+, )*\w+)$", text, re.MULTILINE) for name in line.split(", ")}
        listed |= getattr(cls, "__annotations__", {}).keys()
    return listed


def test_every_name_of_the_package_is_on_the_page() -> None:
    verdicts = describe("tianshou.data")
    assert verdicts.keys() == set(tianshou.data.__all__)
    for name, verdict in verdicts.items():
        assert (HERE[name] is None) == verdict.startswith("left out"), name


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_a_module_is_on_the_page(module: str) -> None:
    home = f"tianshou.data.{module}"
    ours = {
        name
        for name, value in vars(import_module(home)).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == home
    }
    verdicts = describe(home)
    assert ours - set(tianshou.data.__all__) == verdicts.keys()
    for name, verdict in verdicts.items():
        if verdict.startswith("yes"):
            assert any(hasattr(door, name) for door in DOORS), name


PACKAGES = sorted({owner for owner, _, _ in rows() if owner.count(".") == 1} - {"tianshou.data"})
ALL_DOORS = (*DOORS, samplebatch.learn, samplebatch.returns)


def defined_names() -> dict[str, set[str]]:
    """Return public names of Tianshou's modules by package; parsed from source, as some modules need other packages."""
    root = Path(tianshou.data.__file__).parents[1]
    actual: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        package = f"tianshou.{path.relative_to(root).with_suffix('').parts[0]}"
        for statement in ast.parse(path.read_text()).body:
            targets: list[Any] = []
            if isinstance(statement, ast.ClassDef | ast.FunctionDef):
                actual.setdefault(package, set()).add(statement.name)
            elif isinstance(statement, ast.Assign):
                targets = statement.targets
            elif isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            value = getattr(statement, "value", None)
            made_by = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
            if made_by not in ("TypeVar", "getLogger"):
                actual.setdefault(package, set()).update(
                    target.id for target in targets if isinstance(target, ast.Name)
                )
    public = {package: {name for name in names if not name.startswith("_")} for package, names in actual.items()}
    return {package: names for package, names in public.items() if names and package != "tianshou.data"}


def test_every_package_of_tianshou_has_rows() -> None:
    assert defined_names().keys() == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_the_other_packages_is_on_the_page(package: str) -> None:
    verdicts, names = describe(package), defined_names()[package]
    assert names <= verdicts.keys(), f"not mentioned: {sorted(names - verdicts.keys())}"
    assert verdicts.keys() <= names, f"not in Tianshou: {sorted(verdicts.keys() - names)}"
    for name, verdict in verdicts.items():
        assert verdict.startswith(("yes", "differs", "left out")), verdict
        assert any(name in door.__all__ for door in ALL_DOORS) != verdict.startswith("left out"), name
