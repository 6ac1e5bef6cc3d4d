"""Segment files that contain the rows of successive checkpoints; each checkpoint writes only changed groups of rows.

The rows of each ring of a table are split into groups of consecutive rows. The checkpoint contains a manifest, which
lists the segment number, offset, size and digest of each group. A group is not written if its digest equals the digest
at the same position in the previous checkpoint: the manifest then refers to the existing segment. Groups are compared
by content, so that in-place changes of rows are detected.

The caller replaces the checkpoint atomically between the calls to `SegmentWriter.write` and
`SegmentWriter.remove_unreferenced`. Therefore all segments of the newest checkpoint exist even if the process is
killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch.arguments import describe_value
from samplebatch.batch.frame import dump_columns, load_columns
from samplebatch.column.compressed import CompressedColumn
from samplebatch.column.interface import Column
from samplebatch.column.memory import as_bytes
from samplebatch.errors import ColumnMismatchError, FormatError, SampleBatchError
from samplebatch.storage.files import replacing, sync

Manifest = dict[str, Any]
"""Locations of a table's rows: `rows_per_group`; `rings`: number of groups per ring; `groups`: array of segment, offset
and size of each group, int64 of shape (n, 3); `digests`: array of uint8, shape (n, 16)."""

_GROUP_NBYTES = (1 << 14, 1 << 16)
"""Minimum and maximum size of a group, about 1/2048 of a table: one changed row writes its group, and each group
requires 40 bytes of every manifest."""

_SEGMENT_NBYTES = 1 << 26
"""Approximate maximum size of a segment: obsolete rows of a ring buffer free segments one after another."""

_DIGEST_NBYTES = 16
_LENGTH = struct.Struct("<Q")
_NAME = re.compile(r"rows-([0-9]{1,15})\.bin")


def encode_columns(columns: Sequence[Column]) -> bytes:
    """Serialize columns for `decode_columns`.

    >>> from samplebatch.column.tensor import TensorColumn
    >>> decode_columns(encode_columns([TensorColumn(np.arange(3))]), "bytes")[0].values
    array([0, 1, 2])
    """
    return b"".join(_parts(columns))


def decode_columns(data: Any, source: str, *, allow_pickle: bool = False) -> list[Column]:
    """Decode the result of `encode_columns` to columns that are views of the bytes.

    Raises FormatError if the bytes are not the result of `encode_columns`. Raises UntrustedPickleError if a column is
    pickled and `allow_pickle` is false.
    """
    view = memoryview(data).cast("B")
    try:
        (length,) = _LENGTH.unpack_from(view)
        header, sizes = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length]))
        buffers, at = [], _LENGTH.size + length
        for size in sizes:
            if type(size) is not int or not 0 <= size <= len(view) - at:
                raise ValueError(f"a buffer must have at most {len(view) - at} bytes, got {size}")
            buffers.append(view[at : at + size])
            at += size
        if at != len(view):
            raise ValueError(f"the buffers must have {len(view)} bytes, got {at}")
        return list(load_columns(_tuples(header), buffers, allow_pickle=allow_pickle).values())
    except SampleBatchError:
        raise
    except (struct.error, ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        raise FormatError(f"{source} must contain encoded columns: {error}; it is damaged") from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _parts(columns: Sequence[Column]) -> list[bytes | memoryview]:
    """Encode columns as a list of bytes: header length, header, and uncopied column buffers."""
    header, buffers = dump_columns({str(index): column for index, column in enumerate(columns)})
    views = [memoryview(as_bytes(buffer) if isinstance(buffer, np.ndarray) else buffer).cast("B") for buffer in buffers]
    encoded = json.dumps([header, [view.nbytes for view in views]]).encode()
    return [_LENGTH.pack(len(encoded)), encoded, *views]


@contextlib.contextmanager
def locked_checkpoint(folder: Path, *, exclusive: bool) -> Iterator[None]:
    """Lock a folder, so that no process removes segments that another process is about to read or reference."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Some network file systems do not support folder locks.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


