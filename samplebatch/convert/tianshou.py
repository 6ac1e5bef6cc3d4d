"""Conversion of Tianshou's batches and replay buffers, including rows, cursors and priorities."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.inert_pickle import Foreign
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import values_of
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import ColumnTypeError, require
from samplebatch.storage.buffers.state import make_buffer
from samplebatch.storage.buffers.tianshou import (
    Standing,
    attributes_for,
    description_in,
    rings_in,
    rows_for,
    sampler_in,
    table_in,
)

if TYPE_CHECKING:
    import tianshou.data

_REWARD_FUNCTION = "compute_reward_fn"


def from_tianshou(thing: tianshou.data.Batch | tianshou.data.ReplayBuffer) -> Any:
    """Convert a Tianshou batch or replay buffer to this library's class of the same name, without a copy.

    The class, rows, cursors, unfinished episodes and priorities of a buffer are preserved, but not its random
    generator. Use only one of the two buffers after the conversion, because both write to the same memory.

    Parameters
    ----------
    thing
        A `Batch`, or a replay buffer of any Tianshou class.

    Returns
    -------
    Batch or ReplayBuffer
        Object of this library's class of the same name.

    Raises
    ------
    ColumnTypeError
        If `thing` is neither a batch nor a replay buffer, or a value has an unsupported type.

    Examples
    --------
    >>> from tianshou.data import Batch, ReplayBuffer
    >>> theirs = ReplayBuffer(4)
    >>> for i in range(6):
    ...     step = Batch(
    ...         obs=i,
    ...         act=0,
    ...         rew=1.0,
    ...         terminated=i == 4,
    ...         truncated=False,
    ...         obs_next=i + 1,
    ...         info={},
    ...     )
    ...     added = theirs.add(step)
    >>> ours = from_tianshou(theirs)
    >>> ours[:].obs, len(ours)
    (array([2, 3, 4, 5]), 4)
    """
    if hasattr(thing, "maxsize") and hasattr(thing, "_meta"):
        return _buffer_of(thing)
    if values_of(thing) is None:
        raise ColumnTypeError(f"thing must be a Tianshou Batch or buffer, got a {type(thing).__name__}")
    batch: Any = thing
    return Batch(batch)


class _Attributes:
    """Reader for the attributes of an in-memory buffer, with the interface of the file readers."""

    allow_pickle = True

    def value(self, x: Any, /) -> Any:
        return x

    def inert(self, x: Any, /) -> Any:
        if isinstance(x, np.ndarray):
            stubs = np.empty(len(x), object)
            stubs[:] = [self.inert(part) for part in x]
            return stubs
        stub = Foreign()
        stub.state = dict(x.__dict__)
        return stub

    def raw(self, x: Any, /) -> npt.NDArray[Any]:
        return np.asarray(x.get_state()[1])


def _buffer_of(theirs: Any) -> ReplayBuffer:
    attributes = {name: value for name, value in vars(theirs).items() if name != "_meta"}
    reader = _Attributes()
    about = description_in(ReplayBuffer, attributes, attributes, reader)
    rings = rings_in(about)
    table = table_in(about, attributes, rings, dict(values_of(Batch(theirs._meta)) or {}))
    sampler = sampler_in(about, attributes, attributes, table, reader)
    first = theirs.buffers[0] if "buffers" in attributes else theirs
    missing = {_REWARD_FUNCTION: vars(first)[_REWARD_FUNCTION]} if _REWARD_FUNCTION in vars(first) else {}
    buffer: ReplayBuffer = make_buffer(ReplayBuffer, about, table, sampler, missing)
    return buffer


def to_tianshou(source: Any) -> Any:
    """Convert a batch or a buffer to Tianshou's class; the arrays of a batch are shared, and a buffer is copied.

    The class, rows, cursors, unfinished episodes and priorities of a buffer are preserved. Final observations of
    buffers without next observations are omitted, and compressed rows are decompressed, because Tianshou supports
    neither.

    Parameters
    ----------
    source
        A `SampleBatch` or `Batch`, columns by name, or a replay buffer.

    Raises
    ------
    ColumnTypeError, MissingExtraError
        If `source` is neither a batch nor a buffer, or Tianshou is not installed.
    """
    data = require("tianshou.data", "tianshou")
    if isinstance(source, ReplayBuffer):
        return _their_buffer(source, data)
    if isinstance(source, SampleBatch):
        source = source.as_batch(convention="tianshou")
    values = values_of(source)
    if values is None:
        raise ColumnTypeError(f"source must be a batch or a buffer, got a {type(source).__name__}")
    return _their_batch(values, data.Batch)


def _their_batch(values: Any, cls: Any) -> Any:
    batch = cls()
    for name, value in values.items():
        inner = values_of(value)
        batch[name] = value if inner is None else _their_batch(inner, cls)
    return batch


def _their_buffer(ours: Any, data: Any) -> Any:
    with ours._table.lock:
        realized: dict[int, tuple[Standing, Any]] = {}
        state = {name: _realize(value, realized) for name, value in attributes_for(ours).items()}
        rows = rows_for(ours._table.columns.tree, np.arange(ours._start, ours._start + ours.maxsize))
    buffer = object.__new__(getattr(data, type(ours).__name__))
    buffer.__setstate__(state | {"_meta": _realize(rows, realized)})
    if "buffer_num" in state:
        # The buffer of each ring views its slice of the rows.
        buffer._set_batch_for_children()
    return buffer


def _realize(value: Any, objects: dict[int, tuple[Standing, Any]]) -> Any:
    """Create one Tianshou object per placeholder; `objects` caches the objects by placeholder id."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        realized = np.empty(value.shape, object)
        realized[...] = [_realize(item, objects) for item in value]
        return realized
    if not isinstance(value, Standing):
        return value
    if id(value) not in objects:
        module, name = value.kind
        instance = object.__new__(getattr(import_module(module), name))
        # Keep the placeholder alive, so that its id is not reused.
        objects[id(value)] = value, instance
        state = {key: _realize(item, objects) for key, item in value.state.items()}
        getattr(instance, "__setstate__", vars(instance).update)(state)
    return objects[id(value)][1]
