"""Batches of a dataset, one after the other, in order or shuffled within bounded memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import whole
from samplebatch.batch.delivery import Delivery
from samplebatch.errors import ArgumentError, ColumnMismatchError
from samplebatch.storage.batch_table import AnyBatch, convert, join, take_rows

if TYPE_CHECKING:
    from samplebatch.storage.dataset_rows import DatasetRows

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
    >>> path = dataset.append(SampleBatch(t=np.arange(8)))
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
        memory: int,
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
        self._memory = memory
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
        room = max(1, int(self._memory / _COPIES / max(1.0, self._rows.row_nbytes)))
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
            memory=max(1, self._memory // shares),
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
        >>> path = dataset.append(Batch(t=np.arange(8)))
        >>> loader = DataLoader(dataset.iter_batches(4).as_torch(), batch_size=None)
        >>> [batch.t.tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
        """
        return _torch_class()(self)


@cache
def _torch_class() -> Any:
    """Make the class, once torch is there."""
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
