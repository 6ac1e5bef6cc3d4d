"""Reading and writing of D4RL's HDF5 files, in which `terminals` and `timeouts` mark episode ends."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np

from samplebatch import names
from samplebatch.batch.action_unit import ENVIRONMENT
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.casting import as_flags
from samplebatch.convert import experience
from samplebatch.errors import ColumnNotFoundError, ColumnTypeError, near_names
from samplebatch.storage.foreign.hdf5 import Hdf5Reader, bound_of
from samplebatch.storage.hdf5 import hdf5_file, hdf5_writer

_NAMES = names.PEERS["d4rl"]
_TO_FLAT = {theirs: name for name, theirs in _NAMES.items()}
_METADATA = "metadata"
_FLAGS = (names.TERMINATEDS, names.TRUNCATEDS)


def read_d4rl(path: str | os.PathLike[str], *, max_nbytes: int | None = None) -> SampleBatch:
    """Read the steps of a file in D4RL's layout.

    `terminals` become `terminateds`, and `timeouts` become `truncateds`. Terminals and timeouts delimit episodes;
    `eps_id` numbers the episodes, and `t` numbers the steps of each episode. If the file has no `next_observations`,
    the result has no `new_obs`, because the file lacks the observation after a timeout. Values under `infos/` become
    nested `infos`; values under `metadata/` are ignored. Other datasets keep their names.

    Parameters
    ----------
    path
        The file.
    max_nbytes
        Maximum number of bytes to allocate; None for the larger of 256 MiB and 1024 times the file's size.

    Raises
    ------
    FormatError
        If the file is not an HDF5 file, is damaged, or contains links to other files.
    ColumnNotFoundError
        If the file has no observations, actions, rewards or terminals.
    ColumnLengthError, ColumnMismatchError, ColumnTypeError
        If datasets have different lengths, flags are not 0 or 1, or values are not numeric.
    CapacityError
        If more memory than `max_nbytes` would be allocated.
    MissingExtraError, OSError
        If h5py is not installed, or the file cannot be read.
    """
    with hdf5_file(path) as file:
        reader = Hdf5Reader(bound_of(file, max_nbytes))
        children = reader.children(file)
        for name in (names.OBS, names.ACTIONS, names.REWARDS, names.TERMINATEDS):
            if _NAMES[name] not in children:
                raise ColumnNotFoundError(
                    f"a D4RL file must contain dataset {_NAMES[name]!r}; {near_names(_NAMES[name], children)}"
                )
        columns = {
            _TO_FLAT.get(name, name): _read(reader, child) for name, child in children.items() if name != _METADATA
        }
    for name in (names.REWARDS, *_FLAGS):
        values = columns.get(name)
        if values is not None and values.ndim == 2 and values.shape[1] == 1:
            columns[name] = values.reshape(-1)
    for name in _FLAGS:
        if name in columns:
            columns[name] = as_flags(columns[name], name)
    batch = SampleBatch(columns, _action_unit=ENVIRONMENT)
    batch.update(experience.number_episodes(np.logical_or(*experience.flags_of(batch))))
    return batch


def _read(reader: Hdf5Reader, child: Any) -> Any:
    if hasattr(child, "shape"):
        return reader.raw(child)
    return {name: _read(reader, inner) for name, inner in reader.children(child).items()}


def write_d4rl(source: experience.Source, path: str | os.PathLike[str]) -> None:
    """Write steps as a file in D4RL's layout, atomically.

    The last step of an unfinished episode is written as a timeout. Columns unknown to D4RL keep their names; `eps_id`
    and `t` are omitted, because the flags delimit the episodes.

    Parameters
    ----------
    source
        A batch, a buffer, or an iterable of fragments. Observations and actions must each be a single array.
    path
        Path of the file; the name should end in `.hdf5`.

    Raises
    ------
    ColumnNotFoundError
        If observations, actions or rewards are missing, or no column delimits episodes.
    ColumnTypeError
        If a column is nested, is not numeric, or has rows of varying shape.
    SequenceError, EmptyBufferError
        If steps of an episode are missing, or there are no steps.
    FormatError, MissingExtraError
        If the file name has the suffix of a format other than HDF5, or h5py is not installed.
    OSError
        If the file cannot be written.
    """
    steps = experience.as_steps(source)
    batch = steps.batch
    experience.require_columns(batch, names.OBS, names.ACTIONS, names.REWARDS)
    terminated, truncated = experience.flags_of(batch)
    truncated = truncated.copy()
    ends = steps.bounds[1:] - 1
    truncated[ends] |= ~terminated[ends]
    columns: dict[str, Any] = {
        name: experience.arrays_of(batch, name)
        for name in batch
        if name not in (names.TERMINATEDS, names.TRUNCATEDS, names.DONES, names.EPS_ID, names.T)
    }
    columns |= {names.TERMINATEDS: terminated, names.TRUNCATEDS: truncated}
    for name, values in columns.items():
        if name != names.INFOS and not isinstance(values, np.ndarray):
            raise ColumnTypeError(f"column {name!r} must be a single array in a D4RL file, got nested columns")
        experience.map_leaves(_check_numbers, values, name)
    with hdf5_writer(path) as file:
        for name, values in columns.items():
            experience.map_leaves(partial(_write, file), values, _NAMES.get(name, name))


def _write(file: Any, path: str, values: Any) -> None:
    file.create_dataset(path.replace(".", "/"), data=values)


def _check_numbers(path: str, values: Any) -> None:
    if values.dtype.kind not in "biufc":
        raise ColumnTypeError(f"column {path!r} must be numeric in a D4RL file, got {values.dtype}; drop it")
