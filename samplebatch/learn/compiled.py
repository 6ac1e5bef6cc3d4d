"""Requirements of losses that `torch.compile` compiles."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch

from samplebatch.errors import ArgumentError

_CXX_COMPILERS = ("g++", "clang++", "c++", "cl")


def require_compiler() -> None:
    """Raise ArgumentError if this machine has no C++ compiler, which `torch.compile` calls."""
    if not (os.environ.get("CXX") or any(map(shutil.which, _CXX_COMPILERS))):
        raise ArgumentError(
            "compile=True requires a C++ compiler on PATH or in CXX, got none; install g++ or clang, or pass "
            "compile=False"
        )


def require_tensor(obs: Any) -> torch.Tensor:
    """Return observations; raise ArgumentError if the observations are nested.

    >>> require_tensor(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    if not isinstance(obs, torch.Tensor):
        raise ArgumentError("observations must be single tensors for compile=True, got nested ones; pass compile=False")
    return obs
