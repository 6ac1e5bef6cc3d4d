"""ReplayBuffer: the newest steps of an environment, to be sampled from."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.buffer.durable import Durable
from samplebatch.buffer.filling import given_rows, values_given
from samplebatch.buffer.n_step import check_window, nstep_columns
from samplebatch.buffer.reading import rows_at
from samplebatch.buffer.ring import Added, Ints
from samplebatch.buffer.samplers import Sampler, Uniform, whole_stacks
from samplebatch.buffer.sequences import SequenceSampling
from samplebatch.buffer.stores import OBSERVATIONS, Stores, names_of
from samplebatch.buffer.table import Table
from samplebatch.errors import RingError

_INTP = np.dtype(np.intp)
_zeros = np.zeros


class ReplayBuffer(SequenceSampling, Durable):
    """The newest steps of an environment.

    Steps are added as a `Batch` of `obs`, `act`, `rew`, `terminated`, `truncated` and, if wanted, `obs_next`, `info`,
    `policy` and anything else; `done` is made of the flags. The first step decides dtypes and shapes; new names may
    come later, their earlier rows hold zeros or None. `buf.obs` is the memory of all slots, `buf[...]` copies rows.

    Threads may share a buffer: each call holds its lock, so that a learner's thread never gets a row that a collector's
    is writing. Only memory that is handed out, such as `buf.obs`, changes while it is looked at.

    Parameters
    ----------
    size
        How many steps to keep.
    stack_num
        How many steps of its episode to stack, up to each row's own, where observations, info and policy are read.
    ignore_obs_next
        Whether not to store next observations. They are then those of the steps that follow; where an episode was cut
        or runs on, the final one is kept aside.
    save_only_last_obs
        Whether to store only the last frame of observations that come stacked.
    sample_avail
        Whether to sample only rows that have all the frames of a stack.
    random_seed
        Seed of the buffer's own generator, from which all draws come.
    compress
        Names of columns to keep in LZ4 chunks, which suits images; True for observations. A name stands for all that
        is nested under it. The first step must have them, `obs_next`, `info` and `policy` aside.
    ragged
        Names of columns whose rows vary in shape; observations that come as arrays of arrays are found out.
    storage
        A new folder to keep the rows in, mapped from files, so that they need not fit into memory and outlive the
        process; `open` opens it again. They must be numbers of one shape then.

    Raises
    ------
    ArgumentError
        If `size` is no whole number from 0 on, or `stack_num` none from 1 on.

    Attributes
    ----------
    maxsize
        How many steps are kept.
    stack_num
        As given; may be set to another whole number from 1 on.
    options
        The arguments, as a dict.

    Examples
    --------
    >>> buf = ReplayBuffer(size=4)
    >>> for i in range(6):
    ...     added = buf.add(Batch(obs=i, act=i, rew=1.0, terminated=i == 3, truncated=False, obs_next=i + 1))
    >>> buf.obs, len(buf)
    (array([4, 5, 2, 3]), 4)
    >>> buf[:].obs, buf[-2:].obs, buf.latest(3).obs
    (array([2, 3, 4, 5]), array([2, 3]), array([3, 4, 5]))
    >>> buf.prev([2, 3, 0]), buf.next([2, 3, 0])
    (array([2, 2, 0]), array([3, 3, 1]))
    >>> batch, indices = buf.sample(2)
    >>> batch.obs.tolist() == buf.obs[indices].tolist()
    True
    """

    options: dict[str, Any]

    def __init__(
        self,
        size: int,
        stack_num: int = 1,
        ignore_obs_next: bool = False,
        save_only_last_obs: bool = False,
        sample_avail: bool = False,
        random_seed: int = 42,
        *,
        compress: bool | str | Sequence[str] = False,
        ragged: bool | str | Sequence[str] = (),
        storage: str | os.PathLike[str] | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "stack_num": stack_num,
            "ignore_obs_next": ignore_obs_next,
            "save_only_last_obs": save_only_last_obs,
            "sample_avail": sample_avail,
        }
        extras = {"compress": compress, "ragged": ragged}
        options |= {name: value for name, value in extras.items() if value}
        self._set_up([size], options, random_seed)
        self._keep_in(storage)

    def _set_up(self, maxsizes: Sequence[int], options: Mapping[str, Any], random_seed: int) -> None:
        """Make rings of such sizes, empty."""
        sizes = [whole("size", size) for size in maxsizes]
        stores = Stores(
            names_of(options.get("compress", False), OBSERVATIONS, "compress"),
            names_of(options.get("ragged", ()), OBSERVATIONS, "ragged"),
            2 * len(sizes) + 4,
        )
        keeps_next, last_frame = not options["ignore_obs_next"], bool(options["save_only_last_obs"])
        self._table = Table(sizes, stores, keeps_next=keeps_next, last_frame=last_frame)
        self.maxsize = self._table.rings.capacity
        self.options = dict(options)
        self.stack_num = options["stack_num"]
        self._seed = random_seed
        self._rng = np.random.default_rng(random_seed)
        self._use(Uniform())

    def _use(self, sampler: Sampler) -> None:
        """Draw rows by a sampler from now on."""
        self._sampler = sampler
        self._table.listener = sampler if sampler.listens else None
        self._table.forget_ways()

    # Adding

    def add(
        self,
        batch: Batch | Mapping[str, Any] | None = None,
        buffer_ids: npt.NDArray[Any] | Sequence[int] | None = None,
        **columns: Any,
    ) -> Added:
        """Add a step.

        Parameters
        ----------
        batch
            Its values by name. It is not changed. The older form gives them as keywords, where `done` alone stands for
            `terminated`.
        buffer_ids
            `[0]` says that the values have a leading axis of length 1; k zeros, that they are those of k steps, one
            after the other.

        Returns
        -------
        tuple
            Four arrays of length 1, or k: the index that the step went to, return and length of the episode that it
            ended (zero if it did not), and the index where the episode began. Steps that end no episode share all
            but the first of them, which are read-only then.

        Raises
        ------
        ColumnNotFoundError
            If a column is missing that every step must have; names it.
        ColumnLengthError, ColumnMismatchError, ColumnTypeError
            If a column cannot take its value without loss; names it. Nothing has changed then.
        ArgumentError
            If the first step has no column that `compress` or `ragged` names.
        RingError
            If `buffer_ids` is something else, or the buffer has no slots.
        """
        table = self._table
        with table.lock:
            if buffer_ids is None and type(batch) is Batch and not columns and self._ring is None:
                way = table.way_of_one
                if way is not None:
                    added = way(batch.__dict__)
                    if added is not None:
                        return added
            return self._add(values_given(batch, columns), buffer_ids)

    def _add(self, held: dict[str, Any], buffer_ids: Any) -> Added:
        if buffer_ids is None and self._ring is None:
            return self._table.add_one(held)
        steps = 1
        if buffer_ids is not None:
            numbers = np.asarray(buffer_ids).tolist()
            steps = len(numbers) if isinstance(numbers, list) else 0
            if not steps or numbers != [0] * steps:
                raise RingError(
                    f"buffer_ids of a buffer of one ring must be [0], or a 0 for each row, got {buffer_ids}"
                )
        if self._ring is None:
            return self._table.add(held, steps, None if steps == 1 else np.zeros(steps, np.intp))
        found = self._table.add(held, steps, np.full(steps, self._ring), single=buffer_ids is None)
        return found[0] - self._start, found[1], found[2], found[3] - self._start

    def update(self, buffer: ReplayBuffer) -> Ints:
        """Move the steps of another buffer here, oldest first, ring by ring.

        The running episode is neither ended nor lengthened.

        Returns
        -------
        Array of the indices that they went to, in order.

        Raises
        ------
        SampleBatchError
            As `add` does.
        """
        # One lock after the other: two buffers may be moved into each other.
        with buffer._table.lock:
            slots = buffer._slots(slice(None))
            if not len(slots) or not self.maxsize:
                return _zeros(0, _INTP)
            kept = slots[-self.maxsize :]
            rows, ring = given_rows(rows_at(buffer._table, kept, 1)), buffer._table.rings.ring_of(kept)
        gaps = np.flatnonzero(ring[1:] != ring[:-1])
        with self._table.lock:
            return self._table.append(self._ring or 0, rows, len(slots), gaps) - self._start

    def reset(self, keep_statistics: bool = False) -> None:
        """Empty the buffer. The rows stay in memory until they are written over.

        Parameters
        ----------
        keep_statistics
            Whether the running episodes go on, though their steps are gone.
        """
        with self._table.lock:
            self._table.reset(None if self._ring is None else [self._ring], keep_statistics=keep_statistics)

    # Sampling

    def sample(self, batch_size: int | None, *, n_step: int | None = None, gamma: float = 0.99) -> tuple[Batch, Ints]:
        """Draw rows; see `sample_indices`.

        Parameters
        ----------
        batch_size
            How many, as `sample_indices` takes it.
        n_step
            The most steps that each row stands for. The rows then have two columns more: `returns`, the discounted sum
            of the rewards of up to so many steps of the episode, and `discount`, by which an estimate at `obs_next`,
            now the observation after the last of them, is to be multiplied: `gamma` to the number of the steps, or 0
            where the last is terminated. None: each row is a step.
        gamma
            The discount of a step.

        Returns
        -------
        batch
            The rows, as `buf[indices]` gives them.
        indices
            Where they are.

        Raises
        ------
        EmptyBufferError
            If there is no row to draw from.
        ArgumentError
            If `batch_size` is no whole number, `n_step` none from 1 on, or `gamma` none from 0 to 1. Nothing is drawn
            then.
        ColumnNotFoundError
            If rows are to stand for several steps, and have no next observations. Nothing is drawn then.

        Examples
        --------
        >>> buf = ReplayBuffer(8)
        >>> for i in range(5):
        ...     added = buf.add(Batch(obs=i, act=0, rew=1.0, terminated=i == 4, truncated=False, obs_next=i + 1))
        >>> batch, indices = buf.sample(0, n_step=3, gamma=0.5)
        >>> batch.returns, batch.discount, batch.obs_next
        (array([1.75, 1.75, 1.75, 1.5 , 1.  ]), array([0.125, 0.125, 0.   , 0.   , 0.   ]), array([3, 4, 5, 5, 5]))
        """
        with self._table.lock:
            check_window(self._table, n_step, gamma)
            slots = self._drawn(batch_size)
            rows = self._rows(slots)
            if n_step is not None:
                rows.__dict__.update(nstep_columns(self._table, slots, n_step, gamma, self.stack_num))
        return rows, slots - self._start if self._start else slots

    def sample_indices(self, batch_size: int | None) -> Ints:
        """Draw indices of rows with replacement.

        Parameters
        ----------
        batch_size
            How many; 0 for all in time order, None for all in random order, a negative number for none.

        Raises
        ------
        EmptyBufferError
            If there is no row to draw from.
        ArgumentError
            If `batch_size` is no whole number.
        """
        with self._table.lock:
            return self._drawn(batch_size) - self._start

    def _drawn(self, batch_size: int | None) -> Ints:
        if batch_size is not None:
            batch_size = whole("batch_size", batch_size, None)
        frames = self.stack_num if self.options["sample_avail"] else 1
        if batch_size is not None and batch_size > 0:
            sampler = self._sampler
            if type(sampler) is Uniform:
                sampler.frames = frames
            return sampler.draw(self._table, self._ring, batch_size, self._rng)
        if batch_size is not None and batch_size < 0:
            return _zeros(0, _INTP)
        every = whole_stacks(self._table, self._ring, frames)
        return every if batch_size == 0 else self._rng.permutation(every)

    def minibatches(
        self, batch_size: int, *, epochs: int = 1, shuffle: bool = True, drop_last: bool = False
    ) -> Iterator[tuple[Batch, Ints]]:
        """Go over all rows in batches, each row once an epoch.

        Parameters
        ----------
        batch_size
            Rows in a batch.
        epochs
            How often to go over the rows.
        shuffle
            Whether to draw a new order for each epoch; otherwise they come in time order.
        drop_last
            Whether to leave out a last batch with fewer rows.

        Yields
        ------
        The rows and their indices, as `sample` returns them.

        Raises
        ------
        ArgumentError
            If `batch_size` is no whole number from 1 on, or `epochs` none from 0 on.

        Examples
        --------
        >>> buf = ReplayBuffer(8)
        >>> for i in range(5):
        ...     added = buf.add(Batch(obs=i, act=0, rew=0, terminated=False, truncated=False))
        >>> [batch.obs.tolist() for batch, _ in buf.minibatches(2, shuffle=False)]
        [[0, 1], [2, 3], [4]]
        """
        whole("batch_size", batch_size, 1)
        for _ in range(whole("epochs", epochs)):
            every = self.sample_indices(None if shuffle else 0)
            for start in range(0, len(every), batch_size):
                indices = every[start : start + batch_size]
                if len(indices) == batch_size or not drop_last:
                    yield self[indices], indices

    def split(
        self, size: int, shuffle: bool = True, merge_last: bool = False, *, rng: np.random.Generator | None = None
    ) -> Iterator[Batch]:
        """Go over all rows in batches of a size; see `Batch.split`. The order is the buffer's own draw by default."""
        rows: Batch = self[:]
        return rows.split(size, shuffle, merge_last, rng=self._rng if rng is None else rng)

    # Carrying on elsewhere

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in self.__dict__.items() if name not in _BOUND}
        with self._table.lock:
            slots = self._table.rings.stored() if self._ring is None else self._start + np.arange(len(self))
            # So that a copy in memory, too, draws from a generator of its own.
            own["_rng"] = copy.deepcopy(self._rng)
            return own | {
                "table": self._table.state(self._ring),
                "sampler": (type(self._sampler), self._sampler.live(slots)),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = dict(state)
        self._table = table = Table.of(own.pop("table"))
        kind, known = own.pop("sampler")
        self.__dict__.update(own)
        self._use(kind.revived(table.rings.capacity, table.rings.stored(), known))


_BOUND = frozenset(("_table", "_ring", "_start", "_sampler", "_folder", "_committed"))
"""What a buffer is bound to, and does not take along."""
