"""Checkpoints: the state of a trainer in a file that is there whole or not at all, read without unpickling objects."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from samplebatch.column.unpickling import unpickle
from samplebatch.errors import ColumnTypeError, FormatError, SampleBatchError
from samplebatch.policy.source import require_safe_torch
from samplebatch.storage.files import replacing

FILE = "checkpoint.pt"
_KIND = "samplebatch.kind"
"""The key of dicts that stand for a value that is no plain one."""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor)


def save_checkpoint(trainer: Any, folder: str | os.PathLike[str]) -> Path:
    """Write the state of a trainer into a folder, in place of the one before; a crash leaves either whole.

    Parameters
    ----------
    trainer
        A trainer between two training steps.
    folder
        The folder; it is made where it is missing.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    ColumnTypeError
        If the state holds an object that cannot be pickled.
    OSError
        If the file cannot be written, as the disk is full for instance; the checkpoint before stays.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / FILE
    write_torch(_encode(trainer.state_dict()), path)
    return path


class _Sink:
    """A file for `torch.save`, which reports errors of writes as errors of its own: it keeps the first of them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def write_torch(value: Any, path: str | os.PathLike[str]) -> None:
    """Write a file by `torch.save`, whole or not at all.

    Raises
    ------
    OSError
        If it cannot be written; `filename` is the path.
    """
    with replacing(path) as file:
        sink = _Sink(file)
        try:
            torch.save(value, sink)  # type: ignore[arg-type]
        except Exception:
            if sink.error is not None:
                raise sink.error from None
            raise


def load_checkpoint(trainer: Any, folder: str | os.PathLike[str], *, allow_pickle: bool = False) -> str | None:
    """Let a trainer go on from the state that `save_checkpoint` wrote.

    Parameters
    ----------
    trainer
        A trainer that was made with the same algorithm and parameters.
    folder
        The folder.
    allow_pickle
        Whether objects in the file may be unpickled, which runs code that its writer chose. Environments are such.

    Returns
    -------
    str or None
        Why environments have to begin new episodes, if they could not be saved; None if the run goes on exactly.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint in the folder.
    FormatError
        If the file is none of a checkpoint.
    UntrustedPickleError
        If there are pickled objects in it, or torch is older than 2.6, and `allow_pickle` is false.
    """
    state = read_checkpoint(folder, allow_pickle=allow_pickle)
    trainer.load_state_dict(state, allow_pickle=allow_pickle)
    why: str | None = state["why_reset"]
    return why


def read_checkpoint(folder: str | os.PathLike[str], *, allow_pickle: bool = False) -> dict[str, Any]:
    """Read the state that `save_checkpoint` wrote; raises as `load_checkpoint` does."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise FileNotFoundError(2, "No checkpoint", str(path))
    require_safe_torch(str(path), allow_pickle=allow_pickle)
    try:
        # Tensors come to the host first: the device that they were on may not be there.
        found = _decode(torch.load(path, map_location="cpu", weights_only=True), allow_pickle=allow_pickle)
    except (SampleBatchError, MemoryError):
        raise
    except Exception as error:
        raise FormatError(f"{str(path)!r} must be a checkpoint of a trainer, and cannot be read: {error}") from error
    if not isinstance(found, dict) or not {"trainer", "parts", "why_reset"} <= set(found):
        raise FormatError(f"{str(path)!r} must be a checkpoint of a trainer, and holds something else")
    return found


def _encode(value: Any) -> Any:
    """Turn a state into dicts, lists, tuples and tensors, which torch reads without unpickling objects."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {key: _encode(own) for key, own in value.items()}
    if isinstance(value, Mapping) and all(map(_is_plain_key, value)):
        return {_KIND: "mapping", "items": [[key, _encode(own)] for key, own in value.items()]}
    if type(value) in (list, tuple):
        return type(value)([_encode(own) for own in value])
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcUSmM":
        kind = "array" if isinstance(value, np.ndarray) else "number"
        data = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        return {_KIND: kind, "dtype": value.dtype.str, "shape": list(value.shape), "bytes": data}
    if isinstance(value, np.random.SeedSequence):
        own = {"entropy": value.entropy, "spawn_key": value.spawn_key, "pool_size": value.pool_size}
        return {_KIND: "seeds", "arguments": _encode(own | {"n_children_spawned": value.n_children_spawned})}
    try:
        return {_KIND: "pickle", "bytes": pickle.dumps(value)}
    except Exception as error:
        raise ColumnTypeError(f"a checkpoint cannot hold a {type(value).__name__}, as it cannot be pickled") from error


def _is_plain_key(key: Any) -> bool:
    return type(key) in (str, int) or (type(key) is tuple and all(map(_is_plain_key, key)))


def _decode(value: Any, *, allow_pickle: bool = False) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_decode(own, allow_pickle=allow_pickle) for own in value])
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: _decode(own, allow_pickle=allow_pickle) for key, own in value.items()}
    if kind == "pickle":
        return unpickle([value["bytes"]], "the checkpoint", allow_pickle=allow_pickle)[0]
    if kind == "mapping":
        return {key: _decode(own, allow_pickle=allow_pickle) for key, own in value["items"]}
    if kind == "seeds":
        return np.random.SeedSequence(**_decode(value["arguments"], allow_pickle=allow_pickle))
    # A copy: states are loaded in place, and torch keeps its tensors' memory.
    array = value["bytes"].numpy().view(np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array if kind == "array" else array[()]
