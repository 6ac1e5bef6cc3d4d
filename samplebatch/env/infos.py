"""Infos of many environments: as rows, as a batch, and partly replaced.

Infos come in one of two forms: a list with a dict a row, or, as Gymnasium's vector environments give them, a dict of
arrays, in which the mask `_key` says for which rows `key` is meant. Nothing said at all is an empty dict or an empty
list in both.
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
    """Copy dicts and arrays, which a vector environment may use again; all else stays the same."""
    return {
        key: copy_infos(value) if isinstance(value, dict) else value.copy() if isinstance(value, np.ndarray) else value
        for key, value in infos.items()
    }


def says_more(infos: dict[str, Any]) -> bool:
    """Tell whether infos hold more than the last observations of episodes."""
    return bool(infos.get("final_info")) or not infos.keys() <= _FINALS


def drop_finals(infos: dict[str, Any]) -> dict[str, Any]:
    """Leave out Gymnasium's infos about episodes that ended in the same step."""
    if infos.keys() <= _FINALS:
        return {}
    return {key: value for key, value in infos.items() if key not in _FINALS}


def restore_finals(infos: dict[str, Any], ended: Rows, count: int) -> dict[str, Any]:
    """Put the infos of last steps, which Gymnasium keeps apart, in the place of those of the resets.

    The report of a vector environment's wrapper about these episodes stays.
    """
    said = drop_finals(infos)
    finals = dict(infos.get("final_info", {}))
    if not said and not finals:
        return said
    for key in ("episode", "_episode"):
        if key in infos:
            finals.setdefault(key, infos[key])
    return replace_infos(said, finals, ended, count)


def replace_infos(infos: dict[str, Any], others: dict[str, Any], rows: Rows, count: int) -> dict[str, Any]:
    """Take the infos of some rows, out of `count`, from elsewhere, and those of all other rows as they are.

    Examples
    --------
    >>> both = np.array([True, True])
    >>> here, there = {"x": np.array([1, 2]), "_x": both}, {"y": np.array([0, 5]), "_y": ~both}
    >>> infos_to_rows(replace_infos(here, there, np.array([1]), 2), 2)
    [{'x': 1}, {}]
    """
    merged: dict[str, Any] = {}
    for key, value in infos.items():
        if not _is_mask(key, infos):
            here = _mask(infos, key, count)
            here[rows] = False
            merged[key], merged[f"_{key}"] = value, here
    for key, value in others.items():
        if _is_mask(key, others):
            continue
        there = np.zeros(count, np.bool_)
        there[rows] = _mask(others, key, count)[rows]
        merged[key] = _choose(merged[key], value, there) if key in merged else value
        merged[f"_{key}"] = merged[f"_{key}"] | there if f"_{key}" in merged else there
    return merged


def _choose(value: Any, other: Any, there: npt.NDArray[np.bool_]) -> Any:
    if isinstance(value, dict) and isinstance(other, dict):
        return replace_infos(value, other, there.nonzero()[0], len(there))
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray) and value.shape[1:] == other.shape[1:]:
        for dtype in (value.dtype, *wider(value.dtype, other.dtype)):
            kept, new = cast_exactly(value, dtype), cast_exactly(other, dtype)
            if kept is not None and new is not None:
                kept = kept.copy()
                kept[there] = new[there]
                return kept
    mixed = np.empty(len(there), object)
    for row, elsewhere in enumerate(there.tolist()):
        mixed[row] = (other if elsewhere else value)[row]
    return mixed


def _is_mask(key: str, infos: dict[str, Any]) -> bool:
    return key[:1] == "_" and key[1:] in infos


def _mask(infos: dict[str, Any], key: str, count: int) -> npt.NDArray[np.bool_]:
    found = infos.get(f"_{key}")
    return np.ones(count, np.bool_) if found is None else np.array(found, np.bool_)


def infos_to_rows(infos: Infos, rows: int) -> list[dict[str, Any]]:
    """Return a dict a row, each of its own memory; numbers are Python's.

    Examples
    --------
    >>> infos_to_rows({"lives": np.array([3, 0]), "_lives": np.array([True, False])}, 2)
    [{'lives': 3}, {}]
    """
    if isinstance(infos, list):
        return [dict(info) for info in infos] if infos else [{} for _ in range(rows)]
    made: list[dict[str, Any]] = [{} for _ in range(rows)]
    for key, value in infos.items():
        if _is_mask(key, infos):
            continue
        items = infos_to_rows(value, rows) if isinstance(value, dict) else _items(value)
        mask = infos.get(f"_{key}")
        for row in range(rows) if mask is None else np.flatnonzero(mask).tolist():
            made[row][key] = items[row]
    return made


def empty_infos(rows: int) -> npt.NDArray[Any]:
    """Return an empty dict a row, shape (rows,)."""
    # The fastest of the ways to make many.
    return np.fromiter(map(dict.copy, repeat({}, rows)), object, rows)


def _items(values: Any) -> list[Any]:
    if isinstance(values, np.ndarray) and values.ndim > 1:
        return [row.copy() for row in values]
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def batch_of(infos: Infos) -> Batch:
    """Return a batch of arrays; rows that say nothing of a key have zeros there, or None."""
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
    """Return a batch of the infos of `count` environments in several steps, one step after the other.

    Parameters
    ----------
    infos
        By step; those in which nothing was said may be missing.

    Examples
    --------
    >>> batch_of_steps({1: {"lives": np.array([3, 2])}}, steps=3, count=2).lives
    array([0, 0, 3, 2, 0, 0])
    """
    said = {step: one for step, one in infos.items() if isinstance(one, dict)}
    joined = _join_steps(said, steps, count) if len(said) == len(infos) else None
    if joined is not None:
        return joined
    return batch_of([row for step in range(steps) for row in infos_to_rows(infos.get(step, {}), count)])


def _join_steps(said: Mapping[int, dict[str, Any]], steps: int, count: int) -> Batch | None:
    """Join the infos of each key; None if they are of different kinds or shapes."""
    data: dict[str, Any] = {}
    for key in dict.fromkeys([key for one in said.values() for key in one if not _is_mask(key, one)]):
        values = {step: one[key] for step, one in said.items() if key in one}
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
        whole = np.full((steps, *shape), None if dtype.hasobject else 0, dtype)
        whole[list(arrays)] = list(arrays.values())
        data[key] = whole.reshape(steps * count, *shape[1:])
    return node(Batch, data)
