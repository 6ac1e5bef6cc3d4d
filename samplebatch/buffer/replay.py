"""ReplayBuffer: a ring buffer of the newest steps of an environment, to be sampled from."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import choice, whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.buffer.extending import add_steps, is_dataset, steps_of
from samplebatch.buffer.gather import ORDER, rows_at
from samplebatch.buffer.null_rows import drop_null_rows
from samplebatch.buffer.ring import Added, Ints
from samplebatch.buffer.samplers import Sampler, Uniform
from samplebatch.buffer.saved_rows import SavedRows
from samplebatch.buffer.stores import OBSERVATIONS, Stores, names_of
from samplebatch.buffer.table import Table
from samplebatch.buffer.writing import drop_empty, step_values
from samplebatch.errors import ArgumentError, ColumnMismatchError, RingError

_INTP = np.dtype(np.intp)
_zeros = np.zeros
_MAX_SIZE = 1 << 47
"""Steps of which a byte each would fill the address space of a process."""


class ReplayBuffer(SavedRows):
    """A ring buffer of the newest steps of an environment, filled by collectors and sampled by learners.

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
    reward_dtype
        The dtype of rewards, n-step returns and discounts in the rows that are read: `"float32"` for learners that
        compute in it. They are kept and summed up in float64, in which `buf.rew` shows them.
    storage
        A new folder to keep the rows in, mapped from files, so that they need not fit into memory and outlive the
        process; `open` opens it again. They must be numbers of one shape then.

    Raises
    ------
    ArgumentError
        If `size` is no whole number from 0 to 2**47, `stack_num` none from 1 on, or `reward_dtype` another dtype.

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
    _rng: np.random.Generator

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
        reward_dtype: Literal["float32", "float64"] = "float64",
        storage: str | os.PathLike[str] | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "stack_num": stack_num,
            "ignore_obs_next": ignore_obs_next,
            "save_only_last_obs": save_only_last_obs,
            "sample_avail": sample_avail,
        }
        single = choice("reward_dtype", reward_dtype, ("float32", "float64")) == "float32"
        extras = {"compress": compress, "ragged": ragged, "reward_dtype": reward_dtype if single else ""}
        options |= {name: value for name, value in extras.items() if value}
        self._set_up([size], options, random_seed)
        self._keep_in(storage)

    def _set_up(self, maxsizes: Sequence[int], options: Mapping[str, Any], random_seed: int) -> None:
        """Make rings of such sizes, empty."""
        sizes = [whole("size", size) for size in maxsizes]
        if sum(sizes) > _MAX_SIZE:
            raise ArgumentError(f"size must be at most {_MAX_SIZE}, got {sum(sizes)}")
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
        self._table.forget_fast_add()

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
            rows = None if buffer_ids is None else _count_steps(buffer_ids)
            if type(batch) is Batch and not columns and self._ring is None and rows in (None, 1):
                held = batch.__dict__
                added = None if table.fast_add is None else table.fast_add(held)
                if added is None:
                    added = table.add(held, 1, single=rows is None)
                    table.compile_fast_add(held, rows)
                return added
            return self._add(step_values(batch, columns), rows)

    def _add(self, held: dict[str, Any], rows: int | None) -> Added:
        """Add rows, or a step without a leading axis, to the only ring, or to the one that this buffer is."""
        steps, single = rows or 1, rows is None
        if self._ring is None:
            return self._table.add(held, steps, None if steps == 1 else np.zeros(steps, np.intp), single=single)
        found = self._table.add(held, steps, np.full(steps, self._ring), single=single)
        return found[0] - self._start, found[1], found[2], found[3] - self._start

    def extend(self, batch: Any) -> Ints:
        """Add all steps of a `SampleBatch`, `MultiAgentBatch`, `Batch`, mapping, Arrow table or `Dataset`.

        RLlib's names of columns become the buffer's. The steps of each agent go in one after the other, by `eps_id`,
        `agent_index` and `t` where these are there, and go on with the ring's newest step if they follow it. Steps that
        end in mid-episode before others come to the same ring count as truncated. Of several rings, the one by `env_id`
        takes a row; without that column, whole episodes go to the rings in turn.

        Returns
        -------
        Array of the indices that the rows went to, in the batch's order or that of the dataset's episodes, shape (n,).

        Raises
        ------
        ColumnTypeError, ColumnMismatchError, SequenceError
            If it is no batch, policies differ in their columns, or rows come as sequences.
        RingError
            If it cannot be told which ring a row is for.
        SampleBatchError
            As `add` does.

        Examples
        --------
        >>> from samplebatch import ReplayBuffer, SampleBatch
        >>> buf = ReplayBuffer(8)
        >>> buf.extend(SampleBatch(obs=[0, 1], actions=[1, 0], rewards=[0.5, 1.0], terminateds=[False, True]))
        array([0, 1])
        """
        if is_dataset(batch):
            return np.concatenate([_zeros(0, _INTP), *map(self.extend, batch.iter_episodes())])
        held, count = steps_of(batch)
        with self._table.lock:
            return add_steps(self, held, count) if count else _zeros(0, _INTP)

    def add_from(self, dataset: Any) -> int:
        """Add all steps of a `Dataset` as `extend` does, and return how many there were.

        Episodes are put together from the fragments in which they were appended; no more than one is in memory.

        Raises
        ------
        SampleBatchError
            As `extend` and `Dataset.iter_episodes` do.
        """
        return len(self.extend(dataset))

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
            rows, ring = drop_empty(rows_at(buffer._table, kept, 1)), buffer._table.rings.ring_of(kept)
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

    # Filling

    def set_batch(self, batch: Batch | Mapping[str, Any]) -> None:
        """Put rows into all slots; which of them count stays as it is.

        Parameters
        ----------
        batch
            Rows for every slot, `maxsize` of them, under the usual names.

        Raises
        ------
        ColumnMismatchError
            If there are other names.
        ColumnLengthError, ColumnTypeError
            If the rows are not as many as the slots, or a column cannot hold them; names it. Nothing has changed then.
        """
        held = step_values(batch, {})
        unknown = [name for name in held if name not in ORDER]
        if unknown:
            raise ColumnMismatchError(
                f"rows must have the usual names, got {unknown[0]!r}; there are {', '.join(ORDER)}"
            )
        with self._table.lock:
            self._table.fill(held, self._start, self._start + self.maxsize)

    def set_array_at_key(self, seq: Any, key: str, index: Any = None, default_value: float | None = None) -> None:
        """Put values into one column.

        Parameters
        ----------
        seq
            The values; as many as slots, or as the index asks for.
        key
            The column's name, which may be new.
        index
            As between brackets; None for all slots.
        default_value
            The value of the other slots of a new column; None for the missing value of its dtype, NaN, False or None.

        Raises
        ------
        ColumnLengthError, ColumnMismatchError, ColumnTypeError
            If the column cannot take the values, or there is no default and its dtype has no missing value; names it.
            Nothing has changed then.
        RowIndexError
            If an index lies outside.
        """
        slots = np.arange(self._start, self._start + self.maxsize) if index is None else self._slots(index).reshape(-1)
        with self._table.lock:
            self._table.set_column(key, seq, slots, default_value)

    @classmethod
    def from_data(
        cls,
        obs: Any,
        act: Any,
        rew: Any,
        terminated: Any,
        truncated: Any,
        done: Any,
        obs_next: Any,
        **options: Any,
    ) -> Self:
        """Make a full buffer of rows that are there already, in time order, such as those of a data set.

        Arrays that lie as columns do are kept, not copied: adding steps later overwrites them. Options are those of the
        class, the size aside.

        Raises
        ------
        ColumnLengthError, ColumnTypeError
            If a column has not as many rows as `obs`, or is nothing that can be stored; names it.

        Examples
        --------
        >>> from samplebatch import ReplayBuffer
        >>> obs, flags, never = np.arange(3), np.array([False, False, True]), np.zeros(3, bool)
        >>> buf = ReplayBuffer.from_data(obs, np.zeros(3), np.ones(3), flags, never, flags, obs + 1)
        >>> len(buf), buf.next([0, 1, 2])
        (3, array([1, 2, 2]))
        """
        rows = {"obs": obs, "act": act, "rew": rew, "terminated": terminated, "truncated": truncated}
        size = len(obs)
        buffer = cls(size, **options)
        if size:
            held = {name: value if name == "obs" else np.asarray(value) for name, value in rows.items()}
            held |= {"done": np.asarray(done), "obs_next": obs_next}
            buffer._table.fill(step_values(held, {}), 0, size, keep=True)
            buffer._sampler.on_add(buffer._table.rings.append(0, size))
        return buffer

    def dropnull(self) -> None:
        """Remove all rows in which anything is NaN, NaT or None; the others move together, in time order.

        Columns of objects that are numbers then become columns of numbers.
        """
        with self._table.lock:
            drop_null_rows(self._table, self._sampler, self._ring)

    # Pickles and copies

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in self.__dict__.items() if name not in _BOUND}
        with self._table.lock:
            slots = self._table.rings.stored_slots() if self._ring is None else self._start + np.arange(len(self))
            # So that a copy in memory, too, draws from a generator of its own.
            own["_rng"] = copy.deepcopy(self._rng)
            return own | {
                "table": self._table.state_dict(self._ring),
                "sampler": (type(self._sampler), self._sampler.state_dict(slots)),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = dict(state)
        self._table = table = Table.from_state_dict(own.pop("table"))
        kind, known = own.pop("sampler")
        self.__dict__.update(own)
        self._use(kind.from_state_dict(table.rings.capacity, table.rings.stored_slots(), known))


_BOUND = frozenset(("_table", "_ring", "_start", "_sampler"))
"""Attributes that a pickle does not hold, or holds in another form."""


def _count_steps(buffer_ids: Any) -> int:
    """Return how many steps the ids of a buffer of one ring are for."""
    numbers = buffer_ids if type(buffer_ids) is list else np.asarray(buffer_ids).tolist()
    if not isinstance(numbers, list) or not numbers or numbers != [0] * len(numbers):
        raise RingError(f"buffer_ids of a buffer of one ring must be [0], or a 0 for each row, got {buffer_ids}")
    return len(numbers)
