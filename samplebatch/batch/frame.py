"""Frames: batches as a header and buffers, for pickle protocol 5, files and channels.

Headers are plain values (strings, numbers, tuples, dicts of them), buffers are the bytes of exactly the rows in view.
Nothing is copied in either direction, and nothing is unpickled unless the caller allows it.
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
    """Split columns into a header and their buffers.

    Returns
    -------
    header
        For each column its name, its number of buffers and its own header.
    buffers
        The buffers of all columns, in order.
    """
    headers = []
    buffers: list[Any] = []
    for name, column in columns.items():
        header, own = column.dump()
        headers.append((name, len(own), header))
        buffers += own
    return tuple(headers), buffers


def for_pickle(buffers: list[Any], protocol: int) -> list[Any]:
    """Wrap buffers so that pickle protocol 5 can carry them out of band; older protocols get their bytes."""
    if protocol >= 5:
        return [PickleBuffer(buffer) for buffer in buffers]
    return [bytearray(PickleBuffer(buffer).raw()) for buffer in buffers]


def load_columns(header: Any, buffers: Sequence[Any], *, allow_pickle: bool = False) -> dict[str, Column]:
    """Build columns over the buffers of `dump_columns`.

    Raises FormatError if header and buffers do not agree. Raises UntrustedPickleError if a column's rows are pickled
    and `allow_pickle` is false.
    """
    columns: dict[str, Column] = {}
    at = 0
    for name, count, own in header:
        kind = _KINDS.get(own[0])
        if kind is None:
            raise FormatError(f"column {name!r} is of kind {own[0]!r}, which this version does not know")
        columns[name] = kind.load(own, buffers[at : at + count], allow_pickle=allow_pickle)
        at += count
    if at != len(buffers):
        raise FormatError(f"a batch of {at} buffers must come with as many, got {len(buffers)}")
    return columns


def unpickle(
    cls: type[SampleBatch[Any]],
    header: Any,
    nested: dict[str, Structure],
    flags: tuple[Any, ...] | None,
    *buffers: Any,
) -> SampleBatch[Any]:
    """Restore a pickled batch; unpickling trusts its bytes."""
    columns = load_columns(header, buffers, allow_pickle=True)
    return cls._of(columns, nested, DEFAULT if flags is None else Flags(*flags))
