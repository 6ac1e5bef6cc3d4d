"""Tianshou without its compiler, and runs that can be repeated."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

COMPILED = {
    "tianshou.data.buffer.manager": ("_prev_index", "_next_index"),
    "tianshou.data.utils.segtree": ("_setitem", "_reduce", "_get_prefix_sum_idx"),
    "tianshou.algorithm.algorithm_base": ("_gae", "_nstep_return"),
}
"""Functions that take half a minute to compile, to do in the end the same to a few rows."""


@pytest.fixture(autouse=True)
def _uncompiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "tianshou" not in request.module.__name__:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("tianshou.algorithm")
    for module, names in COMPILED.items():
        for name in names:
            compiled = getattr(sys.modules[module], name)
            monkeypatch.setattr(sys.modules[module], name, getattr(compiled, "py_func", compiled))


@pytest.fixture
def seeded() -> Iterator[None]:
    """Let torch and NumPy draw the same numbers each time, in one thread, whatever ran before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    yield
    torch.set_num_threads(threads)
