"""How bytes from outside may differ from those that were written: by accident, and on purpose."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

Files = dict[str, bytes]
"""The files of one thing that is read, by name; a single one has the name ``""``."""

_NUMBERS = (0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1)
_DIGITS = re.compile(rb"(?<![A-Za-z0-9_.])-?\d{1,20}(?:\.\d+)?")
_WORDS = re.compile(rb'"[^"\\]{0,40}"|\btrue\b|\bfalse\b|\bnull\b')
_TOKENS = (b"-1", b"0", b"1", b"1e400", b"NaN", b"99999999999999999999", b"null", b"true", b'""', b'"x"', b"[]", b"{}")


def mutate(data: bytes, rng: Random) -> bytes:
    """Change bytes at one to three positions."""
    actual = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(_CHANGES)(actual, rng)
    return bytes(actual)


def mutate_files(files: Files, rng: Random) -> Files:
    """Change one of several files (larger files more often), remove one, or swap two."""
    names = sorted(files)
    actual = dict(files)
    number = rng.random()
    if len(names) > 1 and number < 0.03:
        del actual[rng.choice(names)]
    elif len(names) > 1 and number < 0.06:
        a, b = rng.sample(names, 2)
        actual[a], actual[b] = actual[b], actual[a]
    else:
        (name,) = rng.choices(names, [64 + len(files[name]) for name in names])
        actual[name] = mutate(files[name], rng)
    return actual


def _flip_bit(data: bytearray, rng: Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set_byte(data: bytearray, rng: Random) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 127, 128, 254, 255, rng.randrange(256)))


def _truncate(data: bytearray, rng: Random) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _copy_block(data: bytearray, rng: Random) -> None:
    start, stop = _span(data, rng)
    at = rng.randrange(len(data) + 1)
    data[at : at + stop - start] = data[start:stop]


def _insert_block(data: bytearray, rng: Random) -> None:
    at = rng.randrange(len(data) + 1)
    start, stop = _span(data, rng)
    data[at:at] = rng.choice((data[start:stop], rng.randbytes(rng.randrange(1, 9)), bytes(rng.randrange(1, 65))))


def _delete_block(data: bytearray, rng: Random) -> None:
    start, stop = _span(data, rng)
    del data[start:stop]


def _zero_block(data: bytearray, rng: Random) -> None:
    start, stop = _span(data, rng)
    data[start:stop] = bytes(stop - start)


def _set_number(data: bytearray, rng: Random) -> None:
    """Overwrite an integer of one to eight bytes, mostly aligned, such as a length, offset or count."""
    width = rng.choice((1, 2, 4, 4, 8, 8))
    if len(data) < width:
        return
    at = rng.randrange(len(data) - width + 1)
    if rng.random() < 0.8:
        at -= at % width
    stored = int.from_bytes(data[at : at + width], "little")
    number = rng.choice(
        (rng.choice(_NUMBERS), stored + 1, stored - 1, stored * 2, -1, stored << 16, rng.getrandbits(62))
    )
    data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")


def _set_digits(data: bytearray, rng: Random) -> None:
    """Replace a number in text, such as JSON."""
    _replace(data, _DIGITS, rng.choice((*_TOKENS, str(rng.choice(_NUMBERS)).encode())), rng)


def _set_word(data: bytearray, rng: Random) -> None:
    """Replace a string or constant in text by another one from the text, or by a value of another type."""
    words = _WORDS.findall(bytes(data))
    _replace(data, _WORDS, rng.choice((*_TOKENS, *words)), rng)


def _replace(data: bytearray, pattern: re.Pattern[bytes], new: bytes, rng: Random) -> None:
    actual = list(pattern.finditer(bytes(data)))
    if not actual:
        return
    start, stop = rng.choice(actual).span()
    if rng.random() < 0.7:
        # Of the same length, so that nothing else in the file moves.
        new = new[: stop - start].ljust(stop - start)
    data[start:stop] = new


def _span(data: bytearray, rng: Random) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice((1, 2, 4, 8, 16, 64, 256, 4096)))


_CHANGES: tuple[Callable[[bytearray, Random], None], ...] = (
    _flip_bit, _flip_bit, _set_byte, _set_byte, _truncate, _copy_block, _insert_block, _delete_block, _zero_block,
    _set_number, _set_number, _set_number, _set_digits, _set_digits, _set_word,
)  # fmt: skip


def mutate_tree(value: Any, rng: Random) -> Any:
    """Return a copy of nested dicts, lists and arrays in which one value is replaced, removed or changed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        actual = dict(value)
        name = rng.choice(list(actual))
        if rng.random() < 0.05:
            del actual[name]
        else:
            actual[name] = mutate_tree(actual[name], rng)
        return actual
    if isinstance(value, (list, tuple)) and value and rng.random() < 0.8:
        items = list(value)
        at = rng.randrange(len(items))
        if rng.random() < 0.1:
            del items[at]
        else:
            items[at] = mutate_tree(items[at], rng)
        return type(value)(items)
    if isinstance(value, np.ndarray) and value.dtype.kind != "O" and rng.random() < 0.7:
        return _mutate_array(value, rng)
    return rng.choice(_VALUES)


def _mutate_array(array: np.ndarray[Any, Any], rng: Random) -> Any:
    number = rng.randrange(5)
    if number == 0 and array.ndim:
        return array[: rng.randrange(len(array) + 1)]
    if number == 1:
        return array.astype(rng.choice(("f4", "i8", "i1", "O", "c16", "U8")))
    if number == 2:
        return array[None]
    if number == 3:
        return np.concatenate([array, array]) if array.ndim else array
    raw = mutate(array.tobytes(), rng).ljust(array.nbytes, b"\0")[: array.nbytes]
    return np.frombuffer(raw, array.dtype).reshape(array.shape)


_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 1 << 31, 1 << 62, 1 << 70, -(1 << 70), 0.5, float("nan"), float("inf"), "", "x",
    b"x", [], {}, (), [None], {"x": 1}, [0, 1], "dense", "object", "prioritized", "uniform", 1j, np.zeros(0),
    np.zeros((2, 2)), np.int64(3), np.array([-1]), np.array(3), np.array(["a"]), np.array([None], object),
    np.array([1 << 62]),
)  # fmt: skip
