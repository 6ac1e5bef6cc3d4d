"""Checkpoints of trainers: atomic files, loaded without unpickling objects."""

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
"""Key of the dicts that encode values of other types."""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor)


def save_checkpoint(trainer: Any, folder: str | os.PathLike[str]) -> Path:
    """Write the state of a trainer to a folder, and return the path of the file.

    Atomically replaces the previous checkpoint: after a crash, the folder contains either the old or the new one.
    The trainer must be between two training steps. The folder is created if it does not exist.

    Raises
    ------
    ColumnTypeError
        If the state contains an object that cannot be pickled.
    OSError
        If the file cannot be written, for example because the disk is full; the previous checkpoint is preserved.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / FILE
    write_torch(_encode(trainer.state_dict()), path)
    return path


class _ErrorRecordingFile:
    """File that stores its first write error, because `torch.save` raises a different one."""

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
    """Write a file atomically with `torch.save`.

    Raises OSError if the file cannot be written; `filename` is the path.
    """
    with replacing(path) as file:
        recorder = _ErrorRecordingFile(file)
        try:
            torch.save(value, recorder)  # type: ignore[arg-type]
        except Exception:
            if recorder.error is not None:
                raise recorder.error from None
            raise


def load_checkpoint(trainer: Any, folder: str | os.PathLike[str], *, allow_pickle: bool = False) -> str | None:
    """Restore a trainer from a checkpoint of `save_checkpoint`.

    Parameters
    ----------
    trainer, folder
        A trainer with the same algorithm and parameters, and the folder of the checkpoint.
    allow_pickle
        Whether objects in the file, such as environments, may be unpickled, which runs code chosen by its writer.

    Returns
    -------
    str or None
        Why environments start new episodes, if they could not be saved; None if the run continues exactly.

    Raises
    ------
    FileNotFoundError
        If the folder contains no checkpoint.
    FormatError
        If the file is not a checkpoint.
    UntrustedPickleError
        If the file contains pickled objects, or torch is older than 2.6, and `allow_pickle` is false.
    """
    state = read_checkpoint(folder, allow_pickle=allow_pickle)
    trainer.load_state_dict(state, allow_pickle=allow_pickle)
    why: str | None = state["why_reset"]
    return why


def read_checkpoint(folder: str | os.PathLike[str], *, allow_pickle: bool = False) -> dict[str, Any]:
    """Read the state in a checkpoint; raises as `load_checkpoint` does."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise FileNotFoundError(2, "No checkpoint", str(path))
    require_safe_torch(str(path), allow_pickle=allow_pickle)
    try:
        # Load to the host: the original device may not exist.
        state = _decode(torch.load(path, map_location="cpu", weights_only=True), allow_pickle=allow_pickle)
    except (SampleBatchError, MemoryError):
        raise
    except Exception as error:
        raise FormatError(
            f"{str(path)!r} must be a checkpoint of a trainer, got an unreadable file: {error}"
        ) from error
    if not isinstance(state, dict) or not {"trainer", "parts", "why_reset"} <= set(state):
        raise FormatError(f"{str(path)!r} must be a checkpoint of a trainer, got other contents")
    return state


def _encode(value: Any) -> Any:
    """Encode a state as dicts, lists, tuples and tensors, which torch loads without unpickling objects."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, Mapping) and all(map(_is_plain_key, value)):
        return {_KIND: "mapping", "items": [[key, _encode(item)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return type(value)([_encode(item) for item in value])
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcUSmM":
        kind = "array" if isinstance(value, np.ndarray) else "number"
        data = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        return {_KIND: kind, "dtype": value.dtype.str, "shape": list(value.shape), "bytes": data}
    if isinstance(value, np.random.SeedSequence):
        arguments = {"entropy": value.entropy, "spawn_key": value.spawn_key, "pool_size": value.pool_size}
        return {_KIND: "seeds", "arguments": _encode(arguments | {"n_children_spawned": value.n_children_spawned})}
    try:
        return {_KIND: "pickle", "bytes": pickle.dumps(value)}
    except Exception as error:
        raise ColumnTypeError(f"values in a checkpoint must be picklable, got a {type(value).__name__}") from error


def _is_plain_key(key: Any) -> bool:
    return type(key) in (str, int) or (type(key) is tuple and all(map(_is_plain_key, key)))


def _decode(value: Any, *, allow_pickle: bool = False) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_decode(item, allow_pickle=allow_pickle) for item in value])
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: _decode(item, allow_pickle=allow_pickle) for key, item in value.items()}
    if kind == "pickle":
        return unpickle([value["bytes"]], "the checkpoint", allow_pickle=allow_pickle)[0]
    if kind == "mapping":
        return {key: _decode(item, allow_pickle=allow_pickle) for key, item in value["items"]}
    if kind == "seeds":
        return np.random.SeedSequence(**_decode(value["arguments"], allow_pickle=allow_pickle))
    # Copied, because loading a state modifies arrays in place and torch owns the memory of its tensors.
    array = value["bytes"].numpy().view(np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array if kind == "array" else array[()]