class SegmentWriter:
    """Writer of segments that contain the rows of one checkpoint.

    Call `add` for each table, then `write`. Call `remove_unreferenced` after the checkpoint has been replaced.

    folder: folder of the checkpoint and its segments.
    previous: manifests of the previous checkpoint, in the order in which the tables were added.

    >>> import tempfile
    >>> from samplebatch.column.tensor import TensorColumn
    >>> folder, values = Path(tempfile.mkdtemp()), np.arange(100_000)
    >>> first = SegmentWriter(folder)
    >>> manifest = first.add([TensorColumn(values)], [100_000])
    >>> first.write()
    >>> values[7] = -1
    >>> second = SegmentWriter(folder, [manifest])
    >>> changed = second.add([TensorColumn(values)], [100_000])
    >>> second.write()
    >>> [path.stat().st_size // 1000 for path in sorted(folder.iterdir())]
    [802, 16]
    >>> read_rows(folder, changed)[0].values[5:9]
    array([ 5,  6, -1,  8])
    """

    def __init__(self, folder: Path, previous: Sequence[Manifest] = ()) -> None:
        self._folder = folder
        self._previous = previous
        self._tables: list[_Table] = []
        self._sizes = {number: (folder / name).stat().st_size for number, name in _segments(folder)}
        self._written: list[Path] = []

    def add(self, columns: Sequence[Column], ring_rows: Sequence[int]) -> Manifest:
        """Add a table's columns, with rows ordered by ring; return the table's manifest, to be completed by `write`."""
        number = len(self._tables)
        table = _Table(columns, ring_rows, self._previous[number] if number < len(self._previous) else None)
        self._tables.append(table)
        return table.manifest

    def write(self) -> None:
        """Write changed groups to new segments, and sync them to disk.

        Raises OSError if the segments cannot be written, for example because the disk is full. After an error, all new
        segments are removed.
        """
        for table in self._tables:
            table.find_unchanged(self._sizes)
        self._compact()
        try:
            self._write_segments()
            if self._written:
                sync(self._folder)
        except BaseException:
            self.discard()
            raise
        for table in self._tables:
            table.complete_manifest()

    def _compact(self) -> None:
        """Mark groups of sparse segments as changed, so that all segments are at most twice as large as all groups."""
        locations = np.concatenate([table.groups for table in self._tables] or [np.zeros((0, 3), np.int64)])
        live = {segment: 0 for segment in np.unique(locations[:, 0]).tolist() if segment >= 0}
        for segment in live:
            live[segment] = int(locations[locations[:, 0] == segment, 2].sum())
        total, live_total = sum(self._sizes[segment] for segment in live), sum(live.values())
        for segment in sorted(live, key=lambda segment: live[segment] / self._sizes[segment]):
            if total <= 2 * live_total:
                break
            total -= self._sizes[segment] - live[segment]
            for table in self._tables:
                table.groups[table.groups[:, 0] == segment] = -1

    def _write_segments(self) -> None:
        pending = [
            (table, group) for table in self._tables for group in np.flatnonzero(table.groups[:, 0] < 0).tolist()
        ]
        segment, at = max(self._sizes, default=-1) + 1, 0
        while at < len(pending):
            path = self._folder / f"rows-{segment}.bin"
            with replacing(path, unnamed=True) as file:
                offset = 0
                while at < len(pending) and offset < _SEGMENT_NBYTES:
                    table, group = pending[at]
                    parts = table.encode(group)
                    for part in parts:
                        file.write(part)
                    nbytes = sum(map(len, parts))
                    table.groups[group] = segment, offset, nbytes
                    # Pickles of the same objects may differ.
                    table.digests[group] = np.frombuffer(_digest(parts), np.uint8)
                    offset += nbytes
                    at += 1
            self._written.append(path)
            segment += 1

    def discard(self) -> None:
        """Remove the new segments of the incomplete checkpoint."""
        for path in self._written:
            path.unlink(missing_ok=True)

    def remove_unreferenced(self) -> None:
        """Sync the folder, then remove unreferenced segments and the temporary files of killed processes."""
        sync(self._folder)
        referenced = {segment for table in self._tables for segment in np.unique(table.groups[:, 0]).tolist()}
        obsolete = [name for number, name in _segments(self._folder) if number not in referenced]
        for name in [*obsolete, *(path.name for path in self._folder.glob(".rows-*.bin.*.tmp"))]:
            (self._folder / name).unlink(missing_ok=True)


