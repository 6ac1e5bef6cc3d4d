"""Replay buffer of one environment: a ring buffer of the newest steps."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Never, Self

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import choice, suggest_names, whole
from samplebatch.batch import summary
from samplebatch.batch.action_unit import ActionUnit, common_unit
from samplebatch.batch.delivery import Delivery
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.conversions import as_sample_batch
from samplebatch.batch.nested.node import format_tree, node, set_unit
from samplebatch.batch.nested.values import any_null, nulls
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer import gather, views
from samplebatch.buffer.columns import first_row
from samplebatch.buffer.extending import add_steps, is_dataset, steps_of
from samplebatch.buffer.ring import Added, Flags, Ints, Rings
from samplebatch.buffer.samplers import Sample, Sampler, Uniform, complete_stacks, convert_sample, draw_limited
from samplebatch.buffer.sequences import check_sequences, draw_episodes, draw_stretches, sequence_rows
from samplebatch.buffer.stores import OBSERVATIONS, Stores, names_of
from samplebatch.buffer.table import Journal, Table
from samplebatch.buffer.writing import count_steps, drop_empty, step_values
from samplebatch.errors import ArgumentError, ColumnMismatchError, ColumnNotFoundError, RingError, no_such_column

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc

    from samplebatch.batch.delivery import Device, Floats

_INTP = np.dtype(np.intp)
_ndarray = np.ndarray
_zeros = np.zeros

_MAX_SIZE = 1 << 47
"""Number of steps that fills a process's address space with one byte per step."""

_MAX_PRINTED = 20
"""Maximum number of slots of a buffer whose repr includes column values."""

_GAMMA = 0.99


