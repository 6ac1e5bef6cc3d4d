"""uncompile_tianshou: Tianshou without its compiler."""

from __future__ import annotations

import sys
import warnings

import pytest

COMPILED = {
    "tianshou.data.buffer.manager": ("_prev_index", "_next_index"),
    "tianshou.data.utils.segtree": ("_setitem", "_reduce", "_get_prefix_sum_idx"),
    "tianshou.algorithm.algorithm_base": ("_gae", "_nstep_return"),
}
"""Functions that take half a minute to compile, to do in the end the same to a few rows."""


def uncompile_tianshou(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Tianshou call the Python functions that it compiles otherwise; skip the test where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("tianshou.algorithm")
    for module, names in COMPILED.items():
        for name in names:
            compiled = getattr(sys.modules[module], name)
            monkeypatch.setattr(sys.modules[module], name, getattr(compiled, "py_func", compiled))
