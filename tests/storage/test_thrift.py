"""Structs in Thrift's compact protocol: fields of every kind, and bytes that end too early."""

from __future__ import annotations

import pytest

from samplebatch.errors import FormatError
from samplebatch.storage.thrift import ThriftReader

NUMBERS = bytes([0x15, 0x03, 0x16, 0x80, 0x01])
FLAG_AND_TEXT = bytes([0x11, 0x08, 0x10, 2]) + b"hi"
LIST = bytes([0x19, 0xF5, 20, *range(0, 40, 2)])
"""More than 14 numbers: their count stands behind the head of the list."""
STRUCT = NUMBERS + FLAG_AND_TEXT + LIST + bytes([0x1C, 0x15, 0x06, 0, 0])


def test_fields_of_every_kind_are_read() -> None:
    reader = ThriftReader(STRUCT + b"more")
    assert reader.struct() == {1: -2, 2: 64, 3: True, 8: b"hi", 9: list(range(20)), 10: {1: 3}}
    assert reader.place == len(STRUCT)


@pytest.mark.parametrize("length", range(len(STRUCT)))
def test_a_struct_that_is_cut_short_is_refused(length: int) -> None:
    with pytest.raises(FormatError, match="cut short"):
        ThriftReader(memoryview(STRUCT)[:length]).struct()


def test_structs_without_end_are_refused() -> None:
    with pytest.raises(FormatError, match="flat"):
        ThriftReader(bytes([0x1C]) * 100).struct()
    with pytest.raises(FormatError, match="64 bits"):
        ThriftReader(bytes([0x15]) + bytes([0xFF]) * 20).struct()
