"""Conversion of the infos of several environments to rows and batches, and replacement of rows.

Infos have one of two forms: a list of one dict per row, or the dict of arrays that Gymnasium's vector environments
return, in which the mask `_key` marks the rows that contain `key`. If no row has an info, the dict or list is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.column.casting import cast_exactly, wider

Infos = dict[str, Any] | list[dict[str, Any]]
"""Infos of n environments, in either form."""

Rows = npt.NDArray[np.intp]

_FINALS = frozenset({"final_obs", "_final_obs", "final_info", "_final_info"})


def copy_infos(infos: dict[str, Any]) -> dict[str, Any]:
    """Copy infos: dicts and arrays, which a vector environment may reuse, are copied; other values are not."""
    return {
        key: copy_infos(value) if isinstance(value, dict) else value.copy() if isinstance(value, np.ndarray) else value
        for key, value in infos.items()
    }


def says_more(infos: dict[str, Any]) -> bool:
    """Return whether infos contain values other than final observations."""
    return bool(infos.get("final_info")) or not infos.keys() <= _FINALS


def drop_finals(infos: dict[str, Any]) -> dict[str, Any]:
    """Remove Gymnasium's final observations and final infos."""
    if infos.keys() <= _FINALS:
        return {}
    return {key: value for key, value in infos.items() if key not in _FINALS}


def restore_finals(infos: dict[str, Any], ended: Rows, count: int) -> dict[str, Any]:
    """Replace the infos of resets with the final infos of the ended episodes; Gymnasium stores final infos separately.

    Episode statistics that a vector wrapper has added are preserved.
    """
    remaining = drop_finals(infos)
    finals = dict(infos.get("final_info", {}))
    if not remaining and not finals:
        return remaining
    for key in ("episode", "_episode"):
        if key in infos:
            finals.setdefault(key, infos[key])
    return replace_infos(remaining, finals, ended, count)


def replace_infos(infos: dict[str, Any], others: dict[str, Any], rows: Rows, count: int) -> dict[str, Any]:
    """Replace the infos in `rows`, out of `count` rows, with the infos in the same rows of `others`.

    >>> both = np.array([True, True])
    >>> here, there = {"x": np.array([1, 2]), "_x": both}, {"y": np.array([0, 5]), "_y": ~both}
    >>> infos_to_rows(replace_infos(here, there, np.array([1]), 2), 2)
    [{'x': 1}, {}]
    """
    merged: dict[str, Any] = {}
    for key, value in infos.items():
        if not _is_mask(key, infos):
            mask = _mask(infos, key, count)
            mask[rows] = False
            merged[key], merged[f"_{key}"] = value, mask
    for key, value in others.items():
        if _is_mask(key, others):
            continue
        replaced = np.zeros(count, np.bool_)
        replaced[rows] = _mask(others, key, count)[rows]
        merged[key] = _choose(merged[key], value, replaced) if key in merged else value
        merged[f"_{key}"] = merged[f"_{key}"] | replaced if f"_{key}" in merged else replaced
    return merged


def _choose(value: Any, other: Any, replaced: npt.NDArray[np.bool_]) -> Any:
    if isinstance(value, dict) and isinstance(other, dict):
        return replace_infos(value, other, replaced.nonzero()[0], len(replaced))
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray) and value.shape[1:] == other.shape[1:]:
        for dtype in (value.dtype, *wider(value.dtype, other.dtype)):
            widened, new = cast_exactly(value, dtype), cast_exactly(other, dtype)
            if widened is not None and new is not None:
                widened = widened.copy()
                widened[replaced] = new[replaced]
                return widened
    mixed = np.empty(len(replaced), object)
    for row, elsewhere in enumerate(replaced.tolist()):
        mixed[row] = (other if elsewhere else value)[row]
    return mixed


def _is_mask(key: str, infos: dict[str, Any]) -> bool:
    return key[:1] == "_" and key[1:] in infos


def _mask(infos: dict[str, Any], key: str, count: int) -> npt.NDArray[np.bool_]:
    mask = infos.get(f"_{key}")
    return np.ones(count, np.bool_) if mask is None else np.array(mask, np.bool_)


def infos_to_rows(infos: Infos, rows: int) -> list[dict[str, Any]]:
    """Convert infos to one new dict per row; NumPy scalars become Python numbers.

    >>> infos_to_rows({"lives": np.array([3, 0]), "_lives": np.array([True, False])}, 2)
    [{'lives': 3}, {}]
    """
    if isinstance(infos, list):
        return [dict(info) for info in infos] if infos else [{} for _ in range(rows)]
    converted: list[dict[str, Any]] = [{} for _ in range(rows)]
    for key, value in infos.items():
        if _is_mask(key, infos):
            continue
        items = infos_to_rows(value, rows) if isinstance(value, dict) else _items(value)
        mask = infos.get(f"_{key}")
        for row in range(rows) if mask is None else np.flatnonzero(mask).tolist():
            converted[row][key] = items[row]
    return converted


def empty_infos(rows: int) -> npt.NDArray[Any]:
    """Return one empty dict per row, shape (rows,)."""
    # The fastest way to create many dicts.
    return np.fromiter(map(dict.copy, repeat({}, rows)), object, rows)


def _items(values: Any) -> list[Any]:
    if isinstance(values, np.ndarray) and values.ndim > 1:
        return [row.copy() for row in values]
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def batch_of(infos: Infos) -> Batch:
    """Convert infos to a batch of arrays; the value in rows without a key is 0 or None."""
    if isinstance(infos, list):
        return Batch(infos) if any(infos) else Batch()
    return node(
        Batch,
        {
            key: batch_of(value) if isinstance(value, dict) else np.asarray(value)
            for key, value in infos.items()
            if not _is_mask(key, infos)
        },
    )


def batch_of_steps(infos: Mapping[int, Infos], steps: int, count: int) -> Batch:
    """Convert the infos of `count` environments in several steps to a batch in time order.

    - `infos`: maps the number of a step to the infos of the step; steps without infos may be omitted.

    >>> batch_of_steps({1: {"lives": np.array([3, 2])}}, steps=3, count=2).lives
    array([0, 0, 3, 2, 0, 0])
    """
    dicts = {step: step_infos for step, step_infos in infos.items() if isinstance(step_infos, dict)}
    joined = _join_steps(dicts, steps, count) if len(dicts) == len(infos) else None
    if joined is not None:
        return joined
    return batch_of([row for step in range(steps) for row in infos_to_rows(infos.get(step, {}), count)])


def _join_steps(infos: Mapping[int, dict[str, Any]], steps: int, count: int) -> Batch | None:
    """Concatenate the values of each key over steps; return None if the dtypes or shapes of a key's values differ."""
    data: dict[str, Any] = {}
    for key in dict.fromkeys(
        [key for step_infos in infos.values() for key in step_infos if not _is_mask(key, step_infos)]
    ):
        values = {step: step_infos[key] for step, step_infos in infos.items() if key in step_infos}
        if all(isinstance(value, dict) for value in values.values()):
            inner = _join_steps(values, steps, count)
            if inner is None:
                return None
            data[key] = inner
            continue
        arrays = {step: np.asarray(value) for step, value in values.items()}
        alike = {(array.shape, array.dtype) for array in arrays.values()}
        if len(alike) > 1:
            return None
        ((shape, dtype),) = alike
        column = np.full((steps, *shape), None if dtype.hasobject else 0, dtype)
        column[list(arrays)] = list(arrays.values())
        data[key] = column.reshape(steps * count, *shape[1:])
    return node(Batch, data)