class ReplayBuffer:
    """Ring buffer of the newest steps of an environment, filled by collectors and sampled by learners.

    Steps are added as a `Batch` of `obs`, `act`, `rew`, `terminated`, `truncated` and, optionally, `obs_next`, `info`,
    `policy` and other names; `done` is computed. The first step determines dtypes and shapes of rows. A new column
    contains zeros or None in earlier rows. `buf.obs` is a view of all slots, if possible; `buf[...]` copies rows.

    The buffer is thread-safe: each call holds a lock. Added steps change views, such as `buf.obs`, but not copies.

    Parameters
    ----------
    size
        Capacity in steps.
    stack_num
        Number of consecutive steps of an episode that are stacked when observations, info and policy are read.
    ignore_obs_next
        Whether to read next observations from the following step; final observations are stored separately.
    save_only_last_obs
        Whether to store only the last frame of stacked observations.
    sample_avail
        Whether to sample only rows whose stack of frames is complete.
    random_seed
        Seed of the buffer's generator.
    compress
        Names of columns to compress with LZ4, for example images; True compresses observations. A name includes nested
        columns. Except for `obs_next`, `info` and `policy`, the first step must contain the named columns.
    ragged
        Names of columns whose rows vary in shape; observations that are object arrays of arrays are detected.
    reward_dtype
        Dtype of rewards, n-step returns and discounts in rows that are read. Rewards are stored and summed in float64.
    raise_on_nan
        Whether to reject a step with NaN in a floating-point column before storing any of its values.
    storage
        New folder for memory-mapped rows; columns must be numeric, with rows of equal shape. `open` reopens the folder.

    Raises
    ------
    ArgumentError
        If `size` is not an integer from 0 to 2**47, `stack_num` is less than 1, or `reward_dtype` is not supported.
    StorageError
        If the folder is not empty, or cannot store compressed or ragged rows.

    Attributes
    ----------
    maxsize, options
        Capacity in steps, and the arguments as a dict.

    Examples
    --------
    >>> buf = ReplayBuffer(size=4)
    >>> for i in range(6):
    ...     added = buf.add(Batch(obs=i, act=i, rew=1.0, terminated=i == 3, truncated=False))
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

    maxsize: int
    options: dict[str, Any]
    _table: Table
    _sampler: Sampler
    _rng: np.random.Generator
    _seed: int
    # For a part of a buffer: its ring in the table, and the first slot.
    _ring: int | None = None
    _start = 0

    obs = views.StepColumn()
    act = views.StepColumn()
    rew = views.StepColumn()
    terminated = views.StepColumn()
    truncated = views.StepColumn()
    done = views.StepColumn()
    obs_next = views.StepColumn()
    info = views.StepColumn()
    policy = views.StepColumn()

    @suggest_names(capacity="size", maxsize="size", buffer_size="size")
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
        raise_on_nan: bool = False,
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
        extras["raise_on_nan"] = bool(raise_on_nan)
        options |= {name: value for name, value in extras.items() if value}
        self._set_up([size], options, random_seed)
        self._keep_in(storage)

    def _set_up(self, maxsizes: Sequence[int], options: Mapping[str, Any], random_seed: int) -> None:
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
        self._sampler = sampler
        self._table.listener = sampler if sampler.listens else None
        self._table.raise_on_nan = bool(self.options.get("raise_on_nan", False))
        self._table.forget_fast_add()

    def _keep_in(self, storage: str | os.PathLike[str] | None) -> None:
        if storage is not None:
            from samplebatch.storage import store_in_folder

            store_in_folder(self, storage)

    @property
    def stack_num(self) -> int:
        """Number of consecutive steps that are stacked when observations, info and policy are read; settable."""
        return self.__dict__["stack_num"]  # type: ignore[no-any-return]

    @stack_num.setter
    def stack_num(self, value: int) -> None:
        self.__dict__["stack_num"] = whole("stack_num", value, 1)

    @property
    def action_unit(self) -> ActionUnit | None:
        """Unit of the rows' actions: the environment's, or a policy's with a mapping to it; None if unknown.

        Collectors and `extend` set this unit; saved files, states and samples contain the unit.
        """
        return self._table.action_unit

    @action_unit.setter
    def action_unit(self, unit: ActionUnit | None) -> None:
        self._table.action_unit = unit

    def _merge_action_unit(self, unit: ActionUnit | None) -> None:
        """Set the action unit of new rows; raises ColumnMismatchError if the unit of stored rows is different."""
        table = self._table
        if unit is table.action_unit or unit is None:
            return
        table.action_unit = common_unit([table.action_unit, unit]) if len(table.rings) else unit

    @property
    def nbytes(self) -> int:
        """Size of all columns in bytes; in a part of a vector buffer, the size of the entire buffer."""
        return gather.nbytes_of(self._table)

    # Adding

    def add(
        self,
        batch: Batch | Mapping[str, Any] | None = None,
        buffer_ids: npt.NDArray[Any] | Sequence[int] | None = None,
        *more: Never,
        **columns: Any,
    ) -> Added:
        """Add a step.

        Parameters
        ----------
        batch
            Values by name, or values as keyword arguments. Without other end flags, `done` is used as `terminated`.
        buffer_ids
            k zeros if the values have a leading axis of k successive steps; None for a single step without this axis.

        Returns
        -------
        tuple
            Four arrays of length 1 or k: index of each step; return and length of the episode that the step ended, or
            0; and index of the first step of the step's episode. If no episode ended, only the first array is writable.

        Raises
        ------
        ColumnNotFoundError, ColumnLengthError, ColumnMismatchError, ColumnTypeError
            If a required column is missing, or a column cannot store its value exactly. An error changes nothing.
        ArgumentError, RingError
            If the first step lacks a column named in `compress` or `ragged`; if `buffer_ids` is invalid, or the buffer
            has no slots; if values are passed by position.
        """
        if more:
            raise views.values_by_position(len(more) + 2)
        table = self._table
        with table.lock:
            unit = getattr(batch, "_action_unit", None)
            if unit is not table.action_unit:
                self._merge_action_unit(unit)
            rows = None if buffer_ids is None else count_steps(buffer_ids)
            if type(batch) is Batch and not columns and self._ring is None and rows in (None, 1):
                values = batch.__dict__
                added = None if table.fast_add is None else table.fast_add(values)
                if added is None:
                    added = table.add(values, 1, single=rows is None)
                    table.compile_fast_add(values, rows)
                return added
            return self._add(step_values(batch, columns), rows)

    def _add(self, values: dict[str, Any], rows: int | None) -> Added:
        steps, single = rows or 1, rows is None
        if self._ring is None:
            return self._table.add(values, steps, None if steps == 1 else np.zeros(steps, np.intp), single=single)
        added = self._table.add(values, steps, np.full(steps, self._ring), single=single)
        return added[0] - self._start, added[1], added[2], added[3] - self._start

    def extend(self, batch: Any) -> Ints:
        """Add all steps of a `SampleBatch`, `MultiAgentBatch`, `Batch`, mapping, Arrow table or `Dataset`.

        RLlib's column names are translated. The steps are sorted by the columns `eps_id`, `agent_index` and `t`, if
        these columns exist. Steps that follow the newest step of a ring's running episode continue the episode. An
        episode that is interrupted by another episode in its ring is truncated. `env_id` selects the ring of each step;
        without that column, episodes are assigned to rings in turn. Episodes of a dataset are assembled one at a time.

        Returns
        -------
        Indices of the rows in the order of the batch, or of the dataset's episodes, shape (n,).

        Raises
        ------
        ColumnTypeError, ColumnMismatchError, SequenceError, RingError
            If `batch` is not a batch, policies have different columns, the unit of actions differs from the buffer's
            unit, rows are sequences, or a row's ring is unknown; or as in `add` and `Dataset.iter_episodes`.

        Examples
        --------
        >>> steps = SampleBatch(
        ...     obs=[0, 1], actions=[1, 0], rewards=[0.5, 1.0], terminateds=[False, True]
        ... )
        >>> ReplayBuffer(8).extend(steps)
        array([0, 1])
        """
        if is_dataset(batch):
            return np.concatenate([_zeros(0, _INTP), *map(self.extend, batch.iter_episodes())])
        steps, count, unit = steps_of(batch)
        with self._table.lock:
            if not count:
                return _zeros(0, _INTP)
            previous_unit = self._table.action_unit
            self._merge_action_unit(unit)
            try:
                return add_steps(self, steps, count)
            except BaseException:
                self._table.action_unit = previous_unit
                raise

    def update(self, buffer: ReplayBuffer) -> Ints:
        """Add another buffer's steps, oldest first per ring; return the steps' indices. Raises the errors of `add`."""
        # The locks are held in turn: two threads may copy between the same buffers in both directions.
        with buffer._table.lock:
            slots = views.slots_of(buffer, slice(None))
            if not len(slots) or not self.maxsize:
                return _zeros(0, _INTP)
            slots_to_copy, unit = slots[-self.maxsize :], buffer.action_unit
            rows, ring = (
                drop_empty(gather.rows_at(buffer._table, slots_to_copy, 1)),
                buffer._table.rings.ring_of(slots_to_copy),
            )
        gaps = np.flatnonzero(ring[1:] != ring[:-1])
        with self._table.lock:
            self._merge_action_unit(unit)
            return self._table.append(self._ring or 0, rows, len(slots), gaps) - self._start

    def reset(self, keep_statistics: bool = False) -> None:
        """Empty the buffer; with `keep_statistics`, preserve the returns and lengths of running episodes."""
        with self._table.lock:
            self._table.reset(None if self._ring is None else [self._ring], keep_statistics=keep_statistics)

    # Sampling

    def sample(
        self,
        batch_size: int | None = views.REQUIRED,
        *more: Never,
        n_step: int | None = None,
        gamma: float = _GAMMA,
        max_age: int | None = None,
        once: bool = False,
        device: Device | None = None,
        floats: Floats | None = None,
        **unknown: Never,
    ) -> Sample[Batch, Ints]:
        """Sample rows; see `sample_indices`.

        Parameters
        ----------
        batch_size
            Number of rows, as in `sample_indices`.
        n_step
            Maximum number of steps per row; None for single steps. An integer adds `returns`, the discounted sum of up
            to `n_step` rewards of the episode, and `discount`, the factor of the bootstrap value at `obs_next` (after
            the last step). `discount` is `gamma` to the number of steps, or 0 if the last step is terminated.
        gamma
            Discount per step.
        max_age
            Number of newest rows per ring from which to sample; None samples from all rows.
        once
            Whether to sample without replacement; each row is sampled at most once until it is overwritten. If fewer
            than `batch_size` rows remain, the remaining rows are returned. The column `sampled` marks sampled rows.
        device
            Device of tensors; None for arrays. Ragged rows become an array of tensors; other objects are unchanged.
        floats
            Torch or NumPy dtype of floating-point columns, or its name; None preserves each dtype.

        Returns
        -------
        Sample
            The rows as in `buf[indices]`, or as tensors, and their indices; unpacks as `batch, indices`.

        Raises
        ------
        EmptyBufferError, ArgumentError, DeviceError, ColumnNotFoundError
            If there are no rows to sample; if an argument is out of range or unknown; if torch cannot use the device;
            if `n_step` requires next observations and the rows do not have them. No rows are sampled.

        Examples
        --------
        >>> buf = ReplayBuffer(8)
        >>> for i in range(5):
        ...     added = buf.add(
        ...         Batch(obs=i, act=0, rew=1.0, terminated=i == 4, truncated=False, obs_next=i + 1)
        ...     )
        >>> batch, indices = buf.sample(0, n_step=3, gamma=0.5)
        >>> batch.returns, batch.discount, batch.obs_next
        (array([1.75, 1.75, 1.75, 1.5 , 1.  ]), array([0.125, 0.125, 0.   , 0.   , 0.   ]),
         array([3, 4, 5, 5, 5]))
        """
        if more or unknown or batch_size is views.REQUIRED:
            raise views.arguments_of_sample(more, unknown)
        limits = None if max_age is None and not once else (max_age, once)
        if device is not None or floats is not None:
            delivery = Delivery(device, floats)
            return delivery.one(self._sample(batch_size, n_step, gamma, limits), convert_sample)
        return self._sample(batch_size, n_step, gamma, limits)

    def _sample(
        self, batch_size: int | None, n_step: int | None, gamma: float, limits: tuple[int | None, bool] | None
    ) -> Sample[Batch, Ints]:
        with self._table.lock:
            if n_step is not None or gamma != _GAMMA:
                gather.check_window(self._table, n_step, gamma)
            slots = self._draw(batch_size, limits)
            rows = self._rows(slots)
            if n_step is not None:
                rows.__dict__.update(self._nstep_columns(slots, n_step, gamma))
        return Sample(rows, slots - self._start if self._start else slots)

    def sample_indices(self, batch_size: int | None) -> Ints:
        """Sample indices of rows with replacement.

        Parameters
        ----------
        batch_size
            Number of rows. 0: all rows in time order; None: all rows in random order; negative: no rows. Raises
            EmptyBufferError if there are no rows, ArgumentError if `batch_size` is neither None nor an integer.
        """
        with self._table.lock:
            return self._draw(batch_size) - self._start

    def _draw(self, batch_size: int | None, limits: tuple[int | None, bool] | None = None) -> Ints:
        if batch_size is not None and type(batch_size) is not int:
            batch_size = whole("batch_size", batch_size, None)
        frames = self.stack_num if self.options["sample_avail"] else 1
        if limits is not None:
            max_age, once = limits
            return draw_limited(self._table, self._ring, self._sampler, batch_size, self._rng, max_age, once, frames)
        if batch_size is not None and batch_size > 0:
            sampler = self._sampler
            if type(sampler) is Uniform:
                sampler.frames = frames
            return sampler.draw(self._table, self._ring, batch_size, self._rng)
        if batch_size is not None and batch_size < 0:
            return _zeros(0, _INTP)
        every = complete_stacks(self._table, self._ring, frames)
        return every if batch_size == 0 else self._rng.permutation(every)

    @suggest_names(minibatch_size="batch_size", size="batch_size")
    def minibatches(
        self,
        batch_size: int,
        *,
        epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        device: Device | None = None,
        floats: Floats | None = None,
        prefetch: int = 0,
    ) -> Iterator[Sample[Batch, Ints]]:
        """Iterate over all rows in minibatches of type `Sample`; each row is returned once per epoch.

        Parameters
        ----------
        batch_size, epochs
            Number of rows per minibatch, and number of epochs.
        shuffle, drop_last
            Whether to shuffle rows in each epoch instead of using time order; whether to omit a partial last minibatch.
        device, floats
            As in `sample`.
        prefetch
            Number of minibatches to prepare ahead; copies to a GPU run concurrently, from page-locked memory.

        Raises
        ------
        ArgumentError, DeviceError
            If `batch_size` is less than 1, or `epochs` or `prefetch` is less than 0; if `floats` is not a
            floating-point dtype; if `prefetch` is used without a device; if torch cannot use the device.

        Examples
        --------
        >>> buf = ReplayBuffer(8)
        >>> for i in range(5):
        ...     added = buf.add(Batch(obs=i, act=0, rew=0, terminated=False, truncated=False))
        >>> [batch.obs.tolist() for batch, _ in buf.minibatches(2, shuffle=False)]
        [[0, 1], [2, 3], [4]]
        """
        whole("batch_size", batch_size, 1)
        whole("epochs", epochs)
        delivery = Delivery(device, floats, prefetch)
        return delivery.each(self._minibatches(batch_size, epochs, shuffle, drop_last), convert_sample)

    def _minibatches(
        self, batch_size: int, epochs: int, shuffle: bool, drop_last: bool
    ) -> Iterator[Sample[Batch, Ints]]:
        for _ in range(epochs):
            every = self.sample_indices(None if shuffle else 0)
            for start in range(0, len(every), batch_size):
                indices = every[start : start + batch_size]
                if len(indices) == batch_size or not drop_last:
                    yield Sample(self[indices], indices)

    def split(
        self, size: int, shuffle: bool = True, merge_last: bool = False, *, seed: int | None = None
    ) -> Iterator[Batch]:
        """Iterate over all rows in batches; see `Batch.split`. By default, the buffer's generator shuffles the rows."""
        rows: Batch = self[:]
        return rows.split(size, shuffle, merge_last, rng=self._rng if seed is None else np.random.default_rng(seed))

    def sample_episodes(
        self, n: int | None, *, unfinished: bool = False, where: pc.Expression | None = None
    ) -> Sample[list[Batch], list[Ints]]:
        """Sample episodes uniformly with replacement; candidates are the episodes whose steps are all stored.

        Parameters
        ----------
        n
            Number of episodes. 0: all in time order, ring by ring; None: all in random order; negative: no episodes.
            Raises EmptyBufferError if there are no candidates, ArgumentError if `n` is neither None nor an integer.
        unfinished
            Whether running episodes are also candidates.
        where
            Arrow expression that selects episodes. The fields of the expression are `length`, `return` (the sum of
            rewards), `terminated` and `truncated` of the last step, and scalar columns of the first step under dotted
            names (`obs`, `policy.version`). Raises ColumnNotFoundError for other columns.

        Returns
        -------
        Sample
            One batch and one array of indices per episode, in time order; all batches are slices of one copy.

        Examples
        --------
        >>> buf = ReplayBuffer(8)
        >>> for i in range(7):
        ...     _ = buf.add(Batch(obs=i, act=0, rew=1.0, terminated=i in (2, 5), truncated=False))
        >>> episodes, indices = buf.sample_episodes(0)
        >>> [episode.obs.tolist() for episode in episodes], indices[1]
        ([[0, 1, 2], [3, 4, 5]], array([3, 4, 5]))
        """
        if n is not None:
            whole("n", n, None)
        with self._table.lock:
            slots, ends = draw_episodes(self._table, self._ring, n, self._rng, unfinished=unfinished, where=where)
            if not len(slots):
                return Sample([], [])
            rows, indices = self._rows(slots), slots - self._start
        cuts = [slice(*pair) for pair in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
        return Sample([rows[cut] for cut in cuts], [indices[cut] for cut in cuts])

    def sample_sequences(
        self,
        batch_size: int | None,
        length: int,
        *,
        burn_in: int = 0,
        padded: bool = True,
        per_sequence: str | Iterable[str] = (),
        device: Device | None = None,
        floats: Floats | None = None,
    ) -> Sample[Batch, Ints]:
        """Sample steps and return one sequence per step; see `get_sequences`.

        Steps are sampled as in `sample`: uniformly, or by priority.

        Parameters
        ----------
        batch_size
            Number of sequences, as in `sample_indices`.
        length, burn_in, per_sequence
            As in `get_sequences`.
        padded
            Whether sequences may be shorter than `length`. If false, all runs of `length` steps within an episode are
            candidates; with priorities, the first step after burn-in determines a run's probability.
        device, floats
            As in `sample`. Raises the same errors as `get_sequences` and `sample`; after an error, no step is sampled.

        Examples
        --------
        >>> buf = ReplayBuffer(8)
        >>> for i in range(7):
        ...     added = buf.add(Batch(obs=i, act=0, rew=1.0, terminated=i == 3, truncated=False))
        >>> batch, indices = buf.sample_sequences(32, 3)
        >>> batch.obs.shape, bool((batch.obs == np.where(batch.mask, indices, 0)).all())
        ((32, 3), True)
        >>> np.unique(buf.sample_sequences(32, 3, padded=False)[0].obs, axis=0).tolist()
        [[0, 1, 2], [1, 2, 3], [4, 5, 6]]
        """
        delivery = Delivery(device, floats)
        with self._table.lock:
            check_sequences(self._table, length, burn_in, per_sequence)
            if padded or batch_size is None or batch_size < 1:
                slots = self._draw(batch_size)
            else:
                count = whole("batch_size", batch_size)
                slots = draw_stretches(self._table, self._ring, self._sampler, count, length, burn_in, self._rng)
            sequences = self._sequences(slots, length, burn_in, per_sequence)
        return delivery.one(sequences, convert_sample)

    def get_sequences(
        self, index: Any, length: int, *, burn_in: int = 0, per_sequence: str | Iterable[str] = ()
    ) -> Sample[Batch, Ints]:
        """Return one sequence per given step; no sequence crosses an episode end or the write cursor.

        A sequence has at most `length` steps: up to `burn_in` steps before the given step, the given step and later
        steps. Sequences of fewer steps are padded at the end with zeros or, in object columns, with None.

        Parameters
        ----------
        index
            Index of n steps, as in `buf[index]`.
        length
            Number of steps per sequence.
        burn_in
            Maximum number of steps before the given step, to warm up the state of a recurrent learner.
        per_sequence
            Names of columns with one row per sequence, such as initial states: rows of the first steps, shape (n, ...).

        Returns
        -------
        Sample
            The columns of `buf[...]`, shape (n, length, ...), and two columns of shape (n, length): `mask`, whether a
            step exists, and `burn_in`, whether the step only warms up the state. The columns `weight` and `generation`
            of a prioritized buffer have shape (n,) and refer to the given steps,
            `indices[range(n), batch.burn_in.sum(1)]`. Indices have shape (n, length), with -1 for padding.

        Raises
        ------
        ColumnMismatchError, RowIndexError
            If rows already have a column `mask` or `burn_in`; if an index is out of range.
        ArgumentError, SequenceError
            If `length` is less than 1, `burn_in` is less than 0 or not less than `length`, or a name is unknown.

        Examples
        --------
        >>> buf = ReplayBuffer(8)
        >>> for i in range(1, 8):
        ...     added = buf.add(Batch(obs=i, act=0, rew=1.0, terminated=i == 3, truncated=False))
        >>> batch, indices = buf.get_sequences([0, 2, 4], 4, burn_in=1)
        >>> batch.obs.tolist(), indices[1]
        ([[1, 2, 3, 0], [2, 3, 0, 0], [4, 5, 6, 7]], array([ 1,  2, -1, -1]))
        >>> batch.burn_in.sum(1), batch.mask.sum(1)
        (array([0, 1, 1]), array([3, 2, 4]))
        """
        with self._table.lock:
            return self._sequences(views.slots_of(self, index).reshape(-1), length, burn_in, per_sequence)

    def _sequences(self, start_slots: Ints, length: int, burn_in: int, per_sequence: Any = ()) -> Sample[Batch, Ints]:
        declared = check_sequences(self._table, length, burn_in, per_sequence)
        columns, slots = sequence_rows(self._table, start_slots, length, burn_in, self.stack_num, declared)
        columns["rew"] = self._cast_rewards(columns["rew"])
        columns.update(self._sampler.columns(self._table, start_slots))
        indices = np.where(slots < 0, slots, slots - self._start) if self._start else slots
        return Sample(self._with_unit(node(Batch, columns)), indices)

    # Rows

    def __len__(self) -> int:
        with self._table.lock:
            rings = self._table.rings
            return len(rings) if self._ring is None else int(rings.sizes_of_all()[self._ring])

    def __getattr__(self, name: str) -> Any:
        # Python calls this for additional columns, and while a buffer without a table is unpickled.
        if name.startswith("__") or "_table" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._show(name)

    def _show(self, name: str) -> Any:
        try:
            return gather.show_slots(self._table, name, self._start, self._start + self.maxsize)
        except KeyError:
            message = views.AbsentColumn(type(self).__name__, name, tuple(self._table.columns.tree))
            raise AttributeError(message) from None

    @property
    def _meta(self) -> Batch:
        """Columns of all slots as a batch, for Tianshou's algorithms; assigned columns are set in the buffer."""
        return views.stored_batch(self._table, self._start, self._start + self.maxsize, settable=self._ring is None)

    @_meta.setter
    def _meta(self, batch: Batch) -> None:
        views.set_columns(self._table if self._ring is None else None, batch)

    def __getitem__(self, index: Any) -> Any:
        """Copy the rows that a single index, a slice, or indices of any shape select.

        `buf[:]` returns all rows in time order, ring by ring. All other slices and indices refer to slots; see `latest`
        for the newest rows. Rows have `obs`, `act`, `rew`, `terminated`, `truncated`, `done`, `obs_next`, `info` and
        `policy` (empty if never added), followed by other columns. An array of indices may include empty slots.

        Raises
        ------
        ColumnNotFoundError, RowIndexError
            If nothing has been added; if an index is outside [-maxsize, maxsize), or a single index has no row.
        """
        if isinstance(index, str):
            tree = self._table.columns.tree
            if index not in tree:
                raise no_such_column(index, tree)
            return self._show(index)
        with self._table.lock:
            if type(index) is _ndarray and index.dtype == _INTP and index.ndim:
                return self._rows(views.slots_at(self, index))
            if "obs" not in self._table.columns.tree:
                # Checked before the index: NumPy detects the end of a sequence by IndexError.
                raise gather.nothing_added()
            if isinstance(index, slice):
                return self._read_slice(index)
            slots = views.slots_of(self, index)
            if slots.ndim:
                return self._rows(slots)
            return first_row(self._rows(views.require_row(self, slots)))

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over copies of the rows in time order, ring by ring."""
        with self._table.lock:
            indices = (views.slots_of(self, slice(None)) - self._start).tolist()
        for index in indices:
            yield self[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        # Otherwise NumPy would convert an array of buffers to an array of their rows.
        array = np.empty((), object)
        array[()] = self
        return array

    def get(self, index: Any, key: str, default_value: Any = None, stack_num: int | None = None) -> Any:
        """Copy one column of rows, stacked with preceding steps of the same episode, oldest first.

        Parameters
        ----------
        index, key
            Index of the rows, as in `buf[index]`, and name of the column.
        default_value
            Value to return if the column does not exist; if the value is None, ColumnNotFoundError is raised instead.
        stack_num
            Number of steps to stack; `buf.stack_num` if None. If `stack_num` is 1, the result has no stack axis.

        Raises
        ------
        ColumnNotFoundError, RowIndexError, ArgumentError
            If the column does not exist and `default_value` is None; if an index is out of range, or a single index has
            no row; if `stack_num` is not a positive integer.

        Examples
        --------
        >>> buf = ReplayBuffer(8)
        >>> for i in range(5):
        ...     added = buf.add(Batch(obs=i, act=0, rew=0, terminated=i == 1, truncated=False))
        >>> buf.get([1, 4], "obs", stack_num=3)
        array([[0, 0, 1],
               [2, 3, 4]])
        """
        stack = self.stack_num if stack_num is None else whole("stack_num", stack_num, 1)
        try:
            with self._table.lock:
                slots = views.slots_of(self, index)
                values = gather.column_at(
                    self._table, key, slots if slots.ndim else views.require_row(self, slots), stack
                )
        except ColumnNotFoundError:
            if default_value is None:
                raise
            return default_value
        if key == "rew":
            values = self._cast_rewards(values)
        return values if slots.ndim else first_row(values)

    def latest(self, n: int) -> Batch:
        """Copy the newest rows of each ring, at most n per ring, in time order."""
        whole("n", n)
        with self._table.lock:
            return self._rows(self._table.rings.newest(n, self._ring))

    def _read_slice(self, index: slice) -> Batch:
        ranges = views.ranges_of(self, index)
        if ranges is None:
            return self._rows(views.slots_of(self, index))
        columns = gather.rows_in(self._table, ranges, self.stack_num)
        columns["rew"] = self._cast_rewards(columns["rew"])
        if self._sampler.listens:
            columns.update(self._sampler.columns(self._table, gather.slots_in(ranges)))
        return self._with_unit(node(Batch, columns))

    def _rows(self, slots: Ints) -> Batch:
        # On the path of every sample: reads the value without its property, and skips absent features.
        columns = gather.rows_at(self._table, slots, self.__dict__["stack_num"])
        if "reward_dtype" in self.options:
            columns["rew"] = self._cast_rewards(columns["rew"])
        if type(self._sampler) is not Uniform:
            columns.update(self._sampler.columns(self._table, slots))
        return self._with_unit(node(Batch, columns))

    def _with_unit(self, rows: Batch) -> Batch:
        unit = self._table.action_unit
        if unit is not None:
            set_unit(rows, unit)
        return rows

    def _cast_rewards(self, values: Any) -> Any:
        """Cast rewards, returns or discounts to `reward_dtype`; return None unchanged."""
        dtype = self.options.get("reward_dtype")
        return values.astype(dtype, copy=False) if dtype and type(values) is _ndarray else values

    def _nstep_columns(self, slots: Ints, n_step: int, gamma: float) -> dict[str, Any]:
        columns = gather.nstep_columns(self._table, slots, n_step, gamma, self.stack_num)
        for name in ("returns", "discount"):
            columns[name] = self._cast_rewards(columns[name])
        return columns

    # Positions in rings and episodes

    @property
    def subbuffer_edges(self) -> Ints:
        """First slot of each ring, followed by the number of slots; shape (rings + 1,)."""
        if self._ring is not None:
            return np.array([0, self.maxsize], _INTP)
        return self._table.rings.edges.copy()

    @property
    def last_index(self) -> Ints:
        """Index of each ring's newest row, or the first index of an empty ring; shape (rings,)."""
        with self._table.lock:
            last = self._table.rings.last_index
        return last if self._ring is None else last[self._ring : self._ring + 1] - self._start

    def unfinished_index(self) -> Ints:
        """Return the index of the newest row of each ring with a running episode."""
        with self._table.lock:
            last = self._table.rings.unfinished(self._table.done)
        if self._ring is None:
            return last
        return last[(last >= self._start) & (last < self._start + self.maxsize)] - self._start

    def get_buffer_indices(self, start: int, stop: int) -> Ints:
        """Return the indices from `start` to `stop` (exclusive) within one ring, wrapping around at the ring's end.

        Raises RingError if the bounds are in different rings.

        Examples
        --------
        >>> from samplebatch import VectorReplayBuffer
        >>> VectorReplayBuffer(10, 2).get_buffer_indices(8, 7)
        array([8, 9, 5, 6])
        """
        if self._ring is None:
            return self._table.rings.interval(start, stop)
        if not (0 <= start <= self.maxsize and 0 <= stop <= self.maxsize):
            raise RingError(f"start and stop must be within one ring, got {start} and {stop}")
        return self._table.rings.interval(start + self._start, stop + self._start) - self._start

    def prev(self, index: Any) -> Any:
        """Return the index of the previous step in the episode; for the first step, return its own index.

        Raises RowIndexError if an index is out of bounds.
        """
        return views.neighbours(self, index, Rings.prev_within, Rings.prev)

    def next(self, index: Any) -> Any:
        """Return the index of the next step in the episode; for the last step, return its own index.

        Raises RowIndexError if an index is out of bounds.
        """
        return views.neighbours(self, index, Rings.next_within, Rings.next)

    # Changes of stored columns

    def set_batch(self, batch: Batch | Mapping[str, Any]) -> None:
        """Overwrite all slots with `maxsize` rows, passed by column name; the number of stored rows does not change.

        Raises
        ------
        ColumnMismatchError, ColumnLengthError, ColumnTypeError
            If names or the number of rows do not match the buffer, or a column cannot store its rows. An error changes
            nothing.
        """
        values = step_values(batch, {})
        unknown = [name for name in values if name not in gather.ORDER]
        if unknown:
            raise ColumnMismatchError(f"rows must have the usual names, {', '.join(gather.ORDER)}, got {unknown[0]!r}")
        with self._table.lock:
            self._table.fill(values, self._start, self._start + self.maxsize)

    def set_array_at_key(self, seq: Any, key: str, index: Any = None, default_value: float | None = None) -> None:
        """Set one value per slot, or per entry of `index`, in an existing or new column.

        In a new column, all other slots contain `default_value` or, if None, the missing value (NaN, False, None).

        Raises
        ------
        ColumnLengthError, ColumnMismatchError, ColumnTypeError, RowIndexError
            If the column cannot store the values, or the dtype of a new column has no missing value and no default is
            passed. If an index is out of range. An error changes nothing.
        """
        slots = (
            np.arange(self._start, self._start + self.maxsize)
            if index is None
            else views.slots_of(self, index).reshape(-1)
        )
        with self._table.lock:
            self._table.set_column(key, seq, slots, default_value)

    def update_rows(self, index: Any, generation: Any = None, **columns: Any) -> Flags:
        """Replace or add columns of stored rows, such as recomputed advantages; priorities are unchanged.

        Parameters
        ----------
        index
            Index of n rows, as in `buf[index]`. For duplicate rows, the last value wins.
        generation
            Result of `generation_of` at the time when the rows were read, shape (n,); rows that have since been
            overwritten are skipped. If None, every slot in `index` must have a row.
        **columns
            Values by name, with n rows each. A new column contains NaN, False or None in rows that are not updated.

        Returns
        -------
        Mask of the updated rows, shape (n,).

        Raises
        ------
        ColumnLengthError, ColumnMismatchError, ColumnTypeError, RowIndexError
            If a column does not have n rows, or cannot store the values. If an index is out of range, or if an index
            has no row and `generation` is None. An error changes nothing.

        Examples
        --------
        >>> buf = ReplayBuffer(4)
        >>> for i in range(3):
        ...     added = buf.add(Batch(obs=i, act=0, rew=0.0, terminated=False, truncated=False))
        >>> buf.update_rows([0, 2], buf.generation_of([0, 2]), advantage=[0.5, 1.5])
        array([ True,  True])
        >>> buf.advantage[:3]
        array([0.5, nan, 1.5])
        """
        slots = views.slots_of(self, index).reshape(-1)
        with self._table.lock:
            return views.update_rows(self, slots, generation, columns)

    def generation_of(self, index: Any) -> Ints:
        """Return how often each slot in `index` has been overwritten, in the shape of `index`; see `update_rows`."""
        with self._table.lock:
            return self._table.rings.generation(views.slots_of(self, index))

    @classmethod
    def from_data(
        cls, obs: Any, act: Any, rew: Any, terminated: Any, truncated: Any, done: Any, obs_next: Any, **options: Any
    ) -> Self:
        """Create a full buffer from rows in time order; `options` are the arguments of the class, except for the size.

        Contiguous arrays are not copied, so steps that are added later overwrite the values in these arrays. Raises
        ColumnLengthError or ColumnTypeError if a column does not have as many rows as `obs`, or cannot be stored.

        Examples
        --------
        >>> obs, flags, never = np.arange(3), np.array([False, False, True]), np.zeros(3, bool)
        >>> buf = ReplayBuffer.from_data(obs, np.zeros(3), np.ones(3), flags, never, flags, obs + 1)
        >>> len(buf), buf.next([0, 1, 2])
        (3, array([1, 2, 2]))
        """
        rows = {"obs": obs, "act": act, "rew": rew, "terminated": terminated, "truncated": truncated}
        size = len(obs)
        buffer = cls(size, **options)
        if size:
            values = {name: value if name == "obs" else np.asarray(value) for name, value in rows.items()}
            values |= {"done": np.asarray(done), "obs_next": obs_next}
            buffer._table.fill(step_values(values, {}), 0, size, keep=True)
            buffer._sampler.on_add(buffer._table.rings.append(0, size))
        return buffer

    def isnull(self) -> Batch:
        """Return a mask of the elements that are NaN, NaT or None, for all rows in slot order."""
        return nulls(self[: len(self)])  # type: ignore[return-value]

    def hasnull(self) -> bool:
        """Return whether any element of any row is NaN, NaT or None."""
        return bool(len(self)) and any_null(self[: len(self)])

    def dropnull(self) -> None:
        """Remove all rows with NaN, NaT or None; object columns with only numbers become numeric."""
        table = self._table
        with table.lock:
            for ring in range(table.rings.n) if self._ring is None else (self._ring,):
                views.drop_null_rows(table, ring, self._sampler)
            if table.columns.narrow(table.rings.stored_slots()):
                table.forget_fast_add()

    # Display and tables

    def __repr__(self) -> str:
        if not len(self):
            return f"{type(self).__name__}()"
        if self.maxsize > _MAX_PRINTED:
            return summary.as_text(*views.summarize(self))
        with self._table.lock:
            return format_tree(self._meta, type(self).__name__)

    def _repr_html_(self) -> str:
        return summary.as_html(*views.summarize(self))

    def to_sample_batch(self) -> SampleBatch:
        """Copy all rows into a flat batch, in time order, ring by ring; column names are preserved."""
        rows: Batch = self[:] if len(self) else Batch()
        return as_sample_batch(rows)

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table of all rows, in time order, ring by ring, with one column per dotted name."""
        return self.to_sample_batch().to_arrow()

    def to_pandas(self) -> pd.DataFrame:
        """Return a data frame of all rows, in time order, ring by ring; see `SampleBatch.to_pandas`."""
        return self.to_sample_batch().to_pandas()

    def __arrow_c_schema__(self) -> Any:
        return self.to_arrow().schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    # Folders, files and states

    @property
    def _journal(self) -> Journal | None:
        return self._table.journal if self._ring is None else None

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool | None = None) -> Self:
        """Open a buffer created with `storage`, in the state after the last added step, even if the process was killed.

        If `close` was not called, changes of the generator, priorities and `stack_num` after the last added step may be
        lost. `verify=True` compares all files with the checksums of the last `close`; None compares only files that
        have been modified since the last `close`. False compares no files, and accepts a folder that was copied while
        the buffer was open, or whose machine crashed.

        Raises
        ------
        StorageError, FormatError
            If another process has the buffer open, or the folder contains no buffer; if the folder is damaged, contains
            a buffer of another class, or was copied while open.

        Examples
        --------
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/buffer"
        >>> with ReplayBuffer(4, storage=path) as buf:
        ...     for i in range(6):
        ...         added = buf.add(Batch(obs=i, act=0, rew=1.0, terminated=False, truncated=False))
        >>> with ReplayBuffer.open(path) as buf:
        ...     buf[:].obs, type(buf.obs)
        (array([2, 3, 4, 5]), <class 'numpy.ndarray'>)
        """
        from samplebatch.storage import open_buffer

        return open_buffer(cls, path, verify=verify)

    def flush(self) -> None:
        """Sync the `storage` folder to disk; raises StorageError if the buffer is closed, OSError if writing fails."""
        if self._journal is not None:
            with self._table.lock:
                self._journal.flush()

    def close(self) -> None:
        """Flush the `storage` folder, write the checksums of all rows, and unlock the folder.

        A closed buffer can be read, but not extended. `close` is idempotent, and does nothing without `storage`.
        """
        with self._table.lock:
            if self._journal is not None:
                self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def save(self, path: str | os.PathLike[str], *, compression: str | None = None, durable: bool = True) -> None:
        """Write the buffer atomically to a file, or to a folder if the path has no suffix; see `SampleBatch.save`."""
        from samplebatch.storage import save

        save(self, path, compression, durable=durable)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        allow_pickle: bool = False,
        verify: bool = True,
        max_nbytes: int | None = None,
        **missing: Any,
    ) -> Self:
        """Read a buffer of this class, with its complete state, from a file or folder written by `save`.

        Parameters and errors are as for `samplebatch.load`. Files from older library versions may lack checksums.
        """
        from samplebatch.storage import load_buffer

        trust: dict[str, Any] = {"allow_pickle": allow_pickle, "verify": verify, "max_nbytes": max_nbytes}
        return load_buffer(cls, path, missing=missing, **trust)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the complete, picklable state: values, arrays and columns, with one checksum per part.

        Examples
        --------
        >>> buf, again = ReplayBuffer(4), ReplayBuffer(4)
        >>> added = buf.add(Batch(obs=7, act=0, rew=1.0, terminated=False, truncated=False))
        >>> again.load_state_dict(buf.state_dict())
        >>> again[0].obs
        array(7)
        """
        from samplebatch.storage import export_state

        return export_state(self)

    def load_state_dict(self, state: Mapping[str, Any], *, verify: bool = True) -> None:
        """Restore the state of a buffer with the same class, sizes and options as this buffer.

        With `verify`, each part is compared with its checksum. States from older library versions may lack checksums.

        Raises
        ------
        ColumnMismatchError
            If the class, sizes or options in the state do not match this buffer.
        FormatError
            If the state is incomplete or damaged. An error changes nothing.
        RingError
            If this buffer is a part of another buffer.
        """
        from samplebatch.storage import load_state

        load_state(self, state, verify=verify)

    def save_hdf5(self, path: str | os.PathLike[str], compression: str | None = None) -> None:
        """Write the buffer to an HDF5 file in Tianshou's layout.

        `compression` is an h5py filter: `"gzip"`, `"lzf"`. Raises UnstorableError if a value can be neither stored nor
        pickled, MissingExtraError if h5py is not installed, OSError if the file cannot be written.
        """
        from samplebatch.storage import save_hdf5_buffer

        save_hdf5_buffer(self, path, compression)

    @classmethod
    def load_hdf5(
        cls,
        path: str | os.PathLike[str],
        device: str | None = None,
        *,
        allow_pickle: bool = False,
        verify: bool = True,
        max_nbytes: int | None = None,
        **missing: Any,
    ) -> Self:
        """Read a buffer from an HDF5 file written by `save_hdf5` of this library or Tianshou.

        The parameters and errors are the same as for `load`; in addition, MissingExtraError is raised if h5py is not
        installed. `device` is accepted for compatibility with Tianshou; tensors are always in host memory.
        """
        from samplebatch.storage import load_hdf5_buffer

        trust: dict[str, Any] = {"allow_pickle": allow_pickle, "verify": verify, "max_nbytes": max_nbytes}
        return load_hdf5_buffer(cls, path, missing=missing, **trust)

    # Tianshou's collectors recognize vector buffers by `isinstance`.
    __class__: Any = property(lambda self: views.peer_class(type(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle's default requires that `__class__` is the type.
        return object.__new__, (type(self),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: value for name, value in self.__dict__.items() if name not in _BOUND}
        with self._table.lock:
            slots = self._table.rings.stored_slots() if self._ring is None else self._start + np.arange(len(self))
            # Copies also need an independent generator.
            attributes["_rng"] = copy.deepcopy(self._rng)
            return attributes | {
                "table": self._table.state_dict(self._ring),
                "action_unit": self._table.action_unit,
                "sampler": (type(self._sampler), self._sampler.state_dict(slots)),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        attributes = dict(state)
        self._table = table = Table.from_state_dict(attributes.pop("table"))
        table.action_unit = attributes.pop("action_unit", None)
        kind, sampler_state = attributes.pop("sampler")
        self.__dict__.update(attributes)
        self._use(kind.from_state_dict(table.rings.capacity, table.rings.stored_slots(), sampler_state))


_BOUND = frozenset(("_table", "_ring", "_start", "_sampler"))  # Pickles omit or convert these attributes.
