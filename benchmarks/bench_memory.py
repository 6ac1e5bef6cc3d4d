"""`memory.*`: copies into an array from the library's memory pool, a new NumPy array, or a warm array.

The bare times are the lower limit: no memory is allocated, and every page of the output has been written before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness import Row, Way, row

MIB = 1 << 20


def _copy_into(out: Any, source: Any) -> Any:
    np.copyto(out, source)
    return out


def _ours(_: Any, source: Any) -> Any:
    from samplebatch.column import memory

    return lambda: _copy_into(memory.empty(source.shape, source.dtype), source)


def _numpy(_: Any, source: Any) -> Any:
    return lambda: _copy_into(np.empty(source.shape, source.dtype), source)


def _bare(_: Any, source: Any) -> Any:
    out = np.ones_like(source)
    return lambda: _copy_into(out, source)


def _copy(mib: int) -> Row:
    return row(
        f"memory.copy.{mib}MB",
        lambda: np.arange(mib * MIB // 8),
        traffic=True,
        # Up to about 30 MB, NumPy's memory is also warm, and both contestants are equally fast.
        level=1.15,
        ours=Way(_ours),
        numpy=Way(_numpy),
        bare=Way(_bare),
    )


ROWS = [_copy(mib) for mib in (1, 4, 16, 64, 256)]