def _segments(folder: Path) -> list[tuple[int, str]]:
    return [(int(match[1]), name) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]


def _digest(parts: Iterable[bytes | memoryview]) -> bytes:
    # The digest is cryptographic, because rows with equal digests are treated as equal.
    digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


class _Table:
    """Columns of a table that are split into groups of rows.

    manifest: locations of the groups; complete once the groups are written.
    groups: segment, offset and size of each group, shape (n, 3); the segment is -1 before the group is written.
    digests: digest of each group.
    """

    def __init__(self, columns: Sequence[Column], ring_rows: Sequence[int], previous: Manifest | None) -> None:
        self._columns = columns
        self._previous = previous
        rows = len(columns[0])
        nbytes = sum(column.nbytes for column in columns)
        group_nbytes = min(max(nbytes >> 11, _GROUP_NBYTES[0]), _GROUP_NBYTES[1])
        rows_per_group = max(1, group_nbytes * rows // max(1, nbytes))
        earlier = 0 if previous is None else previous["rows_per_group"]
        if rows_per_group <= 4 * earlier <= 16 * rows_per_group:
            # The size of compressed rows varies; another split would write all rows again.
            rows_per_group = earlier
        self._ranges: list[tuple[int, int]] = []
        counts, start = [], 0
        for count in ring_rows:
            starts = range(start, start + count, rows_per_group)
            self._ranges += [(at, min(at + rows_per_group, start + count)) for at in starts]
            counts.append(len(starts))
            start += count
        self.manifest: Manifest = {"rows_per_group": rows_per_group, "rings": counts}
        self.groups = np.full((len(self._ranges), 3), -1, np.int64)
        self.digests = np.zeros((len(self._ranges), _DIGEST_NBYTES), np.uint8)

    def encode(self, group: int) -> list[bytes | memoryview]:
        """Serialize the rows of a group."""
        start, stop = self._ranges[group]
        return _parts([column.slice(_boundary(column, start), _boundary(column, stop)) for column in self._columns])

    def find_unchanged(self, sizes: Mapping[int, int]) -> None:
        """Compute all digests, and set the locations of groups that are unchanged since the previous checkpoint."""
        for group in range(len(self._ranges)):
            self.digests[group] = np.frombuffer(_digest(self.encode(group)), np.uint8)
        previous = self._previous
        if previous is None or previous["rows_per_group"] != self.manifest["rows_per_group"]:
            return
        groups, digests = check_manifest(previous)
        start = earlier_start = 0
        for count, earlier in zip(self.manifest["rings"], previous["rings"], strict=False):
            common = min(count, earlier)
            now, then = slice(start, start + common), slice(earlier_start, earlier_start + common)
            is_equal = (self.digests[now] == digests[then]).all(1)
            self.groups[now][is_equal] = groups[then][is_equal]
            start, earlier_start = start + count, earlier_start + earlier
        # Groups whose segment was removed or truncated are written again.
        stops = self.groups[:, 1:].sum(1).tolist()
        is_missing = [
            stop > sizes.get(segment, -1) for segment, stop in zip(self.groups[:, 0].tolist(), stops, strict=True)
        ]
        self.groups[np.array(is_missing, np.bool_)] = -1

    def complete_manifest(self) -> None:
        """Store the locations and digests of the groups in the manifest."""
        self.manifest |= {"groups": self.groups, "digests": self.digests}


def _boundary(column: Column, row: int) -> int:
    """Return the first boundary of compressed blocks at or after a row, so that groups do not split blocks."""
    if not isinstance(column, CompressedColumn):
        return row
    return column.bounds[bisect_left(column.bounds, row)]


def read_rows(folder: Path, manifest: Any, *, allow_pickle: bool = False) -> list[Column]:
    """Read the columns of a table from its segments.

    folder: folder of the segments.
    manifest: complete manifest, validated by this function.
    allow_pickle: whether pickled objects in columns may be unpickled.

    Raises FormatError if a segment is missing or damaged, or the manifest is invalid. Raises UntrustedPickleError if a
    column is pickled and `allow_pickle` is false.
    """
    groups, digests = check_manifest(manifest)
    parts: list[list[Column]] = []
    file, opened = None, -1
    try:
        for (segment, offset, nbytes), digest in zip(groups.tolist(), digests, strict=True):
            path = folder / f"rows-{segment}.bin"
            if segment != opened:
                if file is not None:
                    file.close()
                if not path.is_file():
                    raise FormatError(f"{str(path)!r} must contain rows of the checkpoint, got no file")
                file, opened = path.open("rb"), segment
            assert file is not None
            size = os.fstat(file.fileno()).st_size
            if nbytes > size - offset:
                raise FormatError(f"{str(path)!r} must have {offset + nbytes} bytes, got {size}; it is damaged")
            file.seek(offset)
            data = file.read(nbytes)
            if hashlib.blake2b(data, digest_size=_DIGEST_NBYTES).digest() != digest.tobytes():
                raise FormatError(f"{str(path)!r} must match its digests, got changed bytes; it is damaged")
            parts.append(decode_columns(data, repr(str(path)), allow_pickle=allow_pickle))
    finally:
        if file is not None:
            file.close()
    if any(len(columns) != len(parts[0]) for columns in parts):
        counts = sorted({len(columns) for columns in parts})[:8]
        raise FormatError(
            f"groups of rows in {str(folder)!r} must have equal columns, got {counts} columns; "
            "the checkpoint is damaged"
        )
    return [_join(columns, folder) for columns in zip(*parts, strict=True)]


def _join(columns: Sequence[Column], folder: Path) -> Column:
    try:
        kinds = sorted({type(column).__name__ for column in columns})
        if len(kinds) > 1:
            raise ColumnMismatchError(f"a column must have the same type in all groups, got {' and '.join(kinds)}")
        return type(columns[0]).concat(columns, "column")
    except SampleBatchError as error:
        raise FormatError(
            f"groups of rows in {str(folder)!r} must have equal columns: {error}; the checkpoint is damaged"
        ) from error


def _describe(value: Any) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def check_manifest(manifest: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Validate a manifest; return its groups and digests.

    Raises FormatError if the manifest is invalid.
    """
    try:
        groups, digests = manifest["groups"], manifest["digests"]
        if not (isinstance(groups, np.ndarray) and groups.dtype == np.int64 and groups.shape[1:] == (3,)):
            raise ValueError(f"locations must be integers of shape (n, 3), got {_describe(groups)}")
        if not (isinstance(digests, np.ndarray) and digests.dtype == np.uint8 and digests.shape[1:] == (16,)):
            raise ValueError(f"digests must be bytes of shape (n, 16), got {_describe(digests)}")
        counts = [manifest["rows_per_group"], *manifest["rings"]]
        for count in counts:
            if type(count) is not int or count < 0:
                raise ValueError(f"counts must be integers of at least 0, got {describe_value(count)}")
        if not len(groups) == len(digests) == sum(manifest["rings"]) > 0:
            raise ValueError(f"it must have one location and digest per group, got {len(groups)} and {len(digests)}")
        if groups.min() < 0 or groups.max() >= 1 << 48 or not groups[:, 2].all():
            raise ValueError("locations must be non-negative and below 2^48 with positive sizes, got others")
        # A manifest that lists a group repeatedly could require any amount of memory.
        segments, offsets, sizes = groups[np.lexsort((groups[:, 1], groups[:, 0]))].T
        if ((segments[1:] == segments[:-1]) & (offsets[1:] < offsets[:-1] + sizes[:-1])).any():
            raise ValueError("locations must be disjoint, got overlapping groups")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"rows of a checkpoint must have a valid manifest: {error}; it is damaged") from error
    return groups, digests
