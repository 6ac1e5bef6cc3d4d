"""Reading nested values from HDF5 files, which may come from anyone.

Every dataset is looked at before it is read: what it says it has is compared with the bytes of the file. Whatever HDF5
finds damaged is an error that names where. Heaps of strings are walked through before HDF5 does, which walks through
damaged ones for ever.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from samplebatch.batch.inert_pickle import is_plain, parts_of, read_pickle
from samplebatch.batch.nested.batch import Batch
from samplebatch.column.memory import MemoryBound
from samplebatch.column.types import named_torch_dtype
from samplebatch.column.unpickling import unpickle
from samplebatch.errors import ColumnTypeError, FormatError
from samplebatch.storage.foreign.damage import name_damage

if TYPE_CHECKING:
    import h5py


TYPE_KEY = "__data_type__"
DTYPE_KEY = "__torch_dtype__"

_OBJECT_NBYTES = 1 << 14
"""What a group, dataset or attribute counts for beside its values: few bytes can list one again and again."""

_MAX_DEPTH = 100
_STEP = 1 << 10
"""Strings that are read at once: they may all be one, that stands in the file once."""

_TEXT_NBYTES = 64
"""Bytes of an empty string with its place in an array."""

_MAX_UNFOLDED = 1 << 20
"""Values that may be in another beyond those that are there: so often may one be shared."""

Ranges = Sequence[tuple[int, int]]
"""Rows that count: where they begin and end."""


def bound_of(file: h5py.File, max_nbytes: int | None) -> MemoryBound:
    """Create the memory bound of a file."""
    return MemoryBound(repr(file.filename), file.id.get_filesize(), max_nbytes)


class Hdf5Reader:
    """A reader of the groups and datasets of one file, for values and buffers alike.

    Parameters
    ----------
    bound
        What memory may be made of the file.
    device
        Where tensors go.
    allow_pickle
        Whether to unpickle objects.
    rows
        How many rows columns have, and which of them count. Of numbers, the others are not read, but are zeros that
        take no memory.
    """

    def __init__(
        self,
        bound: MemoryBound,
        device: str | None = None,
        *,
        allow_pickle: bool = False,
        rows: tuple[int, Ranges] | None = None,
    ) -> None:
        self.bound = bound
        self.allow_pickle = allow_pickle
        self._device = device
        self._rows = rows

    def of_rows(self, count: int, ranges: Ranges) -> Hdf5Reader:
        """Return a reader of columns with a row for each slot, of which some count."""
        return Hdf5Reader(self.bound, self._device, allow_pickle=self.allow_pickle, rows=(count, ranges))

    def read(self, x: Any, depth: int = 0) -> Any:
        """Read a group as a dict or Batch, a dataset as its value; raises as `from_hdf5` does."""
        import h5py

        if isinstance(x, h5py.Dataset):
            return self.value(x)
        if depth > _MAX_DEPTH:
            raise FormatError(f"{x.name[:80]!r} must be a tree of groups, and some contain each other")
        values = self.attributes(x)
        is_batch = values.pop(TYPE_KEY, None) == "Batch"
        for name, child in self.children(x).items():
            values[name] = self.read(child, depth + 1)
        return Batch(values) if is_batch else values

    def attributes(self, x: Any) -> dict[str, Any]:
        """Return the attributes of a group or dataset, numbers as Python's.

        Attributes of other types are rejected: where the type is damaged, HDF5 reads outside of the file.
        """
        import h5py

        found: dict[str, Any] = {}
        with name_damage(f"{x.name!r}"):
            for name in x.attrs:
                self.bound.take(_OBJECT_NBYTES, f"attribute {name!r}")
                held = x.attrs.get_id(name)
                if held.dtype.kind not in "biufcS" and h5py.check_string_dtype(held.dtype) is None:
                    raise FormatError(f"attribute {name!r} of {x.name!r} must hold numbers or strings, it does not")
                self.bound.take(prod(held.shape) * max(_TEXT_NBYTES, held.dtype.itemsize), f"attribute {name!r}")
                value = x.attrs[name]
                found[name] = value.item() if isinstance(value, np.generic) else value
        return found

    def children(self, group: Any) -> dict[str, Any]:
        """Return the members of a group; rejects links, and datasets with values outside of the file."""
        import h5py

        found = {}
        with name_damage(f"{group.name!r}"):
            for name in group:
                self.bound.take(_OBJECT_NBYTES, f"{group.name}/{name}")
                child = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
                foreign = child is None or (isinstance(child, h5py.Dataset) and (child.external or child.is_virtual))
                if foreign or not isinstance(child, (h5py.Dataset, h5py.Group)):
                    raise FormatError(f"{group.name}/{name} must be in the file itself, and it is a link or a type")
                found[name] = child
        return found

    def value(self, dataset: Any) -> Any:
        """Read one value that was no dict and no batch; objects are unpickled with permission only."""
        with name_damage(f"{dataset.name!r}"):
            attributes = self.attributes(dataset)
            kind = attributes.get(TYPE_KEY, "ndarray")
            if kind == "Tensor":
                return self._tensor(dataset, str(attributes.get(DTYPE_KEY, "")))
            if kind == "ndarray":
                return self._array(dataset)
        value = self.inert(dataset)
        if is_plain(value):
            _check_unfolded(value, dataset.name)
            return value
        with name_damage(f"{dataset.name!r}"):
            return unpickle([self._bytes(dataset)], repr(dataset.name), allow_pickle=self.allow_pickle)[0]

    def inert(self, dataset: Any) -> Any:
        """Read a pickled value as data; see `read_pickle`."""
        with name_damage(f"{dataset.name!r}"):
            return read_pickle(self._bytes(dataset))

    def raw(self, dataset: Any) -> npt.NDArray[Any]:
        """Read the elements of a dataset as they are, without decoding."""
        with name_damage(f"{dataset.name!r}"):
            return self._array(dataset)

    def _bytes(self, dataset: Any) -> bytes:
        if dataset.dtype.itemsize != 1 or dataset.dtype.kind not in "iu" or dataset.ndim != 1:
            raise FormatError(
                f"{dataset.name!r} must hold the bytes of a pickle, got {dataset.dtype} of {dataset.shape}"
            )
        self._take(dataset, dataset.size)
        found: bytes = dataset[()].tobytes()
        return found

    def _take(self, dataset: Any, count: int, nbytes: int = 0) -> None:
        """Subtract elements of a dataset, by number, and one of their chunks from the bound."""
        nbytes = nbytes or dataset.dtype.itemsize
        chunk = prod(dataset.chunks) if dataset.chunks else 0
        self.bound.take((count + chunk) * nbytes, f"{dataset.name!r}")

    def _tensor(self, dataset: Any, name: str) -> Any:
        import torch

        tensor = torch.from_numpy(self._array(dataset))
        try:
            dtype = named_torch_dtype(name) if name else tensor.dtype
        except ColumnTypeError as error:
            raise FormatError(f"{dataset.name!r} must name a dtype of torch: {error}") from error
        return tensor.to(device=self._device, dtype=dtype)

    def _array(self, dataset: Any) -> npt.NDArray[Any]:
        import h5py

        strings = h5py.check_string_dtype(dataset.dtype)
        if strings is not None and strings.length is None:
            return self._strings(dataset, unicode=strings.encoding == "utf-8")
        dtype = dataset.dtype
        if dtype.kind not in "biufcS" and strings is None:
            raise ColumnTypeError(f"{dataset.name!r} has dtype {dtype}, which no column can hold")
        found = self._numbers(dataset)
        # Without the notes of h5py's that its dtypes carry along.
        return found.astype(np.dtype(found.dtype.str)) if found.dtype.metadata else found

    def _numbers(self, dataset: Any) -> npt.NDArray[Any]:
        """Read all of a dataset, or its rows that count."""
        shape = dataset.shape
        if self._rows is None or not shape or shape[0] != self._rows[0] or 0 in shape:
            self._take(dataset, dataset.size)
            return np.array(dataset)
        ranges = self._rows[1]
        self._take(dataset, prod(shape[1:]) * sum(stop - start for start, stop in ranges))
        found = np.zeros(shape, dataset.dtype)
        for start, stop in ranges:
            dataset.read_direct(found, np.s_[start:stop], np.s_[start:stop])
        return found

    def _strings(self, dataset: Any, *, unicode: bool) -> npt.NDArray[Any]:
        self._take(dataset, dataset.size, _TEXT_NBYTES)
        rows = dataset.asstr(errors="surrogateescape") if unicode else dataset
        if not dataset.shape:
            return np.array(rows[()], object)
        found = np.empty(dataset.shape, object)
        step = max(1, _STEP // max(1, prod(dataset.shape[1:])))
        for start in range(0, len(found), step):
            part = rows[start : start + step]
            self.bound.take(sum(map(len, part.ravel().tolist())), f"{dataset.name!r}")
            found[start : start + step] = part
        return found


def _check_unfolded(value: Any, name: str) -> None:
    """Reject values that contain themselves or share parts again and again: few bytes would make endless arrays."""
    sizes: dict[int, int] = {}
    held = 0
    left: list[tuple[Any, bool]] = [(value, False)]
    ancestors: set[int] = set()
    while left:
        item, seen = left.pop()
        parts = parts_of(item)
        if seen:
            ancestors.discard(id(item))
            sizes[id(item)] = 1 + sum(sizes.get(id(part), 1) for part in parts)
            if sizes[id(item)] > _MAX_UNFOLDED + held:
                raise FormatError(f"{name!r} must hold values once, it holds some again and again within each other")
        elif id(item) in ancestors:
            raise FormatError(f"{name!r} must hold values, and one of them contains itself")
        elif parts and id(item) not in sizes:
            held += len(parts)
            ancestors.add(id(item))
            left.append((item, True))
            left += [(part, False) for part in parts]


_START = b"GCOL\x01\0\0\0"
"""How a heap begins: magic, version, and three bytes of nothing."""

_MAGIC = int.from_bytes(_START[:4], "little")

_OBJECT = struct.Struct("<H6xQ")
"""Number of an object, 0 for free space, and its bytes."""

_PIECE = 1 << 20
"""Bytes that are looked through at once."""


def check_heaps(path: str) -> None:
    """Check that every heap of strings has an end.

    Heaps are looked for everywhere: HDF5 puts them at any byte.
    """
    if not os.path.isfile(path) or os.path.getsize(path) < len(_START):
        return
    data: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
    for start in range(0, len(data), _PIECE):
        for place in _magic_places(data[start : start + _PIECE + 3]):
            if data[start + place : start + place + len(_START)].tobytes() == _START:
                _check_heap(data, start + place, path)


def _magic_places(data: npt.NDArray[np.uint8]) -> Iterator[int]:
    """Find the magic of heaps, as words at each of four alignments."""
    for shift in range(4):
        words = data[shift : shift + (len(data) - shift) // 4 * 4].view("<u4")
        yield from (4 * np.flatnonzero(words == _MAGIC) + shift).tolist()


def _check_heap(data: npt.NDArray[np.uint8], start: int, path: str) -> None:
    head = data[start : start + 16].tobytes()
    end = min(len(data), start + int.from_bytes(head[8:], "little"))
    place = start + 16
    while place + 16 <= end:
        number, nbytes = _OBJECT.unpack(data[place : place + 16].tobytes())
        # HDF5 adds with 64 bits, so that a size above all others brings it back to where it was.
        step = 16 + -(-nbytes // 8) * 8 if number else nbytes
        if step < 16 or step > end - place:
            raise FormatError(f"{path!r} must have heaps of strings that end, and one at {start} does not; damaged")
        place += step
