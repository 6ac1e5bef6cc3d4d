"""Serialization of columns as a header and buffers, for pickle protocol 5, files and channels.

Headers are plain values (strings, numbers, tuples, dicts); buffers contain exactly the rows in view. Neither dumping
nor loading copies rows, and pickles are loaded only if the caller permits unpickling.
"""

from __future__ import annotations

from collections.abc import Sequence
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

from samplebatch.batch.flags import DEFAULT, Flags
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.interface import Column, Header
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.text import TextColumn
from samplebatch.column.torch_tensor import RaggedTorchColumn, TorchColumn
from samplebatch.errors import FormatError

if TYPE_CHECKING:
    from samplebatch.batch.sample_batch import SampleBatch
    from samplebatch.batch.tree import Structure

_KINDS: dict[str, type[Column]] = {
    cls.kind: cls
    for cls in (TensorColumn, TorchColumn, RaggedColumn, RaggedTorchColumn, TextColumn, ObjectColumn, CompressedColumn)
}


def dump_columns(columns: dict[str, Column]) -> tuple[tuple[tuple[str, int, Header], ...], list[Any]]:
    """Serialize columns to a header and buffers.

    Returns
    -------
    header
        Name, number of buffers and header of each column.
    buffers
        Buffers of all columns, in order.
    """
    headers = []
    buffers: list[Any] = []
    for name, column in columns.items():
        header, buffers_of_column = column.dump()
        headers.append((name, len(buffers_of_column), header))
        buffers += buffers_of_column
    return tuple(headers), buffers


def for_pickle(buffers: list[Any], protocol: int) -> list[Any]:
    """Wrap buffers for out-of-band pickling with protocol 5; copy the buffers for protocols below 5."""
    if protocol >= 5:
        return [PickleBuffer(buffer) for buffer in buffers]
    return [bytearray(PickleBuffer(buffer).raw()) for buffer in buffers]


def load_columns(header: Any, buffers: Sequence[Any], *, allow_pickle: bool = False) -> dict[str, Column]:
    """Restore columns as views of the buffers that `dump_columns` returned.

    Raises FormatError if header and buffers do not match, UntrustedPickleError if a column is pickled and
    `allow_pickle` is false.
    """
    columns: dict[str, Column] = {}
    at = 0
    for name, count, column_header in header:
        kind = _KINDS.get(column_header[0])
        if kind is None:
            raise FormatError(
                f"column {name!r} must be of a known kind, got {column_header[0]!r}; a newer version may know it"
            )
        columns[name] = kind.load(column_header, buffers[at : at + count], allow_pickle=allow_pickle)
        at += count
    if at != len(buffers):
        raise FormatError(f"the header requires {at} buffers, got {len(buffers)}")
    return columns


def unpickle(
    cls: type[SampleBatch[Any]],
    header: Any,
    nested: dict[str, Structure],
    flags: tuple[Any, ...] | None,
    *buffers: Any,
) -> SampleBatch[Any]:
    """Restore a pickled batch; nested pickles are loaded too, because unpickling requires trusted bytes."""
    columns = load_columns(header, buffers, allow_pickle=True)
    return cls._of(columns, nested, DEFAULT if flags is None else Flags(*flags))
