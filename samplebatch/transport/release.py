"""Giving a slot back at once: a batch lets go of its memory, unless others look at it too, and cannot be used after it.

Whether others do is seen by trying. What lies in the slot is noted down and let go of; if the slot's lease is still
there then, somebody else holds it, and the batch gets everything back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast
from weakref import ref

import numpy as np
import numpy.typing as npt

from samplebatch.batch.frame import load_columns
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import KINDS, NODE, TENSOR
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.interface import Column
from samplebatch.column.objects import ObjectColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import LeaseError, ReleasedError
from samplebatch.transport.encode import AnyBatch, bytes_of
from samplebatch.transport.lease import Lease

_BYTE = np.dtype(np.uint8)
_ndarray = np.ndarray

PutBack = Callable[[Lease], None]
"""Gives a batch what it had, over the slot of a lease."""
Rebuild = Callable[[Lease], Any]
"""Makes a value again, over the slot of a lease."""


def _refuse(batch: Any, name: str, *_: Any) -> Any:
    """Stand for every way to reach into a released batch."""
    if name == "__class__":
        return object.__getattribute__(batch, name)
    raise ReleasedError("a batch must not be used after its memory was given back; copy() what is needed for longer")


def _released(cls: type) -> type:
    """Make what a batch becomes: a class of its kind, of which everything that one asks raises."""
    return type(
        f"Released{cls.__name__}",
        (cls,),
        {
            "__slots__": (),
            "__doc__": f"A `{cls.__name__}` whose memory was given back.",
            "__getattribute__": _refuse,
            "__setattr__": _refuse,
            "__delattr__": _refuse,
            "__repr__": lambda _: f"<a {cls.__name__} whose memory was given back>",
        },
    )


_RELEASED = {cls: _released(cls) for cls in (SampleBatch, MultiAgentBatch, Batch)}
_RELEASED_CLASSES = tuple(_RELEASED.values())


def is_released(batch: object) -> bool:
    """Tell whether a batch's memory was given back by `release`."""
    return isinstance(batch, _RELEASED_CLASSES)


def release(batch: AnyBatch, lease: ref[Lease]) -> None:
    """Let a batch go of its slot, and make it one that cannot be used.

    Parameters
    ----------
    batch
        The batch, which nobody else changes meanwhile.
    lease
        Its lease, which nobody holds but those who look at the slot.

    Raises
    ------
    LeaseError
        If others look at the slot. The batch stays as it is.
    """
    parts = list(_parts(batch))
    held = lease()
    put_back = [] if held is None else [_emptied(part, held) for part in parts]
    del held
    held = lease()
    if held is not None:
        for own in put_back:
            own(held)
        raise LeaseError(
            "a batch's memory must have no other views when it is given back, and there are arrays, slices or tensors "
            "of it left; delete them first, or let the last of them give it back"
        )
    for part in parts:
        object.__setattr__(part, "__class__", _RELEASED[type(part)])


def _parts(batch: AnyBatch) -> Iterator[AnyBatch]:
    """Yield a batch and those that it is made of."""
    yield batch
    if isinstance(batch, MultiAgentBatch):
        yield from batch.policy_batches.values()
    elif isinstance(batch, Batch):
        for value in batch.__dict__.values():
            if KINDS[type(value)] == NODE:
                yield from _parts(value)


def _emptied(batch: AnyBatch, lease: Lease) -> PutBack:
    """Take everything out of a batch that lies in the slot, and return what puts it back."""
    within = _Range(lease)
    if isinstance(batch, SampleBatch):
        return _emptied_columns(batch, within)
    if isinstance(batch, MultiAgentBatch):
        return _nothing
    values = batch.__dict__
    taken = {name: rebuild for name, value in values.items() if (rebuild := _noted_value(value, within)) is not None}
    for name in taken:
        values[name] = None

    def put_back(lease: Lease) -> None:
        for name, rebuild in taken.items():
            values[name] = rebuild(lease)

    return put_back


def _nothing(lease: Lease) -> None:
    """Put nothing back."""


def _emptied_columns(batch: SampleBatch, within: _Range) -> PutBack:
    columns = batch._all()
    order = list(columns)
    kept: dict[str, Column] = {}
    taken: dict[str, Rebuild] = {}
    for name, column in columns.items():
        rebuild = _noted(column, within)
        if rebuild is None:
            kept[name] = column
        else:
            taken[name] = rebuild
    lent = batch._lent
    batch._columns = {}
    del columns, column

    def put_back(lease: Lease) -> None:
        batch._columns = {name: kept[name] if name in kept else taken[name](lease) for name in order}
        batch._lent = lent

    return put_back


class _Range:
    """The addresses of a slot."""

    def __init__(self, lease: Lease) -> None:
        self._start = _address(lease)
        self._stop = self._start + lease.nbytes

    def offset(self, values: npt.NDArray[Any]) -> int | None:
        """Tell where in the slot an array begins; None if it does not lie there."""
        at = _address(values)
        return at - self._start if self._start <= at < self._stop else None


def _address(values: npt.NDArray[Any]) -> int:
    return int(values.__array_interface__["data"][0])


def _noted(column: Column, within: _Range) -> Rebuild | None:
    """Note down what a column is that lies in the slot; None if it does not."""
    if isinstance(column, ObjectColumn):
        return None
    header, buffers = column.dump()
    flat = [bytes_of(buffer) for buffer in buffers]
    offsets = [within.offset(buffer) for buffer in flat]
    # What has no bytes lies nowhere, but may hold the slot all the same.
    if all(offset is None for offset in offsets) and any(buffer.nbytes for buffer in flat):
        return None
    outside = [buffer if offset is None else None for buffer, offset in zip(flat, offsets, strict=True)]
    sizes = [buffer.nbytes for buffer in flat]

    def rebuild(lease: Lease) -> Column:
        again: list[Any] = [
            other if other is not None else _ndarray((nbytes,), _BYTE, lease, cast("int", offset))
            for other, offset, nbytes in zip(outside, offsets, sizes, strict=True)
        ]
        return load_columns([("", len(again), header)], again, allow_pickle=False)[""]

    return rebuild


def _noted_value(value: Any, within: _Range) -> Rebuild | None:
    """Note down what a value of a nested batch is that lies in the slot; None if it does not."""
    if isinstance(value, Column):
        return _noted(value, within)
    if KINDS[type(value)] == TENSOR and value.ndim and value.is_contiguous() and value.device.type == "cpu":
        needs_gradient = value.requires_grad
        noted = _noted(TorchColumn(value.detach()), within)
        return None if noted is None else lambda lease: noted(lease).values.requires_grad_(needs_gradient)
    if type(value) is not _ndarray:
        return None
    shape, dtype, strides = value.shape, value.dtype, value.strides
    if not value.size:
        return lambda _: np.empty(shape, dtype)
    offset = within.offset(value)
    if offset is None:
        return None
    return lambda lease: _ndarray(shape, dtype, lease, offset, strides)
