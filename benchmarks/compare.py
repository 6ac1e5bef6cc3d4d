"""Conversion of results to plain containers of NumPy arrays, and comparison of converted results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa


def plain(value: Any) -> Any:
    """Convert a result of any contestant to dicts, lists and arrays."""
    if isinstance(value, np.ndarray | np.generic | int | float | str | bytes | None):
        return value
    policies = getattr(value, "policy_batches", None)
    if policies is not None:
        return plain(policies)
    if isinstance(value, pa.Table):
        return {name: plain(value.column(name)) for name in value.column_names}
    if isinstance(value, pa.ChunkedArray):
        return np.concatenate([plain(chunk) for chunk in value.chunks])
    if isinstance(value, pa.FixedShapeTensorArray):
        return value.to_numpy_ndarray()
    if isinstance(value, pa.Array):
        return value.to_numpy(zero_copy_only=False)
    if isinstance(value, Mapping) or hasattr(value, "batch_size"):
        return {key: plain(value[key]) for key in value.keys()}  # noqa: SIM118 (a TensorDict iterates over its rows)
    if isinstance(value, list | tuple | Iterator):
        return [plain(item) for item in value]
    return np.asarray(value)


def differs(a: Any, b: Any, path: str = "result") -> str | None:
    """Return the path of the first difference between two plain results; None if they are equal."""
    if isinstance(b, dict):
        if not isinstance(a, dict) or a.keys() != b.keys():
            return path
        return next((child for key in b if (child := differs(a[key], b[key], f"{path}[{key!r}]"))), None)
    if isinstance(b, list):
        if not isinstance(a, list) or len(a) != len(b):
            return path
        return next((child for i, item in enumerate(b) if (child := differs(a[i], item, f"{path}[{i}]"))), None)
    return None if np.shape(a) == np.shape(b) and np.array_equal(a, b) else path
