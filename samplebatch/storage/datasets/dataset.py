"""Dataset: folder of experience that can exceed memory, with sequential writers and concurrent readers."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch import errors, names
from samplebatch.arguments import whole
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.delivery import Delivery
from samplebatch.batch.episodes import by_stream, ends_by_flag, run_starts
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.sequences import divide
from samplebatch.batch.summary import describe_column, html_table
from samplebatch.buffer.samplers import Sample
from samplebatch.returns.arrays import discounted_returns
from samplebatch.storage.buffers.state import generator_from_state, generator_state
from samplebatch.storage.datasets.parts import DatasetRows, DatasetWriter, Rows, check_log
from samplebatch.storage.tables.batches import AnyBatch, Filters, convert, join, take_rows
from samplebatch.storage.tables.parquet import read_parquet

if TYPE_CHECKING:
    from samplebatch.batch.delivery import Device, Floats
    from samplebatch.storage.datasets.parts import DatasetRows


_CACHE_NBYTES = 1 << 28
_STREAM = (names.EPS_ID, names.AGENT_INDEX, names.T)
_HEADINGS = ("column", "dtype", "shape")


class Dataset:
    """Folder of Parquet files with batches of experience that need not fit into memory.

    An append writes the batch as a complete file, called a part, and then adds a line to a commit log. Files without a
    log line do not belong to the dataset, so a process that is killed during an append loses only the part that it was
    appending. Processes can read during an append; several processes can append one after another. Other tools can read
    the folder, for example `polars.scan_parquet("folder")`, because the log is a Parquet file without rows.

    A row is a step, or a sequence if the batches have `seq_lens`. A reader uses a snapshot of the dataset; `refresh`
    updates the snapshot to the newest commit.

    Parameters
    ----------
    folder
        Folder of the dataset, created with the first part; its parent must exist.
    columns
        Names of the columns to read; None for all columns. A name selects all columns nested under it.
    filters
        Conditions on the rows to read, as in `load`.
    policy
        Policy whose rows are read, if the batches are `MultiAgentBatch` objects.
    seed
        Seed of `sample` and `sample_sequences`.
    cache_nbytes
        Maximum bytes of row groups cached for repeated samples.
    allow_pickle
        Whether to unpickle columns of Python objects without an Arrow type. A pickle can execute arbitrary code, so
        pass True only for files from a trusted writer.
    max_nbytes
        Maximum bytes to allocate per file; None for the larger of 256 MiB and 1024 times the file's size.

    Attributes
    ----------
    folder
        The folder.

    Raises
    ------
    FormatError
        If the path is a file, or the folder lacks the log or a part.

    Examples
    --------
    >>> import tempfile
    >>> dataset = Dataset(tempfile.mkdtemp() + "/steps")
    >>> for start in (0, 3):
    ...     path = dataset.extend(
    ...         SampleBatch(t=[start, start + 1, start + 2], eps_id=[start] * 3)
    ...     )
    >>> len(dataset), dataset.episodes
    (6, 2)
    >>> [batch["t"].tolist() for batch in dataset.iter_batches(4)]
    [[0, 1, 2, 3], [4, 5]]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        filters: Filters | None = None,
        policy: str | None = None,
        seed: int = 42,
        cache_nbytes: int = _CACHE_NBYTES,
        allow_pickle: bool = False,
        max_nbytes: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise errors.FormatError(f"{os.fspath(folder)!r} must be a folder of Parquet files, got a file")
        self._rng = np.random.default_rng(seed)
        self._allow_pickle = allow_pickle
        self._max_nbytes = max_nbytes
        self._rows = DatasetRows(
            self.folder,
            columns,
            filters,
            policy,
            allow_pickle=allow_pickle,
            max_nbytes=max_nbytes,
            cache_nbytes=cache_nbytes,
        )
        check_log(self.folder, self._rows.snapshot)
        self._writer = DatasetWriter(self.folder, self._rows)
        self._order: tuple[int, Rows, Rows] | None = None

    def __repr__(self) -> str:
        parts = self._rows.snapshot.parts
        return f"Dataset({os.fspath(self.folder)!r}: {sum(part.rows for part in parts)} rows in {len(parts)} parts)"

    def _repr_html_(self) -> str:
        rows = len(self)
        lines = [describe_column(name, column, rows, 0) for name, column in self._rows.columns().items()]
        return html_table(
            repr(self), _HEADINGS, [[names.for_html(getattr(line, cell)) for cell in _HEADINGS] for line in lines]
        )

    def __len__(self) -> int:
        return len(self._rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampling generator; rows are not included, because the folder contains them."""
        return {"generator": dict(generator_state(self._rng))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sampling generator from `state_dict`.

        Raises
        ------
        FormatError
            If the state is invalid.
        """
        self._rng = generator_from_state(state.get("generator"))

    @property
    def schema(self) -> pa.Schema:
        """In-memory Arrow schema of the rows in the dataset's first part.

        Raises
        ------
        FormatError
            If the dataset has no parts.
        """
        if not self._rows.snapshot.parts:
            raise errors.FormatError(f"{os.fspath(self.folder)!r} must have parts to have a schema, got none")
        return self._rows.schema()

    @property
    def action_unit(self) -> ActionUnit | None:
        """Unit of the actions; None if the unit is unknown or the rows belong to several policies."""
        return self._rows.action_unit

    @property
    def dropped(self) -> tuple[str, ...]:
        """Descriptions of uncommitted writes that this object discarded after the writers had been killed."""
        return self._writer.dropped

    def parts(self) -> list[Path]:
        """List the files of all parts in row order."""
        return [self.folder / part.name for part in self._rows.snapshot.parts]

    def refresh(self) -> Self:
        """Update the snapshot to the newest commit of any process; return the dataset itself."""
        self._rows.reload()
        return self

    # Writing

    def extend(self, batch: AnyBatch, *, compression: str = "zstd") -> Path:
        """Append a batch as a new part, commit it, and return the part's path.

        Raises
        ------
        ColumnMismatchError
            If the batch has another type, other columns or another action unit than earlier batches. The Arrow types of
            object columns may differ.
        OSError
            If the part cannot be written.
        """
        return self._writer.extend(batch, compression)

    def compact(self, part_nbytes: int = 1 << 28, *, compression: str = "zstd") -> int:
        """Merge small consecutive parts; return the decrease in the number of files.

        The order and the numbers of rows are preserved. Open readers in other processes continue with the merged parts.
        During the compaction, other tools may read rows twice.

        Parameters
        ----------
        part_nbytes
            Maximum size of a merged part in memory, in bytes; parts above this size are not merged.
        compression
            Parquet compression codec, as in `write_parquet`.
        """
        return self._writer.compact(whole("part_nbytes", part_nbytes, 1), compression, self._fragment)

    def _fragment(self, path: Path) -> AnyBatch:
        batch: AnyBatch = read_parquet(path, allow_pickle=self._allow_pickle, max_nbytes=self._max_nbytes)
        return batch

    # Reading

    def fragments(self) -> Iterator[AnyBatch]:
        """Yield one batch per part, with all columns and rows regardless of `columns`, `filters` and `policy`.

        After a compaction, one part can contain several of the appended batches.

        Raises
        ------
        FormatError, UntrustedPickleError, CapacityError
            As in `load`.
        """
        for path in self.parts():
            yield self._fragment(path)

    def read(self, *, verify: bool | None = None) -> AnyBatch:
        """Read all rows into one batch.

        Parameters
        ----------
        verify
            Whether to verify all bytes of the parts against their checksums. None verifies the bytes unless a column
            selection or a filter excludes data. The footers, and the pages that are read, are always verified.

        Raises
        ------
        FormatError, UntrustedPickleError, CapacityError
            As in `load`; FormatError is also raised if the dataset has no parts.
        """
        return self._rows.read(verify=verify)

    def take(self, rows: npt.ArrayLike) -> AnyBatch:
        """Read rows by row number, in the order of `rows`.

        Raises
        ------
        ArgumentError
            If a row number is out of range.
        """
        numbers = np.asarray(rows, np.int64).reshape(-1)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise errors.ArgumentError(
                f"rows must be in [0, {len(self)}), got {int(numbers[(numbers < 0) | (numbers >= len(self))][0])}"
            )
        return self._rows.take(numbers)

    def sample(
        self, batch_size: int, *, device: Device | None = None, floats: Floats | None = None
    ) -> Sample[AnyBatch, Rows]:
        """Sample rows uniformly with replacement; return the rows and their row numbers.

        The entire row group of each sampled row is read, unless the row group is cached. `iter_batches` with `shuffle`
        reads each row group only once.

        Parameters
        ----------
        batch_size
            Number of rows.
        device, floats
            As in `ReplayBuffer.sample`.

        Raises
        ------
        ArgumentError
            If `batch_size` is less than 0, or `floats` is not a floating-point dtype. No rows are sampled.
        DeviceError
            If torch cannot use the device. No rows are sampled.
        EmptyBufferError
            If the dataset has no rows.
        """
        whole("batch_size", batch_size)
        delivery = Delivery(device, floats)
        if not len(self):
            raise errors.EmptyBufferError("a dataset must have rows to sample from, got none; extend it first")
        rows = self._rng.integers(len(self), size=batch_size)
        return Sample(delivery.one(self._rows.take(rows), convert), rows)

    def iter_batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        memory_nbytes: int = 1 << 28,
        seed: int = 0,
        epoch: int = 0,
        drop_last: bool = False,
        shard: tuple[int, int] = (0, 1),
        device: Device | None = None,
        floats: Floats | None = None,
    ) -> DatasetBatches:
        """Return an iterable of batches that yields each row once; see `DatasetBatches`.

        Parameters
        ----------
        batch_size
            Number of rows per batch; the last batch may be smaller.
        shuffle
            Whether to yield rows in random order. Randomly selected pieces of the dataset are loaded up to the memory
            limit, and the rows of these pieces are shuffled.
        memory_nbytes
            Approximate limit on the memory of loaded rows, in bytes.
        seed, epoch
            Numbers that together determine the order of shuffled rows.
        drop_last
            Whether to omit the last batch if it has fewer than `batch_size` rows.
        shard
            Pair `(i, n)`: yield only the i-th of n disjoint partitions of the rows, counted from 0.
        device, floats
            As in `ReplayBuffer.sample`. Forked workers of a `DataLoader` cannot use a GPU.

        Raises
        ------
        ArgumentError
            If a numeric argument is out of range, or `floats` is not a floating-point dtype.
        DeviceError
            If torch cannot use the device.
        """
        return DatasetBatches(
            self._rows,
            whole("batch_size", batch_size, 1),
            shuffle=shuffle,
            memory_nbytes=whole("memory_nbytes", memory_nbytes, 1),
            seed=(seed, epoch),
            drop_last=drop_last,
            shard=shard,
            delivery=Delivery(device, floats),
        )

    # Episodes

    @property
    def episodes(self) -> int:
        """Number of episodes.

        All rows with the same `eps_id` and `agent_index` form an episode; without `eps_id`, end flags delimit episodes.
        """
        return len(self._episodes()[1]) - 1

    def iter_episodes(self) -> Iterator[AnyBatch]:
        """Yield the rows of each episode in time order; episodes are in the order of their first rows.

        The fragments of an episode may be in different parts.
        """
        order, bounds = self._episodes()
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            yield self._rows.take(order[start:stop])

    def sample_sequences(
        self, batch_size: int, length: int, *, device: Device | None = None, floats: Floats | None = None
    ) -> Sample[AnyBatch, Rows]:
        """Sample sequences of consecutive steps uniformly; no sequence crosses an episode boundary.

        Parameters
        ----------
        batch_size
            Number of sequences.
        length
            Number of steps per sequence.
        device, floats
            As in `ReplayBuffer.sample`.

        Returns
        -------
        batch
            A `SampleBatch` with `seq_lens`, or a `Batch` of shape (batch_size, length, ...). In a `SampleBatch`, the
            states and the columns in `per_sequence` contain only the first step's value of each sequence.
        rows
            Row numbers, shape (batch_size, length).

        Raises
        ------
        ArgumentError
            If `batch_size` is less than 0, `length` is less than 1, or `floats` is not a floating-point dtype.
        DeviceError
            If torch cannot use the device. No rows are sampled.
        EmptyBufferError
            If no episode has `length` steps.
        SequenceError
            If the rows are sequences.
        """
        whole("batch_size", batch_size)
        whole("length", length, 1)
        delivery = Delivery(device, floats)
        order, bounds = self._episodes()
        counts = np.maximum(np.diff(bounds) - length + 1, 0)
        ends = np.cumsum(counts)
        if not len(counts) or not ends[-1]:
            raise errors.EmptyBufferError(f"an episode must have {length} steps to be sampled, got only shorter ones")
        positions = self._rng.integers(ends[-1], size=batch_size)
        episode = np.searchsorted(ends, positions, "right")
        first = bounds[episode] + positions - (ends - counts)[episode]
        rows = order[first[:, None] + np.arange(length)]
        batch = self._rows.take(rows.reshape(-1))
        if isinstance(batch, SampleBatch):
            if names.SEQ_LENS in batch:
                raise errors.SequenceError("rows must be steps to be sampled as sequences, got sequences")
            batch = divide(batch, np.full(batch_size, length, np.int64))
        else:
            batch = cast(Batch, batch)[np.arange(rows.size).reshape(rows.shape)]
        return Sample(delivery.one(batch, convert), rows)

    def discounted_rewards(self, gamma: float = 0.99) -> npt.NDArray[np.float32]:
        """Compute the discounted sum of rewards from each row to the last stored step of its episode.

        The rewards, flags and ids of all rows are read; other columns are not read.

        Parameters
        ----------
        gamma
            Discount factor per step.

        Returns
        -------
        numpy.ndarray
            Sums by row number, shape (n,).

        Raises
        ------
        ColumnNotFoundError
            If the dataset has no reward column.
        FormatError
            If a part is missing or damaged.

        Examples
        --------
        >>> import tempfile
        >>> from samplebatch import SampleBatch
        >>> dataset = Dataset(tempfile.mkdtemp() + "/steps")
        >>> path = dataset.extend(SampleBatch(eps_id=[0, 1, 0, 1], rewards=[1.0, 2.0, 4.0, 8.0]))
        >>> dataset.discounted_rewards(0.5)
        array([3., 6., 4., 8.], dtype=float32)
        """
        order, bounds = self._episodes()
        sums = np.zeros(len(order), np.float32)
        if not len(order):
            return sums
        stored = self.schema.names
        reward = next((name for name in (names.REWARDS, "rew") if name in stored), names.REWARDS)
        flags = [name for name in (names.TERMINATEDS, names.TRUNCATEDS, "terminated", "truncated") if name in stored]
        columns: Any = self._rows.only([reward, *flags])
        ended = np.zeros(len(order), bool)
        ended[bounds[1:] - 1] = True
        for name in flags:
            ended |= np.asarray(columns[name])[order].astype(bool)
        rewards = np.asarray(columns[reward], np.float64)[order]
        sums[order] = discounted_returns(rewards, ended, np.zeros(len(order), bool), gamma=gamma)
        return sums

    def _episodes(self) -> tuple[Rows, Rows]:
        """Sort all rows by episode and time; return the sorted row numbers and the first position of each episode."""
        if self._order is None or self._order[0] != len(self):
            self._order = (len(self), *self._find_episodes())
        return self._order[1:]

    def _find_episodes(self) -> tuple[Rows, Rows]:
        n = len(self)
        available = set(self.schema.names) if n else set()
        key_names = [
            name
            for name in (*_STREAM, names.TERMINATEDS, names.TRUNCATEDS, "terminated", "truncated")
            if name in available
        ]
        if not key_names:
            return np.arange(n), np.array([0, n] if n else [0])
        keys: Any = self._rows.only(key_names)
        key_columns = {name: np.asarray(keys[name]) for name in key_names}
        if names.EPS_ID not in key_columns:
            flags = [key_columns[name].astype(bool) for name in key_names if name not in _STREAM]
            ends = ends_by_flag(np.logical_or.reduce(flags)) if flags else [n]
            return np.arange(n), np.array([0, *ends])
        streams = [key_columns[name] for name in _STREAM[:2] if name in key_columns]
        order = by_stream(*streams, t=key_columns.get(names.T))
        starts = run_starts(*[key[order] for key in streams])
        bounds = np.append(starts, n)
        # Order episodes by their first rows.
        episode_order = np.argsort(order[starts], kind="stable")
        lengths = np.diff(bounds)[episode_order]
        new = np.concatenate(([0], np.cumsum(lengths)))
        positions = np.repeat(bounds[:-1][episode_order] - new[:-1], lengths) + np.arange(n)
        return order[positions].astype(np.int64), new


