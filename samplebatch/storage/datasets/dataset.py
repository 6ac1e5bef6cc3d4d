"""Dataset: a folder of experience, larger than memory, appended to by one and read by many."""

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

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.action_unit import ActionUnit
from samplebatch.batch.delivery import Delivery
from samplebatch.batch.episodes import by_stream, ends_by_flag, run_starts
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.batch.summary import describe_column, html_table
from samplebatch.buffer.sampling import Sample
from samplebatch.errors import (
    ArgumentError,
    ColumnMismatchError,
    EmptyBufferError,
    FormatError,
    SequenceError,
    require_torch,
)
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
    """A folder of Parquet files with batches, for experience that need not fit into memory.

    Each batch that is appended becomes a part: a file, whole, and then a line in a log. A part that is not in the log
    is not in the dataset, so a process that is killed while it appends costs the part in flight. Processes may read
    while one appends, and several may append in turns. Other tools read the folder: `polars.scan_parquet("folder")`.
    The log is a Parquet file without rows.

    Rows are the steps of batches, or the sequences of batches with `seq_lens`. What has been read is a snapshot;
    `refresh` takes in what others have appended since.

    Parameters
    ----------
    folder
        The folder. It is made with the first part; the one that it lies in must exist.
    columns
        Names of the columns to read; None for all. A name stands for all that is nested under it.
    filters
        Conditions on the rows to read, as `load` takes them.
    policy
        The policy whose rows to read, where batches are `MultiAgentBatch`es.
    seed
        Seed of `sample` and `sample_sequences`.
    cache_nbytes
        Bytes of row groups that are kept after they were read, for samples from the same ones.
    allow_pickle
        Whether reading may unpickle columns of Python objects that Arrow has no type for. Only for files whose writer
        you trust: a pickle can run any code.
    max_nbytes
        Maximum bytes to allocate per file; None for the larger of 256 MiB and 1024 times its size.

    Attributes
    ----------
    folder
        As given.

    Raises
    ------
    FormatError
        If the folder is a file, has no log, or lacks a part.

    Examples
    --------
    >>> import tempfile
    >>> dataset = Dataset(tempfile.mkdtemp() + "/steps")
    >>> for start in (0, 3):
    ...     path = dataset.extend(SampleBatch(t=[start, start + 1, start + 2], eps_id=[start] * 3))
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
            raise FormatError(f"{os.fspath(folder)!r} must be a folder of Parquet files, and it is a file")
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
        """Return the state of the generator that samples are drawn by; the rows are in the folder."""
        return {"generator": dict(generator_state(self._rng))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw on from a state that `state_dict` returned.

        Raises
        ------
        FormatError
            If it is none.
        """
        self._rng = generator_from_state(state.get("generator"))

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the first part, as tables have it in memory.

        Raises
        ------
        FormatError
            If there is no part.
        """
        if not self._rows.snapshot.parts:
            raise FormatError(f"{os.fspath(self.folder)!r} must have parts to have a schema, it has none")
        return self._rows.schema()

    @property
    def action_unit(self) -> ActionUnit | None:
        """The unit of the rows' actions; None if unknown, or of several policies, of which each has its own."""
        return self._rows.action_unit

    @property
    def dropped(self) -> tuple[str, ...]:
        """Remains of writers that were killed, a sentence each; this one cleared them away at its first write."""
        return self._writer.dropped

    def parts(self) -> list[Path]:
        """List the files of all parts, in the order of their rows."""
        return [self.folder / part.name for part in self._rows.snapshot.parts]

    def refresh(self) -> Self:
        """Adopt the commits made since, by this process or another, and return this very dataset."""
        self._rows.reload()
        return self

    # Writing

    def extend(self, batch: AnyBatch, *, compression: str = "zstd") -> Path:
        """Write a batch as the next part, commit it, and return the part's path.

        Raises
        ------
        ColumnMismatchError
            If it is of another type than the batches before, or has other columns; names the column. Columns of
            objects may differ in form. If its actions are in another unit.
        OSError
            If it cannot be written.
        """
        return self._writer.extend(batch, compression)

    def compact(self, part_nbytes: int = 1 << 28, *, compression: str = "zstd") -> int:
        """Join small parts that follow each other, and return how many files are fewer now.

        Rows keep their order and numbers. Readers in other processes find them in their new place. Other tools may see
        rows twice while it runs.

        Parameters
        ----------
        part_nbytes
            Maximum size of the rows of a joined part in memory; larger parts stay as they are.
        compression
            Parquet's codec.
        """
        return self._writer.compact(whole("part_nbytes", part_nbytes, 1), compression, self._fragment)

    def _fragment(self, path: Path) -> AnyBatch:
        batch: AnyBatch = read_parquet(path, allow_pickle=self._allow_pickle, max_nbytes=self._max_nbytes)
        return batch

    # Reading

    def fragments(self) -> Iterator[AnyBatch]:
        """Yield the batches as they were appended, whole; compacted ones are joined. Columns and filters do not count.

        Raises
        ------
        FormatError, UntrustedPickleError, CapacityError
            As `load` does.
        """
        for path in self.parts():
            yield self._fragment(path)

    def read(self, *, verify: bool | None = None) -> AnyBatch:
        """Read all of it into one batch.

        Parameters
        ----------
        verify
            Whether to hold all bytes of the parts against their checksums; by default that is done where columns and
            filters leave nothing out. Footers and pages are compared with theirs in any case.

        Raises
        ------
        FormatError, UntrustedPickleError, CapacityError
            As `load` does; FormatError too if there is no part.
        """
        return self._rows.read(verify=verify)

    def take(self, rows: npt.ArrayLike) -> AnyBatch:
        """Read rows by their numbers, in the order given.

        Raises
        ------
        ArgumentError
            If a number lies outside.
        """
        found = np.asarray(rows, np.int64).reshape(-1)
        if len(found) and not 0 <= found.min() <= found.max() < len(self):
            raise ArgumentError(
                f"rows must be in [0, {len(self)}), got {int(found[(found < 0) | (found >= len(self))][0])}"
            )
        return self._rows.take(found)

    def sample(
        self, batch_size: int, *, device: Device | None = None, floats: Floats | None = None
    ) -> Sample[AnyBatch, Rows]:
        """Draw rows with replacement, and return them with their numbers.

        Each row costs the row group that it lies in, unless that is in memory still: `iter_batches` with `shuffle`
        reads each once.

        Parameters
        ----------
        batch_size
            How many.
        device, floats
            As `ReplayBuffer.sample` takes them.

        Raises
        ------
        ArgumentError
            If `batch_size` is less than 0, or `floats` no floating-point dtype. Nothing is drawn then.
        DeviceError
            If torch cannot use the device. Nothing is drawn then.
        EmptyBufferError
            If there are none.
        """
        whole("batch_size", batch_size)
        delivery = Delivery(device, floats)
        if not len(self):
            raise EmptyBufferError("a dataset must have rows to draw from, it has none; extend it first")
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
        """Return an iterable of batches that hold each row once; see `DatasetBatches`.

        Parameters
        ----------
        batch_size
            Rows in each batch, fewer in the last.
        shuffle
            Whether rows come in random order: pieces of the dataset are drawn, as many as fit into memory together, and
            their rows are mixed.
        memory_nbytes
            Bytes that rows may take at a time, about.
        seed, epoch
            Together they say which order it is.
        drop_last
            Whether to leave out a last batch with fewer rows.
        shard
            `(i, n)`: the i-th of n shares, none of which has a row of another.
        device, floats
            As `ReplayBuffer.sample` takes them. Workers of a `DataLoader` are forked, and cannot use a GPU then.

        Raises
        ------
        ArgumentError
            If a number is none that it may be, or `floats` no floating-point dtype.
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
        """How many episodes there are: distinct pairs of `eps_id` and `agent_index`, or runs that a flag ends."""
        return len(self._episodes()[1]) - 1

    def iter_episodes(self) -> Iterator[AnyBatch]:
        """Yield the rows of each episode, in time order; episodes come in the order of their first rows.

        Fragments of an episode may lie in any parts.
        """
        order, bounds = self._episodes()
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            yield self._rows.take(order[start:stop])

    def sample_sequences(
        self, batch_size: int, length: int, *, device: Device | None = None, floats: Floats | None = None
    ) -> Sample[AnyBatch, Rows]:
        """Draw stretches of steps of one episode, each of them with equal probability.

        Parameters
        ----------
        batch_size
            How many.
        length
            Steps in each.
        device, floats
            As `ReplayBuffer.sample` takes them.

        Returns
        -------
        batch
            A `SampleBatch` with `seq_lens`, or a `Batch` of shape (batch_size, length, ...).
        rows
            Their numbers, shape (batch_size, length).

        Raises
        ------
        ArgumentError
            If `batch_size` is less than 0, `length` less than 1, or `floats` no floating-point dtype.
        DeviceError
            If torch cannot use the device. Nothing is drawn then.
        EmptyBufferError
            If no episode has so many steps.
        SequenceError
            If the rows are sequences already.
        """
        whole("batch_size", batch_size)
        whole("length", length, 1)
        delivery = Delivery(device, floats)
        order, bounds = self._episodes()
        room = np.maximum(np.diff(bounds) - length + 1, 0)
        ends = np.cumsum(room)
        if not len(room) or not ends[-1]:
            raise EmptyBufferError(f"an episode must have {length} steps to draw from, none has")
        drawn = self._rng.integers(ends[-1], size=batch_size)
        episode = np.searchsorted(ends, drawn, "right")
        first = bounds[episode] + drawn - (ends - room)[episode]
        rows = order[first[:, None] + np.arange(length)]
        batch = self._rows.take(rows.reshape(-1))
        if isinstance(batch, SampleBatch):
            if names.SEQ_LENS in batch:
                raise SequenceError("steps must be rows to be drawn as sequences, they are sequences already")
            batch = batch.copy(shallow=True)
            batch[names.SEQ_LENS] = np.full(batch_size, length, np.int32)
        else:
            batch = cast(Batch, batch)[np.arange(rows.size).reshape(rows.shape)]
        return Sample(delivery.one(batch, convert), rows)

    def discounted_rewards(self, gamma: float = 0.99) -> npt.NDArray[np.float32]:
        """Sum the discounted rewards from each row to the end of its episode, or of the part of it that is here.

        Reads rewards, flags and ids of all rows, and nothing else of them.

        Parameters
        ----------
        gamma
            The discount of a step.

        Returns
        -------
        numpy.ndarray
            Sums by the numbers of rows, shape (n,).

        Raises
        ------
        ColumnNotFoundError
            If there are no rewards.
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
        found = np.zeros(len(order), np.float32)
        if not len(order):
            return found
        known = self.schema.names
        reward = next((name for name in (names.REWARDS, "rew") if name in known), names.REWARDS)
        flags = [name for name in (names.TERMINATEDS, names.TRUNCATEDS, "terminated", "truncated") if name in known]
        columns: Any = self._rows.only([reward, *flags])
        ended = np.zeros(len(order), bool)
        ended[bounds[1:] - 1] = True
        for name in flags:
            ended |= np.asarray(columns[name])[order].astype(bool)
        rewards = np.asarray(columns[reward], np.float64)[order]
        found[order] = discounted_returns(rewards, ended, np.zeros(len(order), bool), gamma=gamma)
        return found

    def _episodes(self) -> tuple[Rows, Rows]:
        """Order all rows by episode and time; return the order and each episode's first position."""
        if self._order is None or self._order[0] != len(self):
            self._order = (len(self), *self._find_episodes())
        return self._order[1:]

    def _find_episodes(self) -> tuple[Rows, Rows]:
        n = len(self)
        known = set(self.schema.names) if n else set()
        wanted = [
            name for name in (*_STREAM, names.TERMINATEDS, names.TRUNCATEDS, "terminated", "truncated") if name in known
        ]
        if not wanted:
            return np.arange(n), np.array([0, n] if n else [0])
        keys: Any = self._rows.only(wanted)
        held = {name: np.asarray(keys[name]) for name in wanted}
        if names.EPS_ID not in held:
            flags = [held[name].astype(bool) for name in wanted if name not in _STREAM]
            ends = ends_by_flag(np.logical_or.reduce(flags)) if flags else [n]
            return np.arange(n), np.array([0, *ends])
        streams = [held[name] for name in _STREAM[:2] if name in held]
        order = by_stream(*streams, t=held.get(names.T))
        starts = run_starts(*[key[order] for key in streams])
        bounds = np.append(starts, n)
        # Episodes in the order of their first rows.
        turn = np.argsort(order[starts], kind="stable")
        lengths = np.diff(bounds)[turn]
        new = np.concatenate(([0], np.cumsum(lengths)))
        places = np.repeat(bounds[:-1][turn] - new[:-1], lengths) + np.arange(n)
        return order[places].astype(np.int64), new


