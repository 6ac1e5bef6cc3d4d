"""Structs in Thrift's compact protocol, as Parquet describes itself with, read as numbers of fields and values.

pyarrow ends the process at some damaged descriptions, and does not tell how large the pages of a file are.
"""

from __future__ import annotations

import struct
from typing import Any

from samplebatch.errors import FormatError

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_NUMBERS = frozenset((_I16, _I32, _I64))
_MAX_DEPTH = 16

Data = bytes | memoryview
Struct = dict[int, Any]
"""Values of a struct by the numbers of their fields: int, bool, float, bytes, list, Struct; of a map, None."""


class ThriftReader:
    """A reader of structs, one after the other.

    Examples
    --------
    >>> reader = ThriftReader(bytes([0x15, 0x06, 0x18, 1, 65, 0, 9]))
    >>> reader.struct(), reader.place
    ({1: 3, 2: b'A'}, 6)
    """

    def __init__(self, data: Data, place: int = 0) -> None:
        self._data = data
        self.place = place

    def struct(self) -> Struct:
        """Read a struct.

        Raises
        ------
        FormatError
            If there is none.
        """
        try:
            found, self.place = _struct(self._data, self.place, 0)
        except IndexError:
            raise _cut_short() from None
        return found


# Functions that hand the place on: a description has a thousand numbers, and an object that keeps the place costs
# several times as much for each.


def _struct(data: Data, place: int, depth: int) -> tuple[Struct, int]:
    if depth > _MAX_DEPTH:
        raise FormatError("a description must be flat, it is deeper than any that Parquet has")
    found: Struct = {}
    field = 0
    while head := data[place]:
        if head >> 4:
            field += head >> 4
            place += 1
        else:
            number, place = _varint(data, place + 1)
            field = _signed(number)
        found[field], place = _value(data, place, head & 15, depth)
    return found, place + 1


def _value(data: Data, place: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in _NUMBERS:
        number, place = _varint(data, place)
        return (number >> 1) ^ -(number & 1), place
    if kind == _BINARY:
        count, place = _varint(data, place)
        return bytes(_bytes(data, place, count)), place + count
    if kind == _STRUCT:
        return _struct(data, place, depth + 1)
    if kind in (_LIST, _SET):
        return _list(data, place, depth)
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, place
    if kind == _BYTE:
        return data[place], place + 1
    if kind == _DOUBLE:
        return struct.unpack("<d", _bytes(data, place, 8))[0], place + 8
    raise FormatError(f"a description must have values of types that Parquet has, it has one of type {kind}")


def _list(data: Data, place: int, depth: int) -> tuple[list[Any], int]:
    count, kind = data[place] >> 4, data[place] & 15
    place += 1
    if count == 15:
        count, place = _varint(data, place)
    if count > len(data) - place:
        raise _cut_short()
    if kind in (_TRUE, _FALSE):
        return [byte == _TRUE for byte in data[place : place + count]], place + count
    found = []
    for _ in range(count):
        value, place = _value(data, place, kind, depth)
        found.append(value)
    return found, place


def _bytes(data: Data, place: int, count: int) -> Data:
    if count > len(data) - place:
        raise _cut_short()
    return data[place : place + count]


def _varint(data: Data, place: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte = data[place]
        place += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, place
        shift += 7
        if shift > 63:
            raise FormatError("a description must have numbers of 64 bits, it has a longer one")


def _signed(number: int) -> int:
    """Undo the zigzag in which numbers of either sign are written."""
    return (number >> 1) ^ -(number & 1)


def _cut_short() -> FormatError:
    return FormatError("a description must end where its bytes do, it does not; it is cut short")
