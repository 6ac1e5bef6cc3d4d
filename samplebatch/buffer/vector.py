"""Replay buffers of vector environments: one ring per environment, with shared columns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Never

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import suggest_names, whole
from samplebatch.batch.action_unit import common_unit
from samplebatch.batch.nested.batch import Batch
from samplebatch.buffer import views
from samplebatch.buffer.gather import rows_at
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.ring import Added, Ints
from samplebatch.buffer.views import slots_of
from samplebatch.buffer.writing import drop_empty, step_values
from samplebatch.errors import ColumnMismatchError, ColumnTypeError, RingError, StorageError

_INTP = np.dtype(np.intp)


class ReplayBufferManager(ReplayBuffer):
    """Replay buffer for a vector environment, combined from several buffers, with one ring per environment.

    The buffers and their rows become parts of the new buffer, and afterwards share the memory of the new buffer.

    Parameters
    ----------
    buffer_list
        Buffers with equal options; the sizes of the buffers may differ.

    Attributes
    ----------
    buffer_num
        Number of buffers.

    Raises
    ------
    ColumnMismatchError
        If the options or columns of two buffers differ (the message contains the difference), a buffer is repeated, or
        there are no buffers.
    ColumnTypeError
        If an element of `buffer_list` is not a buffer with one ring.
    StorageError
        If a buffer is stored in a folder.

    Examples
    --------
    >>> buf = ReplayBufferManager([ReplayBuffer(3), ReplayBuffer(5)])
    >>> flags = np.array([False, True])
    >>> slots, returns, lengths, starts = buf.add(
    ...     Batch(
    ...         obs=[0, 1],
    ...         act=[0, 0],
    ...         rew=[1.0, 2.0],
    ...         terminated=flags,
    ...         truncated=[False, False],
    ...     )
    ... )
    >>> slots, returns
    (array([0, 3]), array([0., 2.]))
    >>> buf.add(
    ...     Batch(obs=[2], act=[0], rew=[1.0], terminated=[True], truncated=[False]),
    ...     buffer_ids=[0],
    ... )[1]
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
            raise ColumnMismatchError("buffer_list must contain at least one buffer, got none")
        for buffer in buffers:
            if not isinstance(buffer, ReplayBuffer) or isinstance(buffer, ReplayBufferManager):
                kind = type(buffer).__name__
                raise ColumnTypeError(f"the parts of a buffer must be buffers with one ring, got a {kind}")
            if buffer._journal is not None:
                raise StorageError("the parts of a buffer must be in memory, got one stored in a folder")
        if len(set(map(id, buffers))) < len(buffers):
            raise ColumnMismatchError("the parts of a buffer must be different buffers, got a repeated one")
        options = [buffer.options | {"stack_num": buffer.stack_num} for buffer in buffers]
        for other in options:
            for name in options[0].keys() | other.keys():
                values = options[0].get(name), other.get(name)
                if values[0] != values[1]:
                    raise ColumnMismatchError(
                        f"the parts of a buffer must have the same {name!r}, got {values[0]!r:.80} and "
                        f"{values[1]!r:.80}"
                    )
        self._set_up([buffer.maxsize for buffer in buffers], options[0], buffers[0]._seed)
        self._gather(buffers)
        self._bind(buffers)

    def _set_up(self, maxsizes: Sequence[int], options: Mapping[str, Any], random_seed: int) -> None:
        super()._set_up(maxsizes, options, random_seed)
        self.buffer_num = len(maxsizes)
        self._order = list(range(len(maxsizes)))

    def _gather(self, buffers: Sequence[ReplayBuffer]) -> None:
        if not any(len(buffer) for buffer in buffers):
            return
        rings = self._table.rings
        self.action_unit = common_unit([buffer.action_unit for buffer in buffers if len(buffer)])
        for ring, buffer in enumerate(buffers):
            slots = slots_of(buffer, slice(None))
            state = buffer._table.rings.state_dict(buffer._ring)
            oldest = slots[:1] - buffer._start
            if len(slots):
                rings.take_over(ring, state | {"sizes": np.zeros(1, _INTP), "cursors": oldest})
                self._table.append(ring, drop_empty(rows_at(buffer._table, slots, 1)), len(slots))
        # The shape of rewards is unknown before.
        for ring, buffer in enumerate(buffers):
            rings.take_over(ring, buffer._table.rings.state_dict(buffer._ring))
        rings.unite()

    def _bind(self, buffers: Sequence[ReplayBuffer]) -> None:
        parts = np.empty(len(buffers), object)
        for ring, buffer in enumerate(buffers):
            buffer._table, buffer._ring, buffer._start = self._table, ring, int(self._table.rings.edges[ring])
            buffer._sampler = self._sampler
            parts[ring] = buffer
        self._parts = parts

    @property
    def buffers(self) -> npt.NDArray[Any]:
        """Object array with one buffer per ring; all buffers in the array share the memory of the vector buffer."""
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
        *more: Never,
        **columns: Any,
    ) -> Added:
        """Add one step of each environment, or steps of some environments.

        Parameters
        ----------
        batch
            Values by name, with a leading axis of one row per buffer, or one row per entry of `buffer_ids`. The values
            can also be passed as keyword arguments, as in older versions of Tianshou.
        buffer_ids
            Number of the buffer to which each row is added, shape (k,); None adds one row to every buffer, in order.
            Rows of the same buffer are successive steps.

        Returns
        -------
        tuple
            Four arrays of length k: the indices of the steps; the returns and the lengths of the episodes that the
            steps ended, with 0 for steps that ended no episode; and the indices of the first steps of the episodes. If
            one row is added to every buffer and no episode ends, all arrays except the first are read-only and shared
            between calls.

        Raises
        ------
        ColumnNotFoundError
            If a required column is missing.
        ColumnLengthError, ColumnMismatchError, ColumnTypeError
            If a value does not have k rows, or a column cannot store the rows exactly. An error changes nothing.
        RingError
            If `buffer_ids` contains the number of a buffer that does not exist or has no slots.
        ArgumentError
            If values are passed by position.
        """
        if more:
            raise views.values_by_position(len(more) + 2)
        table = self._table
        rings = None if buffer_ids is None else self._rings_of(buffer_ids)
        with table.lock:
            unit = getattr(batch, "_action_unit", None)
            if unit is not table.action_unit:
                self._merge_action_unit(unit)
            if rings is None and type(batch) is Batch and not columns:
                values = batch.__dict__
                fast_add = table.fast_add
                added = None if fast_add is None else fast_add(values)
                if added is None:
                    added = table.add(values, self.buffer_num)
                    table.compile_fast_add(values, self.buffer_num)
                return added
            return table.add(step_values(batch, columns), self.buffer_num if rings is None else len(rings), rings)

    def _rings_of(self, buffer_ids: Any) -> Ints | None:
        """Validate `buffer_ids` and convert them to numbers of rings; return None for all rings in order."""
        if buffer_ids is self._order:
            return None
        rings = np.asarray(buffer_ids)
        if rings.tolist() == self._order:
            return None
        if rings.dtype.kind not in "iu" or rings.ndim != 1:
            raise RingError(f"buffer_ids must be a list of integers, got {rings.dtype} of shape {rings.shape}")
        number = len(self._order)
        outside = (rings < 0) | (rings >= number)
        if outside.any():
            raise RingError(f"buffer_ids must be in [0, {number}), got {rings[outside][0]}")
        return rings.astype(_INTP, copy=False)

    def update(self, buffer: ReplayBuffer) -> Ints:
        """Raise NotImplementedError, because the target ring of the rows is ambiguous. Update one of `buffers`."""
        raise NotImplementedError(f"{type(self).__name__} has no update(); update one of its buffers")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_parts"}


