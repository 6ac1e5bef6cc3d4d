"""Structs in Thrift's compact protocol, as Parquet describes itself with, read as numbers of fields and values.

pyarrow ends the process at some damaged descriptions, and does not tell how large the pages of a file are.
"""

from __future__ import annotations

import struct
from typing import Any

from samplebatch.errors import FormatError

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_MAX_DEPTH = 16

Struct = dict[int, Any]
"""Values of a struct by the numbers of their fields: int, bool, float, bytes, list, Struct; of a map, None."""


class ThriftReader:
    """A reader of structs, one after the other.

    Examples
    --------
    >>> reader = ThriftReader(memoryview(bytes([0x15, 0x06, 0x18, 1, 65, 0, 9])))
    >>> reader.struct(), reader.place
    ({1: 3, 2: b'A'}, 6)
    """

    def __init__(self, view: memoryview, place: int = 0) -> None:
        self._view = view
        self.place = place

    def struct(self, depth: int = 0) -> Struct:
        """Read a struct.

        Raises
        ------
        FormatError
            If there is none.
        """
        if depth > _MAX_DEPTH:
            raise FormatError("a description must be flat, it is deeper than any that Parquet has")
        found: Struct = {}
        field = 0
        while (head := self._byte()) != 0:
            field = field + (head >> 4) if head >> 4 else self._zigzag()
            found[field] = self._value(head & 15, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _BYTE:
            return self._byte()
        if kind in (_I16, _I32, _I64):
            return self._zigzag()
        if kind == _DOUBLE:
            return struct.unpack("<d", self._bytes(8))[0]
        if kind == _BINARY:
            return bytes(self._bytes(self._varint()))
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind == _STRUCT:
            return self.struct(depth + 1)
        raise FormatError(f"a description must have values of types that Parquet has, it has one of type {kind}")

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        count, kind = head >> 4, head & 15
        if count == 15:
            count = self._varint()
        if count > len(self._view) - self.place:
            raise FormatError("a description must end where its bytes do, it does not; it is cut short")
        if kind in (_TRUE, _FALSE):
            return [self._byte() == _TRUE for _ in range(count)]
        return [self._value(kind, depth) for _ in range(count)]

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _bytes(self, count: int) -> memoryview:
        found = self._view[self.place : self.place + count]
        if len(found) < count:
            raise FormatError("a description must end where its bytes do, it does not; it is cut short")
        self.place += count
        return found

    def _varint(self) -> int:
        found = shift = 0
        while True:
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
            shift += 7
            if shift > 63:
                raise FormatError("a description must have numbers of 64 bits, it has a longer one")

    def _zigzag(self) -> int:
        found = self._varint()
        return (found >> 1) ^ -(found & 1)
