"""TensorDict: steps under TorchRL's names, over the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch import names
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.objects import ObjectColumn
from samplebatch.convert.experience import Source, as_flat
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, require

if TYPE_CHECKING:
    from tensordict import TensorDict

_NAMES = names.PEERS["torchrl"]
_TO_FLAT = {theirs: name for name, theirs in _NAMES.items()}
_FLAGS = frozenset(("done", "terminated", "truncated"))
_SINGLE = frozenset((names.REWARDS, names.TERMINATEDS, names.TRUNCATEDS, names.DONES))
"""Columns of one number per step, to which TorchRL adds an axis of length 1."""


def to_tensordict(source: Source) -> TensorDict:
    """Return steps as a TensorDict under TorchRL's names, over the same memory if torch supports the layout.

    `obs` becomes `observation` and `new_obs` becomes `("next", "observation")`. Each part of nested observations is an
    entry of the root and of `"next"`, as in TorchRL's environments. Rewards and flags have shape (n, 1), and `done` is
    added. `eps_id` becomes `("collector", "traj_ids")`. Other columns keep their names; objects become non-tensor
    data.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments.

    Raises
    ------
    ColumnMismatchError
        If a part of the observations has the same name as another entry; names it.
    ColumnTypeError, SequenceError, EmptyBufferError
        If the source does not consist of steps of one policy.
    MissingExtraError
        If tensordict is not installed.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> steps = SampleBatch(obs=[[0.0], [1.0]], actions=[0, 1], rewards=[0.5, 1.0], terminateds=[False, True])
    >>> td = to_tensordict(steps)
    >>> td["next", "reward"].shape, td["next", "done"].flatten().tolist()
    (torch.Size([2, 1]), [False, True])
    """
    tensordict = require("tensordict", "tensordict")
    batch = as_flat(source)
    entries: dict[str, Any] = {}
    for name in batch:
        path = tuple(_NAMES[name].split(".")) if name in _NAMES else (name,)
        value = _entry(batch, name, batch[name])
        if name in (names.OBS, names.NEXT_OBS) and isinstance(value, dict):
            for part, inner in value.items():
                _put(entries, (*path[:-1], part), inner, f"{name}.{part}")
        else:
            _put(entries, path, value, name)
    done = None if names.DONES in batch else batch.get(names.DONES)
    if done is not None:
        flags = SampleBatch({names.DONES: done})
        _put(entries, ("next", "done"), _entry(flags, names.DONES, done), names.DONES)
    converted: TensorDict = tensordict.TensorDict(entries, batch_size=[batch.count])
    return converted


def _entry(batch: SampleBatch, path: str, value: Any) -> Any:
    """Convert a column to a tensor, a tree of tensors, or non-tensor data if torch lacks the dtype."""
    if isinstance(value, tuple):
        value = {str(index): item for index, item in enumerate(value)}
    if isinstance(value, Mapping):
        return {key: _entry(batch, f"{path}.{key}", item) for key, item in value.items()}
    column = batch.column(path)
    if isinstance(column, ObjectColumn) or getattr(column.dtype, "kind", "f") not in "biufc":
        import tensordict

        return tensordict.NonTensorStack(*column.to_numpy().tolist())
    tensor = column.to_torch()
    return tensor.unsqueeze(-1) if path in _SINGLE and tensor.ndim == 1 else tensor


def _put(entries: dict[str, Any], path: tuple[str, ...], value: Any, column: str) -> None:
    *parents, key = path
    for parent in parents:
        entries = entries.setdefault(parent, {})
    if key in entries:
        raise ColumnMismatchError(f"column {column!r} must have a unique name in a TensorDict, got {key!r} twice")
    entries[key] = value


def from_tensordict(td: TensorDict) -> SampleBatch:
    """Return the steps of a TensorDict under RLlib's names; columns share memory with its tensors.

    Entries in both the root and `"next"` are observations: `observation` alone becomes `obs` and `new_obs`, several
    become nested columns. Rewards and flags are read from `"next"` and reshaped to (n,). The last batch dimension is
    time; rows of the other batch dimensions are numbered by `env_id`.

    Parameters
    ----------
    td
        A TensorDict with at least one batch dimension, such as a TorchRL rollout or a sample of a TorchRL buffer.

    Raises
    ------
    ColumnTypeError
        If `td` has no batch dimension.
    MissingExtraError
        If tensordict is not installed.

    Examples
    --------
    >>> import torch
    >>> from tensordict import TensorDict
    >>> steps = {"observation": torch.zeros(2, 3), "next": {"reward": torch.ones(2, 1)}}
    >>> from_tensordict(TensorDict(steps, batch_size=[2]))["rewards"]
    tensor([1., 1.])
    """
    require("tensordict", "tensordict")
    if not td.batch_dims:
        raise ColumnTypeError("td must have a batch dimension, got none; use unsqueeze(0)")
    rows = td if td.batch_dims == 1 else td.reshape(-1)
    root: dict[Any, Any] = {key: _value(rows.get(key)) for key in rows.keys()}  # noqa: SIM118 - iteration goes over rows
    following = root.pop("next", {})
    columns = _observations(root, following)
    for key, value in following.items():
        name = _TO_FLAT.get(f"next.{key}")
        if name is None:
            columns.setdefault("next", {})[key] = value
        else:
            columns[name] = _single(value)
    for key, value in root.items():
        if key == "collector" and isinstance(value, dict) and "traj_ids" in value:
            columns[names.EPS_ID] = value.pop("traj_ids")
            if not value:
                continue
        flat = _TO_FLAT.get(f"next.{key}")
        if flat is None:
            columns[_TO_FLAT.get(key, key)] = value
        elif not following:
            columns[flat] = _single(value)
    if names.TERMINATEDS in columns and names.TRUNCATEDS in columns:
        columns.pop(names.DONES, None)
    if td.batch_dims > 1:
        columns[names.ENV_ID] = np.repeat(np.arange(td.numel() // td.batch_size[-1]), td.batch_size[-1])
    return SampleBatch(columns)


def _observations(root: dict[str, Any], following: dict[str, Any]) -> dict[str, Any]:
    keys = [key for key in root if key in following and key not in _FLAGS and key != "reward"]
    if keys in ([], ["observation"]):
        columns = {names.OBS: root.pop("observation", None), names.NEXT_OBS: following.pop("observation", None)}
        return {name: value for name, value in columns.items() if value is not None}
    return {
        names.OBS: {key: root.pop(key) for key in keys},
        names.NEXT_OBS: {key: following.pop(key) for key in keys},
    }


def _value(entry: Any) -> Any:
    from tensordict import is_non_tensor, is_tensor_collection

    if is_non_tensor(entry):
        return entry.tolist()
    if is_tensor_collection(entry):
        return {key: _value(entry.get(key)) for key in entry.keys()}  # noqa: SIM118 - iteration goes over rows
    return entry


def _single(value: Any) -> Any:
    return value.squeeze(-1) if value.ndim == 2 and value.shape[-1] == 1 else value
