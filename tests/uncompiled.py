"""Tianshou without numba compilation, which takes half a minute for functions that tests call on a few rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILED = {
    "tianshou.data.buffer.manager": ("_prev_index", "_next_index"),
    "tianshou.data.utils.segtree": ("_setitem", "_reduce", "_get_prefix_sum_idx"),
    "tianshou.algorithm.algorithm_base": ("_gae", "_nstep_return"),
}
"""Tianshou's compiled functions by module."""


class Uncompiling(MetaPathFinder):
    """Import finder for Tianshou's compiled modules, which retains the Python functions."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module if Tianshou compiles its functions."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in COMPILED else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def uncompile(module: ModuleType) -> None:
            execute(module)
            for name in COMPILED[fullname]:
                setattr(module, name, getattr(module, name).py_func)

        loader.exec_module = uncompile
        return spec


def uncompile_tianshou() -> None:
    """Disable compilation in Tianshou before any test imports it."""
    sys.meta_path.insert(0, Uncompiling())
