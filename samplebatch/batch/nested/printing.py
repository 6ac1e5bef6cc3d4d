"""How a nested batch is printed."""

from __future__ import annotations

from typing import Any

import numpy as np

from samplebatch.batch.nested.node import ARRAY, KINDS, NUMBER, Node

_PLAIN = frozenset((np.dtype("?"), np.dtype("i8"), np.dtype("f8"), np.dtype("c16")))
"""Dtypes that a number has when nobody says otherwise: it is shown without."""


def printed(source: Node) -> str:
    """Return the text of a nested batch: one name a line, nested ones indented under theirs."""
    head = type(source).__name__
    if not source.__dict__:
        return f"{head}()"
    lines = [f"{head}("]
    for name, value in source.__dict__.items():
        margin = " " * (len(name) + 6)
        lines.append(f"    {name}: {_leaf(value)},".replace("\n", f"\n{margin}"))
    lines.append(")")
    return "\n".join(lines)


def _leaf(value: Any) -> str:
    kind = KINDS[type(value)]
    # What a buffer hands out of one of its rows is a view, which its documents show as the array that it is.
    if kind in (ARRAY, NUMBER) and np.ndim(value) == 0 and getattr(value, "base", None) is None:
        number = np.asarray(value)
        if number.dtype in _PLAIN:
            return repr(number.item())
    return repr(value)
