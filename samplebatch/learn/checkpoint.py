"""Checkpoints of trainers: atomic files, loaded without unpickling objects.

A checkpoint consists of one file, and segment files with the rows of buffers in the same folder (see
`samplebatch.storage.buffers.segments`).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from samplebatch.arguments import describe_value
from samplebatch.column.convert import as_column
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.unpickling import unpickle
from samplebatch.errors import ColumnTypeError, FormatError, SampleBatchError
from samplebatch.policy.source import require_safe_torch
from samplebatch.storage.buffers.segments import (
    Manifest,
    SegmentWriter,
    check_manifest,
    decode_columns,
    encode_columns,
    locked_checkpoint,
    read_rows,
)
from samplebatch.storage.files import replacing

FILE = "checkpoint.pt"
_KIND = "samplebatch.kind"
"""Key of the dicts that encode values of other types."""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.Tensor)
_MANIFEST_ARRAYS = ("groups", "digests")
_SEGMENTS_FROM_NBYTES = 1 << 20
"""Minimum size of rows that are stored in segments."""


def save_checkpoint(trainer: Any, folder: str | os.PathLike[str]) -> Path:
    """Write the state of a trainer to a folder, and return the path of the checkpoint file.

    The previous checkpoint is replaced atomically: after a crash, the folder contains either the old or the new
    checkpoint. Call this function between two training steps. The folder is created if it does not exist.

    If the rows of a buffer occupy at least 1 MiB, they are written to files `rows-<n>.bin` in the folder. The next call
    writes only the groups of rows (16 to 64 KiB each) that have changed; for unchanged groups, the new checkpoint
    references earlier files. Together, the files `rows-<n>.bin` are at most about twice as large as the rows.

    Raises
    ------
    ColumnTypeError
        If the state contains an object that cannot be pickled.
    OSError
        If the file cannot be written, for example because the disk is full; the previous checkpoint is preserved.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / FILE
    with locked_checkpoint(path.parent, exclusive=True):
        segments = SegmentWriter(path.parent, _previous_manifests(path))
        state = _encode(trainer.state_dict(), segments)
        segments.write()
        for manifest in _manifests(state):
            # The pickles of torch.save have no bytes.
            manifest |= {name: torch.from_numpy(manifest[name]) for name in _MANIFEST_ARRAYS}
        try:
            write_torch(state, path)
        except BaseException:
            segments.discard()
            raise
        segments.remove_unreferenced()
        for unfinished in path.parent.glob(f".{FILE}.*.tmp"):
            unfinished.unlink(missing_ok=True)
    return path


def _previous_manifests(path: Path) -> list[Manifest]:
    """Read the manifests of the previous checkpoint; empty if that checkpoint is missing, damaged or unsafe to read."""
    try:
        require_safe_torch(str(path), allow_pickle=False)
        encoded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        manifests = [_with_arrays(manifest) for manifest in _manifests(encoded)]
        for manifest in manifests:
            check_manifest(manifest)
        return manifests
    except Exception:
        # All rows are written then. Torch raises various exception types for damaged files.
        return []


def _manifests(state: Any) -> Iterator[Manifest]:
    """Yield the manifests in an encoded state, in the order in which they were encoded."""
    if isinstance(state, dict) and state.get(_KIND) == "rows":
        yield state["manifest"]
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _manifests(value)


def _with_arrays(manifest: Any) -> Manifest:
    """Convert the tensors of an encoded manifest to arrays."""
    if not isinstance(manifest, dict):
        raise FormatError("rows of a checkpoint must have a manifest, got none; it is damaged")
    tensors = {name: value.numpy() for name, value in manifest.items() if isinstance(value, torch.Tensor)}
    return manifest | tensors


class _ErrorRecordingFile:
    """File that stores its first write error, because `torch.save` replaces a write error with its own error."""

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

    Raises OSError if the file cannot be written; the error's `filename` is the path.
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
    """Restore a trainer from a checkpoint that `save_checkpoint` wrote.

    Parameters
    ----------
    trainer, folder
        A trainer with the same algorithm and parameters as the saved trainer, and the folder of the checkpoint.
    allow_pickle
        Whether objects in the file, such as environments, may be unpickled; unpickling runs code chosen by the writer
        of the file.

    Returns
    -------
    str or None
        Reason why environments start new episodes, if the state of the environments could not be saved; None if the run
        resumes exactly.

    Raises
    ------
    FileNotFoundError
        If the folder contains no checkpoint.
    FormatError
        If the file is not a checkpoint.
    UntrustedPickleError
        If `allow_pickle` is false, and the file contains pickled objects or torch is older than 2.6.
    """
    state = read_checkpoint(folder, allow_pickle=allow_pickle)
    trainer.load_state_dict(state, allow_pickle=allow_pickle)
    why: str | None = state["why_reset"]
    return why


