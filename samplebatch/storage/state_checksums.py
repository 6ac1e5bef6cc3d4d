"""Checksums of a buffer's state, one for each part of it, which pickles and files carry along."""

from __future__ import annotations

import contextlib
import pickle
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from samplebatch.batch.nested.node import KINDS, TENSOR
from samplebatch.batch.tree import named_leaves
from samplebatch.column.checksum import checksum
from samplebatch.column.interface import Column
from samplebatch.errors import FormatError
from samplebatch.storage.untrusted_state import State

CHECKSUMS = "checksums"
"""Key of the checksums in a state, by the dotted names of its parts."""

_VALUES = (bool, int, float, complex, str, bytes, type(None), np.generic)


def with_checksums(state: State) -> State:
    """Add the checksums of all parts to a state."""
    return {**state, CHECKSUMS: _digest_parts(state)}


def check_state(state: Mapping[str, Any]) -> None:
    """Check that each part of a state is as it was; a state without checksums passes.

    Raises
    ------
    FormatError
        If one is not, or parts are missing or more; names it.
    """
    expected = state.get(CHECKSUMS)
    if expected is None:
        return
    if not isinstance(expected, Mapping):
        raise FormatError("the checksums of a buffer's state must be a dict, they are not; it is damaged")
    found = _digest_parts(state)
    missing = sorted(map(str, expected.keys() ^ found.keys()))
    if missing:
        raise FormatError(f"the state of a buffer must have a checksum for each part, {missing[0]!r} is there alone")
    for name, digest in found.items():
        if type(expected[name]) is not int or digest != expected[name]:
            raise FormatError(f"the state of a buffer must be as it was, and {_describe_part(name, state)} has changed")


def _digest_parts(state: Mapping[str, Any]) -> dict[str, int]:
    """Compute the checksum of each part; parts of one name, such as policies 1 and "1", have one together."""
    found: dict[str, int] = {}
    for name, value in _parts(state):
        found[name] = _digest(value, found.get(name, 0))
    return found


def _parts(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """List the parts of a state by their dotted names: all that is in dicts, and each of its columns."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if name == CHECKSUMS:
            continue
        if isinstance(value, Mapping) and value:
            yield from _parts(value, f"{name}.")
        elif isinstance(value, list) and value and key == "columns":
            yield from ((f"{name}.{place}", column) for place, column in enumerate(value))
        else:
            yield name, value


def _describe_part(part: str, state: Mapping[str, Any]) -> str:
    """Name a part for an error: a column by its own name, where the state is whole enough to tell."""
    where, _, place = part.rpartition(".columns.")
    with contextlib.suppress(KeyError, TypeError, AttributeError, RecursionError):
        tree: Any = state
        for key in where.split("."):
            tree = tree[key]
        for column, number in named_leaves(tree["tree"]):
            if str(number) == place:
                return f"column {column!r}"
    return repr(part)


def _digest(value: Any, found: int = 0) -> int:
    """Compute a checksum of plain values, arrays, tensors and columns; of other objects, their class counts alone."""
    kind = type(value)
    found = zlib.crc32(kind.__name__.encode(), found)
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            found = _digest(value[key], _digest(key, found))
    elif isinstance(value, list | tuple):
        found = zlib.crc32(str(len(value)).encode(), found)
        for inner in value:
            found = _digest(inner, found)
    elif isinstance(value, _VALUES):
        found = zlib.crc32(repr(value).encode(errors="surrogatepass"), found)
    elif isinstance(value, np.ndarray):
        found = zlib.crc32(f"{value.dtype.str}{value.shape}".encode(), found)
        if value.dtype.kind in "OT":
            found = _digest(value.ravel().tolist(), found)
        else:
            found ^= checksum(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    elif isinstance(value, Column):
        found = _digest(value.__reduce_ex__(5)[1][1:], found)
    elif isinstance(value, pickle.PickleBuffer | memoryview | bytearray):
        found ^= checksum(value)
    elif KINDS[kind] == TENSOR:
        import torch

        found = zlib.crc32(f"{value.dtype}{tuple(value.shape)}".encode(), found)
        bits = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        found ^= checksum(bits.numpy())
    return found