_COPIES = 3
"""Copies of a window's rows that are in memory at once: decoded, joined, and gathered into batches."""

_PIECES = 8
"""Pieces that each share has at the least, of a dataset that has so many rows."""


class DatasetBatches:
    """An iterable of batches of a dataset's rows, each row once; made by `Dataset.iter_batches`.

    Pieces of the dataset, in order or drawn, are taken together as far as memory allows: a window, in which rows are
    mixed. The order follows from the seed, the epoch and the rows alone. Iterating goes on from where `state_dict` was
    taken, and begins again at the end.

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
            raise ArgumentError(f"shard must be a share and how many there are, from 0 on, got {shard}")
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
        """How many batches there are from the beginning."""
        rows = sum(_count(window) for window in self._windows)
        return rows // self._size if self._drop_last else -(-rows // self._size)

    def _plan(self) -> list[npt.NDArray[np.int64]]:
        """Cut the rows into windows: ranges of rows, shape (k, 2) each."""
        bounds = np.unique(self._rows.bounds)
        room = max(1, int(self._memory_nbytes / _COPIES / max(1.0, self._rows.row_nbytes)))
        total, (share, shares) = len(self._rows), self._shard
        # A piece that takes much of the memory would not be mixed with others, and one share would have it all.
        most = max(
            1, min(room // _PIECES if self._shuffle else room, -(-total // (_PIECES * shares)) if shares > 1 else total)
        )
        cut = [
            np.arange(start, stop, most) for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
        starts = np.concatenate([np.zeros(0, np.int64), *cut])
        pieces = np.stack([starts, np.append(starts[1:], total)[: len(starts)]], 1)
        if self._shuffle:
            pieces = np.random.default_rng(self._seed).permutation(pieces)
        pieces = pieces[share::shares]
        windows, first, held = [], 0, 0
        for i, (start, stop) in enumerate(pieces.tolist()):
            if held and held + stop - start > room:
                windows.append(pieces[first:i])
                first, held = i, 0
            held += stop - start
        if len(pieces) > first:
            windows.append(pieces[first:])
        return windows

    def _read(self, window: int) -> AnyBatch:
        """Read the rows of a window, mixed if they are to be."""
        rows = np.concatenate([np.arange(start, stop) for start, stop in self._windows[window].tolist()])
        batch = self._rows.take(rows)
        if not self._shuffle:
            return batch
        return take_rows(batch, np.random.default_rng([*self._seed, window]).permutation(len(rows)))

    def __iter__(self) -> Iterator[AnyBatch]:
        return self._delivery.each(self._each(), convert)

    def _each(self) -> Iterator[AnyBatch]:
        rest: AnyBatch | None = None
        wanted = self._size
        window, offset = self._window, self._offset
        while window < len(self._windows):
            batch, count = self._read(window), _count(self._windows[window])
            while count - offset >= wanted:
                part = take_rows(batch, np.arange(offset, offset + wanted))
                offset += wanted
                self._window, self._offset = window, offset
                yield part if rest is None else join([rest, part])
                rest, wanted = None, self._size
            if offset < count:
                left = take_rows(batch, np.arange(offset, count))
                rest = left if rest is None else join([rest, left])
                wanted -= count - offset
            window, offset = window + 1, 0
        self._window = self._offset = 0
        if rest is not None and not self._drop_last:
            yield rest

    def state_dict(self) -> dict[str, Any]:
        """Return the place between two batches, as plain values."""
        return {"seed": list(self._seed), "window": self._window, "offset": self._offset, "plan": self._checksum()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a place, with the next iteration.

        Raises
        ------
        ColumnMismatchError
            If it is one in another order of rows: of another seed, epoch, share or batch size, or of a dataset that has
            other rows or row groups by now.
        """
        if state["plan"] != self._checksum():
            raise ColumnMismatchError(
                "the state must be of the same rows, batch size, seed, epoch, memory and share, it is of others"
            )
        self._window, self._offset = int(state["window"]), int(state["offset"])

    def _checksum(self) -> int:
        settings = repr((self._size, self._shuffle, list(self._seed), self._drop_last, list(self._shard)))
        found = zlib.crc32(settings.encode())
        for window in self._windows:
            found = zlib.crc32(np.ascontiguousarray(window, "<i8").tobytes(), found)
        return found

    def share(self, share: int, shares: int) -> DatasetBatches:
        """Return the batches of a share of this share's rows."""
        own, all_shares = self._shard
        return DatasetBatches(
            self._rows,
            self._size,
            shuffle=self._shuffle,
            memory_nbytes=max(1, self._memory_nbytes // shares),
            seed=self._seed,
            drop_last=self._drop_last,
            shard=(own + all_shares * share, all_shares * shares),
            delivery=self._delivery,
        )

    def as_torch(self) -> Any:
        """Return an `IterableDataset` of torch's, of which each worker of a `DataLoader` reads its own share.

        Pass it with `batch_size=None`: it yields batches. The workers share the memory evenly. With `state_dict` and
        `load_state_dict`, loaders that keep their workers' states go on in mid-epoch.

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
    """Create the class, once torch is there."""
    require_torch()
    from torch.utils.data import IterableDataset, get_worker_info

    class TorchBatches(IterableDataset[Any]):
        """Batches for the workers of a `DataLoader`."""

        def __init__(self, batches: DatasetBatches) -> None:
            self._batches = batches
            self._own: DatasetBatches | None = None

        def _shared(self) -> DatasetBatches:
            if self._own is None:
                info = get_worker_info()
                self._own = self._batches if info is None else self._batches.share(info.id, info.num_workers)
            return self._own

        def __iter__(self) -> Iterator[AnyBatch]:
            return iter(self._shared())

        def state_dict(self) -> dict[str, Any]:
            """Return the place of this worker."""
            return self._shared().state_dict()

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            """Go on from the place of this worker."""
            self._shared().load_state_dict(state)

        def __reduce__(self) -> tuple[Any, ...]:
            return _make_torch_batches, (self._batches,)

    return TorchBatches


def _make_torch_batches(batches: DatasetBatches) -> Any:
    return _torch_class()(batches)


def _count(window: npt.NDArray[np.int64]) -> int:
    return int((window[:, 1] - window[:, 0]).sum())
