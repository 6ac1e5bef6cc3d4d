"""Optional packages; tests that require a missing package are skipped."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import pytest

from samplebatch.errors import MissingExtraError

PACKAGES = frozenset(
    {
        "datasets",
        "duckdb",
        "envpool",
        "grpc",
        "gymnasium",
        "h5py",
        "jax",
        "matplotlib",
        "mpe2",
        "msgpack",
        "msgpack_numpy",
    }
    | {"optree", "pandas", "pettingzoo", "polars", "ray", "rich", "stable_baselines3", "tensorboard", "tensordict"}
    | {"tianshou", "torch", "torchrl", "typer"}
)
"""Packages without which a part of the suite runs, as with a version of Python that they do not support yet."""


def missing_package(error: BaseException | None) -> str | None:
    """Return the missing package that an import error reports; None for other errors."""
    if isinstance(error, MissingExtraError) and (named := re.match(r"'(\w+)' is not installed", str(error))):
        return named[1] if named[1] in PACKAGES and find_spec(named[1]) is None else None
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package = error.name.partition(".")[0]
    return package if package in PACKAGES and find_spec(package) is None else None


class _Missing:
    """Package that is not installed; first use skips the test or the importing test module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        pytest.skip(f"{self._name} is not installed", allow_module_level=True)


HAS_TORCH: Final = find_spec("torch") is not None
"""Whether helpers that tests share add tensors to what they make; the other columns are tested without torch too."""

torch: Any = import_module("torch") if HAS_TORCH else _Missing("torch")