_COPIES = 3
"""Copies of a window's rows in memory at once: decoded, joined, and gathered into batches."""

_PIECES = 8
"""Minimum number of pieces per share, if the dataset has enough rows."""


class DatasetBatches:
    """Iterable of batches that yields each row once; created by `Dataset.iter_batches`.

    Pieces of the dataset are loaded in windows that fit into memory. With `shuffle`, the pieces are in random order,
    and rows are shuffled within each window. The order depends only on the seed, the epoch, the shard, the memory limit
    and the dataset's row groups. An iteration can be resumed from a `state_dict`, and the next iteration after a
    complete iteration starts from the beginning.

    Examples
    --------
    >>> import tempfile
    >>> from samplebatch import Dataset, SampleBatch
    >>> dataset = Dataset(tempfile.mkdtemp() + "/steps")
    >>> path = dataset.extend(SampleBatch(t=np.arange(8)))
    >>> batches = dataset.iter_batches(3, shuffle=True, seed=1)
    >>> first = next(iter(batches))
    >>> again = dataset.iter_batches(3, shuffle=True, seed=1)
    >>> again.load_state_dict(batches.state_dict())
    >>> sorted([*first["t"].tolist(), *[t for batch in again for t in batch["t"].tolist()]])
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def __init__(
        self,
        rows: DatasetRows,
        batch_size: int,
        *,
        shuffle: bool,
        memory_nbytes: int,
        seed: tuple[int, int],
        drop_last: bool,
        shard: tuple[int, int],
        delivery: Delivery,
    ) -> None:
        share, shares = shard
        whole("shard", shares, 1)
        if not 0 <= whole("shard", share) < shares:
            raise errors.ArgumentError(f"shard must be (share, number of shares) with 0 <= share < number, got {shard}")
        self._rows = rows
        self._size = batch_size
        self._shuffle = shuffle
        self._memory_nbytes = memory_nbytes
        self._seed = seed
        self._drop_last = drop_last
        self._shard = shard
        self._delivery = delivery
        self._windows = self._plan()
        self._window = self._offset = 0

    def __len__(self) -> int:
        """Number of batches in a complete iteration."""
        rows = sum(_count(window) for window in self._windows)
        return rows // self._size if self._drop_last else -(-rows // self._size)

    def _plan(self) -> list[npt.NDArray[np.int64]]:
        """Partition the rows into windows; a window is an array of k row ranges, shape (k, 2)."""
        bounds = np.unique(self._rows.bounds)
        room = max(1, int(self._memory_nbytes / _COPIES / max(1.0, self._rows.row_nbytes)))
        total, (share, shares) = len(self._rows), self._shard
        # A large piece could not be mixed with others, and would be assigned to a single share.
        max_rows = max(
            1, min(room // _PIECES if self._shuffle else room, -(-total // (_PIECES * shares)) if shares > 1 else total)
        )
        cut = [
            np.arange(start, stop, max_rows)
            for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
        starts = np.concatenate([np.zeros(0, np.int64), *cut])
        pieces = np.stack([starts, np.append(starts[1:], total)[: len(starts)]], 1)
        if self._shuffle:
            pieces = np.random.default_rng(self._seed).permutation(pieces)
        pieces = pieces[share::shares]
        windows, first, window_rows = [], 0, 0
        for i, (start, stop) in enumerate(pieces.tolist()):
            if window_rows and window_rows + stop - start > room:
                windows.append(pieces[first:i])
                first, window_rows = i, 0
            window_rows += stop - start
        if len(pieces) > first:
            windows.append(pieces[first:])
        return windows

    def _read(self, window: int) -> AnyBatch:
        rows = np.concatenate([np.arange(start, stop) for start, stop in self._windows[window].tolist()])
        batch = self._rows.take(rows)
        if not self._shuffle:
            return batch
        return take_rows(batch, np.random.default_rng([*self._seed, window]).permutation(len(rows)))

    def __iter__(self) -> Iterator[AnyBatch]:
        return self._delivery.each(self._each(), convert)

    def _each(self) -> Iterator[AnyBatch]:
        pending: AnyBatch | None = None
        missing_rows = self._size
        window, offset = self._window, self._offset
        while window < len(self._windows):
            batch, count = self._read(window), _count(self._windows[window])
            while count - offset >= missing_rows:
                part = take_rows(batch, np.arange(offset, offset + missing_rows))
                offset += missing_rows
                self._window, self._offset = window, offset
                yield part if pending is None else join([pending, part])
                pending, missing_rows = None, self._size
            if offset < count:
                tail = take_rows(batch, np.arange(offset, count))
                pending = tail if pending is None else join([pending, tail])
                missing_rows -= count - offset
            window, offset = window + 1, 0
        self._window = self._offset = 0
        if pending is not None and not self._drop_last:
            yield pending

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, the position after the last yielded batch, and a checksum of the settings."""
        return {"seed": list(self._seed), "window": self._window, "offset": self._offset, "plan": self._checksum()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position from which the next iteration resumes.

        Raises
        ------
        ColumnMismatchError
            If the state was saved with a different seed, epoch, shard, batch size, memory limit, set of rows or set of
            row groups.
        """
        if state["plan"] != self._checksum():
            raise errors.ColumnMismatchError(
                "the state must have the same rows, batch size, seed, epoch, memory and share, got another"
            )
        self._window, self._offset = int(state["window"]), int(state["offset"])

    def _checksum(self) -> int:
        settings = repr((self._size, self._shuffle, list(self._seed), self._drop_last, list(self._shard)))
        crc = zlib.crc32(settings.encode())
        for window in self._windows:
            crc = zlib.crc32(np.ascontiguousarray(window, "<i8").tobytes(), crc)
        return crc

    def share(self, share: int, shares: int) -> DatasetBatches:
        """Return an iterable over one of `shares` disjoint partitions of this iterable's rows."""
        own_share, all_shares = self._shard
        return DatasetBatches(
            self._rows,
            self._size,
            shuffle=self._shuffle,
            memory_nbytes=max(1, self._memory_nbytes // shares),
            seed=self._seed,
            drop_last=self._drop_last,
            shard=(own_share + all_shares * share, all_shares * shares),
            delivery=self._delivery,
        )

    def as_torch(self) -> Any:
        """Return a torch `IterableDataset`; each worker of a `DataLoader` reads a separate partition of the rows.

        Pass `batch_size=None` to the loader, because the dataset already yields batches. The memory limit is divided
        evenly among the workers. A loader that saves the states of its workers can resume within an epoch through
        `state_dict` and `load_state_dict`.

        Examples
        --------
        >>> import tempfile
        >>> from torch.utils.data import DataLoader
        >>> from samplebatch import Batch, Dataset
        >>> dataset = Dataset(tempfile.mkdtemp() + "/steps")
        >>> path = dataset.extend(Batch(t=np.arange(8)))
        >>> loader = DataLoader(dataset.iter_batches(4).as_torch(), batch_size=None)
        >>> [batch.t.tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        """
        return _torch_class()(self)


@cache
def _torch_class() -> Any:
    """Create the subclass of torch's `IterableDataset`; requires torch."""
    errors.require_torch()
    from torch.utils.data import IterableDataset, get_worker_info

    class TorchBatches(IterableDataset[Any]):
        """Torch dataset of batches for the workers of a `DataLoader`."""

        def __init__(self, batches: DatasetBatches) -> None:
            self._batches = batches
            self._worker_batches: DatasetBatches | None = None

        def _share_of_worker(self) -> DatasetBatches:
            if self._worker_batches is None:
                info = get_worker_info()
                self._worker_batches = self._batches if info is None else self._batches.share(info.id, info.num_workers)
            return self._worker_batches

        def __iter__(self) -> Iterator[AnyBatch]:
            return iter(self._share_of_worker())

        def state_dict(self) -> dict[str, Any]:
            return self._share_of_worker().state_dict()

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self._share_of_worker().load_state_dict(state)

        def __reduce__(self) -> tuple[Any, ...]:
            return _make_torch_batches, (self._batches,)

    return TorchBatches


def _make_torch_batches(batches: DatasetBatches) -> Any:
    return _torch_class()(batches)


def _count(window: npt.NDArray[np.int64]) -> int:
    return int((window[:, 1] - window[:, 0]).sum())
