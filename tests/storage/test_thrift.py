"""Structs in Thrift's compact protocol: fields of every kind, and bytes that end too early."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch.errors import FormatError
from samplebatch.storage.foreign.parquet import ThriftReader

NUMBERS = bytes([0x15, 0x03, 0x16, 0x80, 0x01])
FLAG_AND_TEXT = bytes([0x11, 0x08, 0x10, 2]) + b"hi"
LIST = bytes([0x19, 0xF5, 20, *range(0, 40, 2)])
"""More than 14 numbers: their count stands behind the head of the list."""
STRUCT = NUMBERS + FLAG_AND_TEXT + LIST + bytes([0x1C, 0x15, 0x06, 0, 0])


def test_fields_of_every_kind_are_read() -> None:
    reader = ThriftReader(STRUCT + b"more")
    assert reader.struct() == {1: -2, 2: 64, 3: True, 8: b"hi", 9: list(range(20)), 10: {1: 3}}
    assert reader.offset == len(STRUCT)


@pytest.mark.parametrize("length", range(len(STRUCT)))
def test_a_truncated_struct_is_rejected(length: int) -> None:
    with pytest.raises(FormatError, match="truncated"):
        ThriftReader(memoryview(STRUCT)[:length]).struct()


def test_unterminated_structs_are_rejected() -> None:
    with pytest.raises(FormatError, match="nested less deeply"):
        ThriftReader(bytes([0x1C]) * 100).struct()
    with pytest.raises(FormatError, match="64-bit"):
        ThriftReader(bytes([0x15]) + bytes([0xFF]) * 20).struct()


def varint(number: int) -> bytes:
    actual = b""
    while number > 127:
        actual, number = actual + bytes([number & 127 | 128]), number >> 7
    return actual + bytes([number])


def zigzag(number: int) -> bytes:
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


ENCODE: dict[int, Callable[[Any], bytes]] = {
    3: lambda byte: bytes([byte]),
    4: zigzag,
    5: zigzag,
    6: zigzag,
    7: lambda number: struct.pack("<d", number),
    8: lambda text: varint(len(text)) + text,
    9: lambda numbers: (
        bytes([len(numbers) << 4 | 5] if len(numbers) < 15 else [0xF5, len(numbers)]) + b"".join(map(zigzag, numbers))
    ),
    12: lambda fields: encoded(fields),
}
"""How values are written, by the numbers of their types."""

NUMBERS_OF_ANY_SIZE = st.integers(-70, 70) | st.integers(-(2**62), 2**62)
"""Those of one byte end at 63 and -64."""
LEAVES = st.one_of(
    st.booleans().map(lambda flag: (1 if flag else 2, flag)),
    st.tuples(st.just(3), st.integers(0, 255)),
    st.tuples(st.sampled_from([4, 5, 6]), NUMBERS_OF_ANY_SIZE),
    st.tuples(st.just(7), st.floats(allow_nan=False)),
    st.tuples(st.just(8), st.binary(max_size=200)),
    st.tuples(st.just(9), st.lists(NUMBERS_OF_ANY_SIZE, max_size=20)),
)
STRUCTS = st.recursive(
    st.dictionaries(st.integers(1, 40), LEAVES, max_size=5),
    lambda inner: st.dictionaries(st.integers(1, 40), LEAVES | inner.map(lambda fields: (12, fields)), max_size=5),
    max_leaves=20,
)


def encoded(fields: dict[int, tuple[int, Any]]) -> bytes:
    actual, last = b"", 0
    for field, (kind, value) in sorted(fields.items()):
        head = bytes([field - last << 4 | kind]) if field - last < 16 else bytes([kind]) + zigzag(field)
        actual, last = actual + head + (ENCODE[kind](value) if kind > 2 else b""), field
    return actual + b"\0"


def plain(fields: dict[int, tuple[int, Any]]) -> dict[int, Any]:
    return {field: plain(value) if kind == 12 else value for field, (kind, value) in fields.items()}


@given(STRUCTS)
def test_structs_of_any_content_are_restored(fields: dict[int, tuple[int, Any]]) -> None:
    data = encoded(fields)
    reader = ThriftReader(data + b"more")
    assert reader.struct() == plain(fields)
    assert reader.offset == len(data)
    with pytest.raises(FormatError):
        ThriftReader(data[:-1]).struct()
