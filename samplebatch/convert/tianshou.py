"""Tianshou: its batches and its replay buffers, with their rows, cursors and priorities."""

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
    """Return a batch or a replay buffer of Tianshou's as the library's own, over the same memory.

    A buffer has the same class, rows, cursors, open episodes and priorities, and continues from there; its random
    generator is another. Use only one of the two: added steps overwrite rows of both.

    Parameters
    ----------
    thing
        A `Batch`, or a buffer of any class of Tianshou's.

    Returns
    -------
    Batch or ReplayBuffer
        The library's object of the same name.

    Raises
    ------
    ColumnTypeError
        If it is neither, or a value is one that no column can hold; names it.

    Examples
    --------
    >>> from tianshou.data import Batch, ReplayBuffer
    >>> theirs = ReplayBuffer(4)
    >>> for i in range(6):
    ...     step = Batch(obs=i, act=0, rew=1.0, terminated=i == 4, truncated=False, obs_next=i + 1, info={})
    ...     added = theirs.add(step)
    >>> ours = from_tianshou(theirs)
    >>> ours[:].obs, len(ours)
    (array([2, 3, 4, 5]), 4)
    """
    if hasattr(thing, "maxsize") and hasattr(thing, "_meta"):
        return _buffer_of(thing)
    if values_of(thing) is None:
        raise ColumnTypeError(f"a Batch or a buffer of Tianshou's must be given, got a {type(thing).__name__}")
    batch: Any = thing
    return Batch(batch)


class _Attributes:
    """Reader of a buffer's attributes in memory, with the interface of the readers of files."""

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
    found = {name: value for name, value in vars(theirs).items() if name != "_meta"}
    reader = _Attributes()
    about = description_in(ReplayBuffer, found, found, reader)
    rings = rings_in(about)
    table = table_in(about, found, rings, dict(values_of(Batch(theirs._meta)) or {}))
    sampler = sampler_in(about, found, found, table, reader)
    first = theirs.buffers[0] if "buffers" in found else theirs
    missing = {_REWARD_FUNCTION: vars(first)[_REWARD_FUNCTION]} if _REWARD_FUNCTION in vars(first) else {}
    buffer: ReplayBuffer = make_buffer(ReplayBuffer, about, table, sampler, missing)
    return buffer


def to_tianshou(source: Any) -> Any:
    """Return a batch or a buffer as Tianshou's: a batch over the same arrays, a buffer with a copy of the rows.

    A buffer has the same class, rows, cursors, open episodes and priorities. Tianshou has no place for final
    observations where next ones are not stored, nor for compressed rows, which become arrays.

    Parameters
    ----------
    source
        A batch of either kind, columns by name, or a buffer.

    Raises
    ------
    ColumnTypeError
        If it is neither.
    MissingExtraError
        If Tianshou is not installed.
    """
    data = require("tianshou.data", "tianshou")
    if isinstance(source, ReplayBuffer):
        return _their_buffer(source, data)
    if isinstance(source, SampleBatch):
        source = source.as_batch(convention="tianshou")
    values = values_of(source)
    if values is None:
        raise ColumnTypeError(f"a batch or a buffer must be given, got a {type(source).__name__}")
    return _their_batch(values, data.Batch)


def _their_batch(values: Any, cls: Any) -> Any:
    batch = cls()
    for name, value in values.items():
        inner = values_of(value)
        batch[name] = value if inner is None else _their_batch(inner, cls)
    return batch


def _their_buffer(ours: Any, data: Any) -> Any:
    with ours._table.lock:
        made: dict[int, tuple[Standing, Any]] = {}
        state = {name: _realize(value, made) for name, value in attributes_for(ours).items()}
        rows = rows_for(ours._table.columns.tree, np.arange(ours._start, ours._start + ours.maxsize))
    buffer = object.__new__(getattr(data, type(ours).__name__))
    buffer.__setstate__(state | {"_meta": _realize(rows, made)})
    if "buffer_num" in state:
        # Each ring's own buffer looks at its part of the rows.
        buffer._set_batch_for_children()
    return buffer


def _realize(value: Any, made: dict[int, tuple[Standing, Any]]) -> Any:
    """Create each of Tianshou's objects from its stand-in, once."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        realized = np.empty(value.shape, object)
        realized[...] = [_realize(item, made) for item in value]
        return realized
    if not isinstance(value, Standing):
        return value
    if id(value) not in made:
        module, name = value.kind
        thing = object.__new__(getattr(import_module(module), name))
        # The stand-in as well, lest another gets its id.
        made[id(value)] = value, thing
        state = {key: _realize(item, made) for key, item in value.state.items()}
        getattr(thing, "__setstate__", vars(thing).update)(state)
    return made[id(value)][1]
