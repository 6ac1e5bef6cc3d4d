"""Compiler: methods of an algorithm that `torch.compile` compiles."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

from samplebatch.errors import ArgumentError

_CXX_COMPILERS = ("g++", "clang++", "c++", "cl")


class Compiler:
    """Compiler of methods, each at its first call; copies and pickles of a compiler contain no compiled code.

    Raises ArgumentError if this machine has no C++ compiler, which `torch.compile` calls.
    """

    def __init__(self) -> None:
        if not (os.environ.get("CXX") or any(map(shutil.which, _CXX_COMPILERS))):
            raise ArgumentError(
                "compile=True requires a C++ compiler on PATH or in CXX, got none; install g++ or clang, or pass "
                "compile=False"
            )
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def call(self, method: Any, rows: Any, *arguments: Any) -> Any:
        """Call a method on rows whose column `obs` must be a tensor.

        Raises ArgumentError if the observations are nested.
        """
        if not isinstance(rows.obs, torch.Tensor):
            raise ArgumentError(
                "observations must be single tensors for compile=True, got nested ones; pass compile=False"
            )
        function = method.__func__
        compiled = self._compiled.get(function)
        if compiled is None:
            compiled = self._compiled[function] = torch.compile(function)
        return compiled(method.__self__, rows, *arguments)

    def __getstate__(self) -> dict[str, Any]:
        return {"_compiled": {}}
