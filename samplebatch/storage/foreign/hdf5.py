"""Reader of nested values from untrusted HDF5 files.

The declared size of every dataset is compared with the bytes of the file before the dataset is read. Errors that HDF5
raises for damaged bytes are translated to library errors that contain the location. String heaps are validated first,
because HDF5 does not terminate on damaged heaps.
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
"""Bytes counted per group, dataset or attribute besides its values: few bytes can list one repeatedly."""

_MAX_DEPTH = 100
_STEP = 1 << 10
"""Strings read at once: all of them may reference one string in the file."""

_TEXT_NBYTES = 64
"""Bytes of an empty string and its reference in an array."""

_MAX_UNFOLDED = 1 << 20
"""Maximum number of values after expansion of shared values, beyond those stored."""

Ranges = Sequence[tuple[int, int]]
"""Ranges of rows to read: start and stop."""


def bound_of(file: h5py.File, max_nbytes: int | None) -> MemoryBound:
    """Create the memory bound of an open HDF5 file."""
    return MemoryBound(repr(file.filename), file.id.get_filesize(), max_nbytes)


class Hdf5Reader:
    """Reader of the groups and datasets of one HDF5 file with nested values or a buffer.

    rows: number of rows per column, and ranges of rows to read. In numeric columns, rows outside the ranges are zeros
    that occupy no memory.
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
        """Return a reader of columns with one row per slot; the reader reads only the specified ranges of slots."""
        return Hdf5Reader(self.bound, self._device, allow_pickle=self.allow_pickle, rows=(count, ranges))

    def read(self, x: Any, depth: int = 0) -> Any:
        """Decode a group to a dict or Batch, or a dataset to its value.

        Raises the same errors as `from_hdf5`.
        """
        import h5py

        if isinstance(x, h5py.Dataset):
            return self.value(x)
        if depth > _MAX_DEPTH:
            raise FormatError(f"{x.name[:80]!r} must be a tree of groups, got groups that contain each other")
        values = self.attributes(x)
        is_batch = values.pop(TYPE_KEY, None) == "Batch"
        for name, child in self.children(x).items():
            values[name] = self.read(child, depth + 1)
        return Batch(values) if is_batch else values

    def attributes(self, x: Any) -> dict[str, Any]:
        """Return the attributes of a group or dataset; numbers are converted to Python numbers.

        Attributes of unsupported types are rejected, because HDF5 reads outside the file if an attribute's type is
        damaged.
        """
        import h5py

        values: dict[str, Any] = {}
        with name_damage(f"{x.name!r}"):
            for name in x.attrs:
                self.bound.take(_OBJECT_NBYTES, f"attribute {name!r}")
                attribute = x.attrs.get_id(name)
                if attribute.dtype.kind not in "biufcS" and h5py.check_string_dtype(attribute.dtype) is None:
                    raise FormatError(
                        f"attribute {name!r} of {x.name!r} must be numeric or a string, got {attribute.dtype}"
                    )
                self.bound.take(
                    prod(attribute.shape) * max(_TEXT_NBYTES, attribute.dtype.itemsize), f"attribute {name!r}"
                )
                value = x.attrs[name]
                values[name] = value.item() if isinstance(value, np.generic) else value
        return values

    def children(self, group: Any) -> dict[str, Any]:
        """Return the members of a group; links and datasets with external values are rejected."""
        import h5py

        members = {}
        with name_damage(f"{group.name!r}"):
            for name in group:
                self.bound.take(_OBJECT_NBYTES, f"{group.name}/{name}")
                child = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
                foreign = child is None or (isinstance(child, h5py.Dataset) and (child.external or child.is_virtual))
                if foreign or not isinstance(child, (h5py.Dataset, h5py.Group)):
                    raise FormatError(f"{group.name}/{name} must be in the file itself, got a link or a type")
                members[name] = child
        return members

    def value(self, dataset: Any) -> Any:
        """Read one value that is not a dict or batch; objects are unpickled only if permitted."""
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
        """Decode a pickled value as data; see `read_pickle`."""
        with name_damage(f"{dataset.name!r}"):
            return read_pickle(self._bytes(dataset))

    def raw(self, dataset: Any) -> npt.NDArray[Any]:
        """Read the elements of a dataset without decoding."""
        with name_damage(f"{dataset.name!r}"):
            return self._array(dataset)

    def _bytes(self, dataset: Any) -> bytes:
        if dataset.dtype.itemsize != 1 or dataset.dtype.kind not in "iu" or dataset.ndim != 1:
            raise FormatError(
                f"{dataset.name!r} must contain the bytes of a pickle, got {dataset.dtype} of {dataset.shape}"
            )
        self._take(dataset, dataset.size)
        data: bytes = dataset[()].tobytes()
        return data

    def _take(self, dataset: Any, count: int, nbytes: int = 0) -> None:
        """Subtract the memory of `count` elements and one chunk from the memory bound."""
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
            raise ColumnTypeError(f"{dataset.name!r} must have a dtype that columns support, got {dtype}")
        array = self._numbers(dataset)
        # Remove h5py's dtype metadata.
        return array.astype(np.dtype(array.dtype.str)) if array.dtype.metadata else array

    def _numbers(self, dataset: Any) -> npt.NDArray[Any]:
        shape = dataset.shape
        if self._rows is None or not shape or shape[0] != self._rows[0] or 0 in shape:
            self._take(dataset, dataset.size)
            return np.array(dataset)
        ranges = self._rows[1]
        self._take(dataset, prod(shape[1:]) * sum(stop - start for start, stop in ranges))
        array = np.zeros(shape, dataset.dtype)
        for start, stop in ranges:
            dataset.read_direct(array, np.s_[start:stop], np.s_[start:stop])
        return array

    def _strings(self, dataset: Any, *, unicode: bool) -> npt.NDArray[Any]:
        self._take(dataset, dataset.size, _TEXT_NBYTES)
        rows = dataset.asstr(errors="surrogateescape") if unicode else dataset
        if not dataset.shape:
            return np.array(rows[()], object)
        array = np.empty(dataset.shape, object)
        step = max(1, _STEP // max(1, prod(dataset.shape[1:])))
        for start in range(0, len(array), step):
            part = rows[start : start + step]
            self.bound.take(sum(map(len, part.ravel().tolist())), f"{dataset.name!r}")
            array[start : start + step] = part
        return array


def _check_unfolded(value: Any, name: str) -> None:
    """Reject recursive and repeatedly shared values, because their expanded size could be unlimited."""
    sizes: dict[int, int] = {}
    stored = 0
    pending: list[tuple[Any, bool]] = [(value, False)]
    ancestors: set[int] = set()
    while pending:
        item, is_visited = pending.pop()
        parts = parts_of(item)
        if is_visited:
            ancestors.discard(id(item))
            sizes[id(item)] = 1 + sum(sizes.get(id(part), 1) for part in parts)
            if sizes[id(item)] > _MAX_UNFOLDED + stored:
                raise FormatError(f"{name!r} must share values less often, got too many nested repetitions")
        elif id(item) in ancestors:
            raise FormatError(f"{name!r} must not contain itself, got a recursive value")
        elif parts and id(item) not in sizes:
            stored += len(parts)
            ancestors.add(id(item))
            pending.append((item, True))
            pending += [(part, False) for part in parts]


_START = b"GCOL\x01\0\0\0"
"""Start of a heap: magic, version, and three zero bytes."""

_MAGIC = int.from_bytes(_START[:4], "little")

_OBJECT = struct.Struct("<H6xQ")
"""Header of an object: number, 0 for free space, and size."""

_PIECE = 1 << 20
"""Bytes searched at once."""


def check_heaps(path: str) -> None:
    """Check that every string heap is terminated.

    The entire file is searched, because heaps can be at any offset of an HDF5 file.
    """
    if not os.path.isfile(path) or os.path.getsize(path) < len(_START):
        return
    data: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
    for start in range(0, len(data), _PIECE):
        for offset in _magic_places(data[start : start + _PIECE + 3]):
            if data[start + offset : start + offset + len(_START)].tobytes() == _START:
                _check_heap(data, start + offset, path)


def _magic_places(data: npt.NDArray[np.uint8]) -> Iterator[int]:
    """Yield the offsets of the heap magic, found by a comparison of 4-byte words at each of four alignments."""
    for shift in range(4):
        words = data[shift : shift + (len(data) - shift) // 4 * 4].view("<u4")
        yield from (4 * np.flatnonzero(words == _MAGIC) + shift).tolist()


def _check_heap(data: npt.NDArray[np.uint8], start: int, path: str) -> None:
    head = data[start : start + 16].tobytes()
    end = min(len(data), start + int.from_bytes(head[8:], "little"))
    offset = start + 16
    while offset + 16 <= end:
        number, nbytes = _OBJECT.unpack(data[offset : offset + 16].tobytes())
        # HDF5 adds with 64 bits, so that a huge size wraps around to an earlier offset.
        step = 16 + -(-nbytes // 8) * 8 if number else nbytes
        if step < 16 or step > end - offset:
            raise FormatError(f"{path!r} must have heaps of strings that end, got an endless one at {start}; damaged")
        offset += step
