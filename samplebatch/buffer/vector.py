"""Buffers of several rings: one for each environment of a vector, over the same columns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.buffer.gather import rows_at
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.ring import Added, Ints
from samplebatch.buffer.writing import drop_empty, step_values
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, RingError, StorageError

_INTP = np.dtype(np.intp)


class ReplayBufferManager(ReplayBuffer):
    """Several replay buffers as one, for vector environments: each environment has a ring of its own.

    The buffers given, with the rows they have, become parts of this one: they share its memory from then on.

    Parameters
    ----------
    buffer_list
        The buffers, made with the same options; their sizes may differ.

    Attributes
    ----------
    buffer_num
        How many buffers there are.

    Raises
    ------
    ColumnMismatchError
        If their options differ, or the columns of their rows; names the difference.
    ColumnTypeError
        If one of them is no buffer of its own.
    StorageError
        If one of them is kept in a folder.

    Examples
    --------
    >>> buf = ReplayBufferManager([ReplayBuffer(3), ReplayBuffer(5)])
    >>> flags = np.array([False, True])
    >>> slots, returns, lengths, starts = buf.add(
    ...     Batch(obs=[0, 1], act=[0, 0], rew=[1.0, 2.0], terminated=flags, truncated=[False, False])
    ... )
    >>> slots, returns
    (array([0, 3]), array([0., 2.]))
    >>> buf.add(Batch(obs=[2], act=[0], rew=[1.0], terminated=[True], truncated=[False]), buffer_ids=[0])[1]
    array([2.])
    >>> buf.buffers[0].obs
    array([0, 2, 0])
    """

    buffer_num: int
    _part_kind: ClassVar[type[ReplayBuffer]] = ReplayBuffer
    _parts: npt.NDArray[Any] | None = None

    def __init__(self, buffer_list: Sequence[ReplayBuffer]) -> None:
        buffers = list(buffer_list)
        if not buffers:
            raise ColumnMismatchError("a buffer must be made of one or more buffers, got none")
        for buffer in buffers:
            if not isinstance(buffer, ReplayBuffer) or isinstance(buffer, ReplayBufferManager):
                found = type(buffer).__name__
                raise ColumnTypeError(f"the parts of a buffer must be buffers of one ring each, got a {found}")
            if buffer._journal is not None:
                raise StorageError("the parts of a buffer must be in memory, one is kept in a folder")
        if len(set(map(id, buffers))) < len(buffers):
            raise ColumnMismatchError("the parts of a buffer must be different buffers, got one of them twice")
        options = [buffer.options | {"stack_num": buffer.stack_num} for buffer in buffers]
        for other in options:
            for name in options[0].keys() | other.keys():
                if options[0].get(name) != other.get(name):
                    raise ColumnMismatchError(f"the parts of a buffer must have the same {name!r}, they differ")
        self._set_up([buffer.maxsize for buffer in buffers], options[0], buffers[0]._seed)
        self._gather(buffers)
        self._bind(buffers)

    def _set_up(self, maxsizes: Sequence[int], options: Mapping[str, Any], random_seed: int) -> None:
        super()._set_up(maxsizes, options, random_seed)
        self.buffer_num = len(maxsizes)
        self._order = list(range(len(maxsizes)))

    def _gather(self, buffers: Sequence[ReplayBuffer]) -> None:
        """Take the rows and the running episodes of buffers, ring by ring."""
        if not any(len(buffer) for buffer in buffers):
            return
        rings = self._table.rings
        for ring, buffer in enumerate(buffers):
            slots = buffer._slots(slice(None))
            state = buffer._table.rings.state_dict(buffer._ring)
            oldest = slots[:1] - buffer._start
            if len(slots):
                rings.take_over(ring, state | {"sizes": np.zeros(1, _INTP), "cursors": oldest})
                self._table.append(ring, drop_empty(rows_at(buffer._table, slots, 1)), len(slots))
        # The shape of rewards is known only now.
        for ring, buffer in enumerate(buffers):
            rings.take_over(ring, buffer._table.rings.state_dict(buffer._ring))
        rings.unite()

    def _bind(self, buffers: Sequence[ReplayBuffer]) -> None:
        """Make buffers the parts of this one."""
        parts = np.empty(len(buffers), object)
        for ring, buffer in enumerate(buffers):
            buffer._table, buffer._ring, buffer._start = self._table, ring, int(self._table.rings.edges[ring])
            buffer._sampler = self._sampler
            parts[ring] = buffer
        self._parts = parts

    @property
    def buffers(self) -> npt.NDArray[Any]:
        """A buffer for each ring, in an array of objects; they share the memory of this one."""
        with self._table.lock:
            if self._parts is None:
                self._bind([self._part(ring) for ring in range(self.buffer_num)])
            parts = self._parts
        assert parts is not None
        return parts

    def _part(self, ring: int) -> ReplayBuffer:
        part = self._part_kind.__new__(self._part_kind)
        part.maxsize = int(self._table.rings.maxsizes[ring])
        part.options, part.stack_num = dict(self.options), self.stack_num
        part._seed = self._seed
        part._rng = np.random.default_rng([self._seed, ring + 1])
        return part

    def add(
        self,
        batch: Batch | Mapping[str, Any] | None = None,
        buffer_ids: npt.NDArray[Any] | Sequence[int] | None = None,
        **columns: Any,
    ) -> Added:
        """Add a step of each environment, or of some.

        Parameters
        ----------
        batch
            Values by name, with a leading axis: one row for each buffer, or for each of `buffer_ids`. The older form
            gives them as keywords.
        buffer_ids
            The buffers that the rows are for, shape (k,); None for all in order. One may stand there several times:
            its rows are steps one after the other.

        Returns
        -------
        tuple
            Four arrays of length k: the indices that the steps went to, returns and lengths of the episodes that ended
            with them (zero for the others), and the indices where the episodes began. Steps of all environments that
            end no episode share all but the first of them, which are read-only then.

        Raises
        ------
        ColumnNotFoundError
            If a column is missing that every step must have; names it.
        ColumnLengthError, ColumnMismatchError, ColumnTypeError
            If a column has not k rows, or cannot take them without loss; names it. Nothing has changed then.
        RingError
            If there is no such buffer, or it has no slots.
        """
        table = self._table
        rings = None if buffer_ids is None else self._rings_of(buffer_ids)
        with table.lock:
            if rings is None and type(batch) is Batch and not columns:
                held = batch.__dict__
                added = None if table.fast_add is None else table.fast_add(held)
                if added is None:
                    added = table.add(held, self.buffer_num)
                    table.compile_fast_add(held, self.buffer_num)
                return added
            return table.add(step_values(batch, columns), self.buffer_num if rings is None else len(rings), rings)

    def _rings_of(self, buffer_ids: Any) -> Ints | None:
        """Return the rings of buffers; None for all in order."""
        if buffer_ids is self._order:
            return None
        rings = np.asarray(buffer_ids)
        if rings.tolist() == self._order:
            return None
        if rings.dtype.kind not in "iu" or rings.ndim != 1:
            raise RingError(f"buffer_ids must be a list of whole numbers, got {rings.dtype} of shape {rings.shape}")
        number = len(self._order)
        outside = (rings < 0) | (rings >= number)
        if outside.any():
            raise RingError(f"buffer_ids must lie in [0, {number}), got {rings[outside][0]}")
        return rings.astype(_INTP, copy=False)

    def update(self, buffer: ReplayBuffer) -> Ints:
        """Raise NotImplementedError: which ring should the steps go to? Update one of `buffers`."""
        raise NotImplementedError(f"{type(self).__name__} has no update(); update one of its buffers")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_parts"}


class VectorReplayBuffer(ReplayBufferManager):
    """A replay buffer of n environments, each in a ring of its own.

    Parameters
    ----------
    total_size
        How many steps to keep of all environments together, rounded up so that each has as many slots.
    buffer_num
        How many environments there are.
    storage
        A new folder to keep the rows in; see `ReplayBuffer`.
    **kwargs
        As for `ReplayBuffer`.

    Raises
    ------
    ArgumentError
        If `total_size` is no whole number from 0 on, or `buffer_num` none from 1 on.

    Examples
    --------
    >>> buf = VectorReplayBuffer(10, 3)
    >>> ends = np.zeros(3, bool)
    >>> slots, *_ = buf.add(Batch(obs=np.arange(3), act=[0, 1, 0], rew=np.ones(3), terminated=ends, truncated=ends))
    >>> slots, buf.maxsize, len(buf)
    (array([0, 4, 8]), 12, 3)
    """

    def __init__(
        self, total_size: int, buffer_num: int, *, storage: str | os.PathLike[str] | None = None, **kwargs: Any
    ) -> None:
        buffer_num = whole("buffer_num", buffer_num, 1)
        one = ReplayBuffer(-(-whole("total_size", total_size) // buffer_num), **kwargs)
        self._set_up([one.maxsize] * buffer_num, one.options, one._seed)
        self._keep_in(storage)
