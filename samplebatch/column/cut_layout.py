"""CutLayout: Arrow streams that are alike up to their numbers, and are sent without their large columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from samplebatch.column import memory
from samplebatch.column.stream_layout import Bytes, StreamLayout

LARGE_NBYTES: Final = 1 << 15
"""Bytes from which a column is cut out of its stream."""

Spans = list[list[int]]
"""Places in a stream, in order: the first byte of each, and its bytes."""


class CutLayout:
    """Layout of Arrow streams of one form without their large columns, for writers and readers that send these apart.

    To write a stream takes a copy of each column. A large column that is cut out is sent from where it lies, and viewed
    where it was received; the rest of the stream is written.

    Parameters
    ----------
    whole
        The layout of whole streams.
    rest
        That of streams without the large columns.
    large
        The names of these, in the order of their bytes.

    Attributes
    ----------
    rest
        As given.
    spans
        The places of the large columns in a whole stream.

    Examples
    --------
    >>> import pyarrow as pa
    >>> from samplebatch.column.tensor import TensorColumn
    >>> rows = pa.record_batch({"a": np.zeros(5000), "b": np.zeros(5000, "i1")})
    >>> sink = pa.BufferOutputStream()
    >>> with pa.ipc.new_stream(sink, rows.schema) as writer:
    ...     writer.write_batch(rows)
    >>> stream = np.frombuffer(sink.getvalue(), np.uint8)
    >>> read = pa.ipc.open_stream(stream).read_next_batch()
    >>> columns = {name: TensorColumn(read[name].to_numpy()) for name in read.column_names}
    >>> layout = CutLayout.find(StreamLayout.find(stream, read, columns))
    >>> numbers = {"a": np.arange(5000.0), "b": np.ones(5000, "i1")}
    >>> rest = np.empty(layout.rest.nbytes, np.uint8)
    >>> layout.rest.write(layout.small(numbers), rest)
    >>> parts = layout.parts(numbers)
    >>> [part.nbytes for part in parts], rest.nbytes + 40000 == stream.nbytes
    ([40000], True)
    >>> layout.read(rest, parts)["a"][:3]
    array([0., 1., 2.])
    """

    __slots__ = ("_large", "_places", "rest", "spans")

    def __init__(self, whole: StreamLayout, rest: StreamLayout, large: Sequence[str]) -> None:
        self.rest = rest
        self._places = whole.places
        self._large = tuple(large)
        self.spans: Spans = [[self._places[name].start, self._places[name].nbytes] for name in large]

    @classmethod
    def find(cls, whole: StreamLayout) -> Self | None:
        """Find the layout of streams without their large columns; None if they have none."""
        places = whole.places
        large = sorted(
            (name for name in places if places[name].nbytes >= LARGE_NBYTES), key=lambda name: places[name].start
        )
        if not large:
            return None
        stream = memory.zeros((whole.nbytes,), np.dtype(np.uint8))
        whole.write_beside(stream)
        cut = [(places[name].start, places[name].start + places[name].nbytes) for name in large]
        small = {
            name: place._replace(start=place.start - sum(stop - start for start, stop in cut if start < place.start))
            for name, place in places.items()
            if name not in large
        }
        return cls(whole, StreamLayout(small, np.concatenate(_outside(stream, cut)), whole.head), large)

    # Writing

    def parts(self, columns: Mapping[str, npt.NDArray[Any]]) -> list[Bytes]:
        """View the bytes of the large columns, shape (n,) each, in the order of `spans`."""
        return [np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8) for name in self._large]

    def small(self, columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the other columns, which `rest` writes."""
        return {name: columns[name] for name in self.rest.places}

    # Reading

    def read(self, rest: Bytes, parts: Sequence[Bytes]) -> dict[str, npt.NDArray[Any]] | None:
        """View all columns of a stream that was cut; None if it has another layout.

        Parameters
        ----------
        rest
            The stream without the large columns, which begins with the head of the layout, shape (n,).
        parts
            The bytes of the large columns, shape (n,) each.
        """
        if not self.rest.matches(rest) or [part.nbytes for part in parts] != [nbytes for _, nbytes in self.spans]:
            return None
        found = self.rest.read(rest)
        for name, part in zip(self._large, parts, strict=True):
            place = self._places[name]
            found[name] = memory.as_array(part, place.dtype, place.shape)
        return {name: found[name] for name in self._places}


def join_stream(rest: Bytes, parts: Sequence[Bytes], spans: Any) -> Bytes | None:
    """Put a stream that was cut together again, shape (n,); None if the places are not those of the parts.

    Examples
    --------
    >>> join_stream(np.array([1, 4], np.uint8), [np.array([2, 3], np.uint8)], [[1, 2]])
    array([1, 2, 3, 4], dtype=uint8)
    >>> join_stream(np.array([1, 4], np.uint8), [np.array([2, 3], np.uint8)], [[3, 2]]) is None
    True
    """
    stream = memory.empty((rest.nbytes + sum(part.nbytes for part in parts),), np.dtype(np.uint8))
    if not isinstance(spans, list) or len(spans) != len(parts):
        return None
    taken = done = 0
    for span, part in zip(spans, parts, strict=True):
        start = span[0] if isinstance(span, list) and len(span) == 2 and span[1] == part.nbytes else None
        before = start - done if isinstance(start, int) else -1
        if not 0 <= before <= rest.nbytes - taken:
            return None
        stream[done : done + before] = rest[taken : taken + before]
        taken, done = taken + before, done + before + part.nbytes
        stream[done - part.nbytes : done] = part
    stream[done:] = rest[taken:]
    return stream


def _outside(stream: Bytes, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
    """Cut the pieces of a stream that lie outside of spans, in order."""
    cuts = [0, *(cut for span in spans for cut in span), stream.nbytes]
    return [stream[first:second] for first, second in list(pairwise(cuts))[::2]]