class VectorReplayBuffer(ReplayBufferManager):
    """Replay buffer of n environments, one ring per environment.

    Parameters
    ----------
    total_size
        Total capacity in steps, rounded up to a multiple of `buffer_num`.
    buffer_num
        Number of environments.
    storage
        New folder for the rows; see `ReplayBuffer`.
    **kwargs
        As in `ReplayBuffer`.

    Raises
    ------
    ArgumentError
        If `total_size` is not an integer of at least 0, or `buffer_num` is not an integer of at least 1.

    Examples
    --------
    >>> buf = VectorReplayBuffer(10, 3)
    >>> ends = np.zeros(3, bool)
    >>> slots, *_ = buf.add(
    ...     Batch(
    ...         obs=np.arange(3), act=[0, 1, 0], rew=np.ones(3), terminated=ends, truncated=ends
    ...     )
    ... )
    >>> slots, buf.maxsize, len(buf)
    (array([0, 4, 8]), 12, 3)
    """

    @suggest_names(size="total_size", capacity="total_size", buffer_size="total_size", num_envs="buffer_num")
    def __init__(
        self, total_size: int, buffer_num: int, *, storage: str | os.PathLike[str] | None = None, **kwargs: Any
    ) -> None:
        buffer_num = whole("buffer_num", buffer_num, 1)
        single = ReplayBuffer(-(-whole("total_size", total_size) // buffer_num), **kwargs)
        self._set_up([single.maxsize] * buffer_num, single.options, single._seed)
        self._keep_in(storage)


class CachedReplayBuffer(ReplayBufferManager):
    """Main buffer with one cache per environment; finished episodes are moved from the caches to the main buffer.

    The main buffer stores every episode contiguously, even if the steps of several environments are added in turn. The
    first indices refer to the slots of the main buffer, and the following indices to the slots of the caches.

    Parameters
    ----------
    main_buffer
        Buffer to which finished episodes are moved; the main buffer and its rows become a part of the new buffer. If
        the size of the main buffer is 0, finished episodes are discarded.
    cached_buffer_num
        Number of environments.
    max_episode_length
        Number of slots per cache; only the newest steps of a longer episode are stored.

    Attributes
    ----------
    main_buffer, cached_buffers
        The main buffer, and an object array of the caches.
    cached_buffer_num
        Number of caches.

    Raises
    ------
    ArgumentError
        If `cached_buffer_num` or `max_episode_length` is not an integer of at least 1.
    ColumnTypeError
        If the main buffer does not sample uniformly.

    Examples
    --------
    >>> buf = CachedReplayBuffer(ReplayBuffer(10), cached_buffer_num=2, max_episode_length=5)
    >>> for ends in ([False, False], [True, False]):
    ...     index, returns, lengths, starts = buf.add(
    ...         Batch(
    ...             obs=[0, 1],
    ...             act=[0, 0],
    ...             rew=[1.0, 1.0],
    ...             terminated=ends,
    ...             truncated=[False, False],
    ...         )
    ...     )
    >>> index, starts, lengths
    (array([ 1, 16]), array([ 0, 15]), array([2, 0]))
    >>> len(buf.main_buffer), len(buf.cached_buffers[0]), len(buf)
    (2, 0, 4)
    """

    def __init__(self, main_buffer: ReplayBuffer, cached_buffer_num: int, max_episode_length: int) -> None:
        cached_buffer_num = whole("cached_buffer_num", cached_buffer_num, 1)
        max_episode_length = whole("max_episode_length", max_episode_length, 1)
        if type(main_buffer) is not ReplayBuffer:
            raise ColumnTypeError(
                "the main buffer of a cached buffer must be a ReplayBuffer, which samples uniformly, got a "
                f"{type(main_buffer).__name__}"
            )
        options = main_buffer.options | {"stack_num": main_buffer.stack_num}
        caches = [
            ReplayBuffer(max_episode_length, random_seed=main_buffer._seed, **options) for _ in range(cached_buffer_num)
        ]
        super().__init__([main_buffer, *caches])
        self.cached_buffer_num = cached_buffer_num
        self._order = list(range(cached_buffer_num))

    @property
    def main_buffer(self) -> ReplayBuffer:
        """Main buffer."""
        main: ReplayBuffer = self.buffers[0]
        return main

    @property
    def cached_buffers(self) -> npt.NDArray[Any]:
        """Caches of the environments, in an array of objects."""
        return self.buffers[1:]

    def add(
        self,
        batch: Batch | Mapping[str, Any] | None = None,
        buffer_ids: npt.NDArray[Any] | Sequence[int] | None = None,
        *more: Never,
        **columns: Any,
    ) -> Added:
        """Add steps of all environments or some environments, and move the episodes that end to the main buffer.

        Parameters
        ----------
        batch
            Values by name, with a leading axis of one row per cache, or one row per entry of `buffer_ids`. The values
            can also be passed as keyword arguments, as in older versions of Tianshou.
        buffer_ids
            Number of the cache to which each row is added, where the first cache is 0, shape (k,); None adds one row to
            every cache, in order.

        Returns
        -------
        tuple
            Four arrays of length k: indices, returns, lengths and first indices, as returned by
            `ReplayBufferManager.add`. If an episode has been moved, the returned index and first index locate the
            episode's last and first step in the main buffer; both indices are -1 if the main buffer has no slots.

        Raises
        ------
        SampleBatchError
            As in `ReplayBufferManager.add`. An error changes nothing.
        """
        if more:
            raise views.values_by_position(len(more) + 2)
        step = step_values(batch, columns)
        rings = None if buffer_ids is None else self._rings_of(buffer_ids)
        chosen = np.arange(1, self.buffer_num) if rings is None else rings + 1
        table = self._table
        with table.lock:
            self._merge_action_unit(getattr(batch, "_action_unit", None))
            if rings is not None and len(set(rings.tolist())) < len(rings):
                table.check(step, len(rings), stored=False)
                return self._add_in_turns(Batch(step), rings)
            slots, returns, lengths, starts = table.add(step, len(chosen), chosen)
            for position in np.flatnonzero(table.done[slots]).tolist():
                slots[position], starts[position] = self._move(int(chosen[position]))
        return slots, returns, lengths, starts

    def _add_in_turns(self, rows: Batch, rings: Ints) -> Added:
        """Add rows in groups of at most one row per cache.

        A finished episode is moved before the next row of its cache is added.
        """
        starts, used_rings = [0], set[int]()
        for row, ring in enumerate(rings.tolist()):
            if ring in used_rings:
                starts.append(row)
                used_rings.clear()
            used_rings.add(ring)
        stops = [*starts[1:], len(rings)]
        results = [self.add(rows[start:stop], rings[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        slots, returns, lengths, begins = (np.concatenate(part) for part in zip(*results, strict=True))
        return slots, returns, lengths, begins

    def _move(self, ring: int) -> tuple[int, int]:
        """Move the rows of a cache to the main buffer; return the slots of the last and the first row."""
        table = self._table
        slots = table.rings.chronological(ring)
        first = last = -1
        size = int(table.rings.maxsizes[0])
        if size and len(slots):
            rows = drop_empty(rows_at(table, slots[-size:], 1))
            moved = table.append(0, rows, len(slots))
            first, last = int(moved[0]), int(moved[-1])
        table.reset([ring])
        return last, first


class ListReplayBuffer(ReplayBuffer):
    """Replay buffer with a default size, for scripts that were written for early versions of Tianshou.

    Early versions of Tianshou appended steps to lists without a limit. This buffer stores up to `size` steps, then
    overwrites the oldest steps. Memory is reserved when the first step is added; the operating system allocates the
    pages when rows are written.

    Parameters
    ----------
    size
        Capacity in steps.
    **options
        See `ReplayBuffer`.

    Raises
    ------
    ArgumentError
        As in `ReplayBuffer`.

    Examples
    --------
    >>> buf = ListReplayBuffer()
    >>> for i in range(3):
    ...     _ = buf.add(obs=i, act=i, rew=i, done=i == 2, obs_next=i + 1, info={})
    >>> len(buf), buf.obs[:3]
    (3, array([0, 1, 2]))
    """

    def __init__(self, size: int = 1_000_000, **options: Any) -> None:
        super().__init__(size, **options)