def read_checkpoint(folder: str | os.PathLike[str], *, allow_pickle: bool = False) -> dict[str, Any]:
    """Read the state in a checkpoint.

    Raises the same errors as `load_checkpoint`.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise FileNotFoundError(2, "No checkpoint", str(path))
    require_safe_torch(str(path), allow_pickle=allow_pickle)
    try:
        with locked_checkpoint(path.parent, exclusive=False):
            # Load to the host: the original device may not exist.
            encoded = torch.load(path, map_location="cpu", weights_only=True)
            state = _decode(encoded, path.parent, allow_pickle=allow_pickle)
    except (SampleBatchError, MemoryError):
        raise
    except Exception as error:
        raise FormatError(
            f"{str(path)!r} must be a checkpoint of a trainer, got an unreadable file: {error}"
        ) from error
    if not isinstance(state, dict):
        raise FormatError(f"{str(path)!r} must be a checkpoint of a trainer, got {describe_value(state)}")
    if missing := sorted({"trainer", "parts", "why_reset"}.difference(state)):
        raise FormatError(f"{str(path)!r} must be a checkpoint of a trainer, got a dict without {missing[0]!r}")
    return state


def _encode(value: Any, segments: SegmentWriter) -> Any:
    """Encode a state as dicts, lists, tuples and tensors, which torch loads without unpickling objects."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping) and {"rings", "columns", "finals"} <= value.keys():
        rows = value["columns"]
        columns = [_as_column(column) for column in rows["columns"]]
        if sum(column.nbytes for column in columns) >= _SEGMENTS_FROM_NBYTES:
            manifest = segments.add(columns, np.asarray(value["rings"]["sizes"]).tolist())
            value = {**value, "columns": {**rows, "columns": _Stored(manifest)}}
    if isinstance(value, _Stored):
        return {_KIND: "rows", "manifest": value.manifest}
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {key: _encode(item, segments) for key, item in value.items()}
    if isinstance(value, Mapping) and all(map(_is_plain_key, value)):
        return {_KIND: "mapping", "items": [[key, _encode(item, segments)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return type(value)([_encode(item, segments) for item in value])
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcUSmM":
        if (
            isinstance(value, np.ndarray)
            and value.ndim
            and value.nbytes >= _SEGMENTS_FROM_NBYTES
            and value.dtype.kind in "biuf"
        ):
            manifest = segments.add([TensorColumn(np.ascontiguousarray(value))], [len(value)])
            return {_KIND: "rows", "manifest": manifest, "is_array": True}
        kind = "array" if isinstance(value, np.ndarray) else "number"
        data = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        return {_KIND: kind, "dtype": value.dtype.str, "shape": list(value.shape), "bytes": data}
    if isinstance(value, np.random.SeedSequence):
        arguments = {"entropy": value.entropy, "spawn_key": value.spawn_key, "pool_size": value.pool_size}
        return {
            _KIND: "seeds",
            "arguments": _encode(arguments | {"n_children_spawned": value.n_children_spawned}, segments),
        }
    if isinstance(value, Column):
        data = torch.frombuffer(bytearray(encode_columns([value])), dtype=torch.uint8)
        return {_KIND: "column", "bytes": data}
    try:
        return {_KIND: "pickle", "bytes": pickle.dumps(value)}
    except Exception as error:
        raise ColumnTypeError(f"values in a checkpoint must be picklable, got a {type(value).__name__}") from error


@dataclass(frozen=True)
class _Stored:
    """Columns in segments."""

    manifest: Manifest


def _as_column(values: Any) -> Column:
    if isinstance(values, np.ndarray) and values.dtype.kind == "O":
        return ObjectColumn(values)
    return as_column(values, "column")


def _is_plain_key(key: Any) -> bool:
    return type(key) in (str, int) or (type(key) is tuple and all(map(_is_plain_key, key)))


def _decode(value: Any, folder: Path, *, allow_pickle: bool = False) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_decode(item, folder, allow_pickle=allow_pickle) for item in value])
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: _decode(item, folder, allow_pickle=allow_pickle) for key, item in value.items()}
    if kind == "pickle":
        return unpickle([value["bytes"]], "the checkpoint", allow_pickle=allow_pickle)[0]
    if kind == "rows":
        columns = read_rows(folder, _with_arrays(value["manifest"]), allow_pickle=allow_pickle)
        return columns[0].values if value.get("is_array") else [column.values for column in columns]
    if kind == "column":
        return decode_columns(value["bytes"].numpy(), "a column of the checkpoint", allow_pickle=allow_pickle)[0]
    if kind == "mapping":
        return {key: _decode(item, folder, allow_pickle=allow_pickle) for key, item in value["items"]}
    if kind == "seeds":
        return np.random.SeedSequence(**_decode(value["arguments"], folder, allow_pickle=allow_pickle))
    # Copied, because loading a state modifies arrays in place and torch owns the memory of its tensors.
    array = value["bytes"].numpy().view(np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array if kind == "array" else array[()]
