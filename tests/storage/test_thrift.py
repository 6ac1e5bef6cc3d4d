"""Structs in Thrift's compact protocol: numbers of every length and sign, and bytes that end too early."""

from __future__ import annotations

import pytest

from samplebatch.errors import FormatError
from samplebatch.storage.thrift import ThriftReader

LONG = bytes([0x19, 0xF5, 20, *range(0, 40, 2)])
"""A field that is a list of more than 14 numbers, whose count stands behind its head."""

STRUCT = bytes([0x15, 0x03, 0x16, 0x80, 0x01, 0x11, 0x08, 0x04, 2]) + b"hi" + LONG + bytes([0x1C, 0x15, 0x06, 0, 0])


def test_fields_of_every_kind_are_read() -> None:
    reader = ThriftReader(STRUCT + b"more")
    assert reader.struct() == {1: -2, 2: 64, 3: True, 4 - 2: 64, 2: b"hi", 5 - 2: [*range(20)], 4: {1: 3}}
    assert reader.place == len(STRUCT)
