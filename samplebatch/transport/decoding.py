"""Putting batches together over the bytes of their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.flags import DEFAULT, Flags
from samplebatch.batch.frame import load_columns
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.interface import Column
from samplebatch.column.memory_bound import MemoryBound
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import CapacityError, SampleBatchError, UntrustedPickleError
from samplebatch.names import SEQ_LENS
from samplebatch.transport import tree_frame
from samplebatch.transport.frame import AnyBatch
from samplebatch.transport.note import ENV_STEPS, FLAGS, LOOSE, count_of, flags_of
from samplebatch.transport.schema import NESTED_BATCH, SAMPLE_BATCH, Loose, Part, Place, Plan, Schema

DAMAGE = (
    SampleBatchError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    StopIteration,
)
"""What Python, NumPy, torch and the library raise where a message says what cannot be."""

Root = npt.NDArray[np.uint8]
"""The bytes of a slot; whoever has an array over them holds the slot."""

_ndarray = np.ndarray
_new = object.__new__

Cut = Callable[[int], Root]
"""Cuts the next buffer of so many bytes."""


def decode(
    schema: Schema, plan: Plan, note: Mapping[str, Any], root: Root, cut: Cut, *, allow_pickle: bool = False
) -> AnyBatch:
    """Put a batch together over the bytes of its slot.

    Parameters
    ----------
    schema
        What its columns are.
    plan
        Where they lie.
    note
        What else the message says.
    root
        The slot, which has at least the plan's bytes.
    cut
        Cuts the buffers of loose columns, one after the other.
    allow_pickle
        Whether pickled columns may be unpickled.

    Raises
    ------
    UntrustedPickleError
        If a column is pickled and `allow_pickle` is false; names it.
    FormatError
        If they do not agree; or another of `DAMAGE`.
    """
    entries = note.get(LOOSE) or [()] * len(schema.parts)
    bound = MemoryBound("the message", root.nbytes)
    loose = [Loosened(own, cut, bound, allow_pickle=allow_pickle) for own in entries]
    if schema.kind == NESTED_BATCH:
        return tree_frame.build(schema.parts[0], plan.parts[0], root, loose[0])
    flags = [flags_of(own) for own in note[FLAGS]] if FLAGS in note else [DEFAULT] * len(schema.parts)
    batches = [
        _sample_batch(part, places, root, own, own_flags)
        for part, places, own, own_flags in zip(schema.parts, plan.parts, loose, flags, strict=True)
    ]
    if schema.kind == SAMPLE_BATCH:
        return batches[0]
    labels = [part.label for part in schema.parts]
    return MultiAgentBatch._of(dict(zip(labels, batches, strict=True)), count_of(note[ENV_STEPS]))


class Loosened:
    """The loose columns of one part, put together one after the other."""

    def __init__(self, entries: Iterable[Any], cut: Cut, bound: MemoryBound, *, allow_pickle: bool = False) -> None:
        self._entries = iter(entries)
        self._cut = cut
        self._bound = bound
        self._allow_pickle = allow_pickle

    def entry(self) -> Any:
        """Return what the note says of the next one; raises as `decode` does."""
        return next(self._entries)

    def column(self, name: str, entry: Any) -> Column:
        """Put a column together; raises as `decode` does."""
        header, sizes = entry
        buffers = [self._cut(count_of(nbytes)) for nbytes in sizes]
        if header[0] == ObjectColumn.kind:
            # Objects may keep what they are made from, and are not to hold the slot.
            buffers = [buffer.copy() for buffer in buffers]
            try:
                ObjectColumn.check_dumped(header, buffers, name, self._bound)
            except CapacityError as error:
                raise CapacityError(
                    f"column {name!r} must have objects for which its message has bytes; send fewer rows at a time"
                ) from error
        try:
            return load_columns([(name, len(buffers), header)], buffers, allow_pickle=self._allow_pickle)[name]
        except UntrustedPickleError as error:
            raise UntrustedPickleError(
                f"column {name!r} holds pickled objects, and unpickling runs code that its sender chose; "
                "make the channel with allow_pickle=True if you trust it"
            ) from error


def _sample_batch(part: Part, places: list[Place], root: Root, loose: Loosened, flags: Flags) -> SampleBatch:
    columns: dict[str, Column] = {}
    if part.has_loose:
        fixed = iter(places)
        for column in part.columns:
            if isinstance(column, Loose):
                columns[column.name] = loose.column(column.name, loose.entry())
            else:
                columns[column.name] = fixed_column(next(fixed), root)
    else:
        for place in places:
            (name, dtype, _, torch, _), shape, offset = place
            if torch is None:
                columns[name] = made = _new(TensorColumn)
                made.values = _ndarray(shape, dtype, root, offset)
            else:
                columns[name] = fixed_column(place, root)
    if SEQ_LENS in columns:
        # Before they are checked: the sender must not change where sequences begin.
        columns[SEQ_LENS] = columns[SEQ_LENS].copy()
    return SampleBatch._of(columns, part.nested, flags)


def fixed_column(place: Place, root: Root) -> TensorColumn | TorchColumn:
    """Make a column over its place in a slot."""
    column, shape, offset = place
    values: npt.NDArray[Any] = _ndarray(shape, column.dtype, root, offset)
    return TensorColumn(values) if column.torch is None else TorchColumn.from_bits(values, column.torch)
