"""From Arrow back to Python objects, by the form that `encoding.encode` found.

Both may come from outside, so everything is checked.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from samplebatch.column.encoding import PLAIN, Node
from samplebatch.column.ragged import RaggedColumn
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.types import named_dtype
from samplebatch.column.unpickling import unpickle
from samplebatch.errors import FormatError, SampleBatchError, UntrustedPickleError

_ARROW_TYPES = dict(PLAIN.values())
_ABSENT: Any = object()
_REFUSED: Any = object()


def decode(array: pa.Array, form: str | bytes, name: str, *, allow_pickle: bool = False) -> npt.NDArray[Any]:
    """Turn an Arrow array back into the objects that `encoding.encode` made it of.

    Parameters
    ----------
    array
        The array. Types that hold the same values in another layout, as another tool may write them, are cast.
    form
        The JSON that `encode` gave.
    name
        The column's name, for errors.
    allow_pickle
        Whether rows, and what stands anywhere within them, may be unpickled, which runs code that their writer chose.

    Returns
    -------
    Objects, or variable-width strings, shape (n,).

    Raises
    ------
    FormatError
        If the form is none, or does not fit the array.
    UntrustedPickleError
        If anything in them is pickled, however deep, and `allow_pickle` is false; names the column.

    Examples
    --------
    >>> decode(pa.array([[1, 2], [3]]), '{"kind":"tuple","children":[{"kind":"int"}]}', "a")
    array([(1, 2), (3,)], dtype=object)
    """
    node = _read(form, name)
    try:
        array.validate(full=True)
        values = _Decoder(name, allow_pickle=allow_pickle).decode(node, array, _REFUSED)
        if node.kind == "string":
            return np.array(values, _string_dtype(node.dtype))
        return np.fromiter(values, object, len(array))
    except (FormatError, UntrustedPickleError):
        raise
    except (pa.ArrowException, SampleBatchError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(
            f"column {name!r} must have an Arrow array that fits the form of its objects, got {array.type}: {error}"
        ) from error


def _read(form: str | bytes, name: str) -> Node:
    try:
        return _node(json.loads(form))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"column {name!r} must describe the form of its objects, it does not: {error}") from error


def _node(plain: dict[str, Any]) -> Node:
    node = Node(
        str(plain["kind"]),
        bool(plain.get("nullable", False)),
        str(plain.get("dtype", "")),
        tuple(map(int, plain.get("shape", ()))),
        tuple(map(str, plain.get("names", ()))),
        tuple(map(bool, plain.get("optional", ()))),
        tuple(map(_node, plain.get("children", ()))),
    )
    if node.kind == "dict" and not len(node.names) == len(node.optional) == len(node.children):
        raise ValueError("a dict must have as many names as children")
    return node


class _Decoder:
    """Decoder of one column's values, which hands the permission to unpickle down to every depth of their form."""

    def __init__(self, name: str, *, allow_pickle: bool = False) -> None:
        self._name = name
        self._allow_pickle = allow_pickle

    def decode(self, node: Node, array: pa.Array, null: Any) -> list[Any]:
        """Decode values; nulls that do not stand for None become `null`."""
        if node.kind == "none":
            if array.null_count != len(array):
                raise ValueError("values where there can be none")
            return [None] * len(array)
        if not array.null_count:
            return self._decode_present(node, array)
        if node.nullable:
            null = np.nan if node.dtype == "nan" else None
        elif null is _REFUSED:
            raise ValueError(f"nulls among values of kind {node.kind!r}, which are never None")
        present = iter(self._decode_present(node, array.drop_null()))
        return [next(present) if valid else null for valid in array.is_valid().to_pylist()]

    def _decode_present(self, node: Node, array: pa.Array) -> list[Any]:
        kind = node.kind
        if kind in _ARROW_TYPES:
            return _decode_plain(kind, array)
        if kind == "string":
            return _decode_plain("str", array)
        if kind == "dict":
            return self._decode_dicts(node, array)
        if kind in ("list", "tuple"):
            return self._decode_sequences(node, array)
        if kind in ("list_of", "tuple_of"):
            return self._decode_places(node, array)
        if kind in ("scalar", "array"):
            return _decode_arrays(node, array, self._name)
        if kind == "ragged":
            _expect(RaggedColumn.reads(array.type), "lists of its elements")
            return list(RaggedColumn.from_arrow(array, node.dtype, self._name).copy())
        if kind == "pickle":
            pickles = _decode_plain("bytes", array)
            return unpickle(pickles, f"column {self._name!r}", allow_pickle=self._allow_pickle)
        raise ValueError(f"this version does not know kind {kind!r}")

    def _decode_dicts(self, node: Node, array: pa.Array) -> list[dict[str, Any]]:
        _expect(pa.types.is_struct(array.type), "a struct")
        _expect([field.name for field in array.type] == list(node.names), "a field for each key")
        if not node.names:
            return [{} for _ in range(len(array))]
        fields = [
            self.decode(child, array.field(i), _ABSENT if optional else _REFUSED)
            for i, (child, optional) in enumerate(zip(node.children, node.optional, strict=True))
        ]
        names = node.names
        rows = zip(*fields, strict=True)
        if not any(node.optional):
            return [dict(zip(names, row, strict=True)) for row in rows]
        return [{name: value for name, value in zip(names, row, strict=True) if value is not _ABSENT} for row in rows]

    def _decode_places(self, node: Node, array: pa.Array) -> list[Any]:
        is_place_each = pa.types.is_struct(array.type) and array.type.num_fields == len(node.children)
        _expect(is_place_each, "a struct of its places")
        places = [self.decode(child, array.field(i), _REFUSED) for i, child in enumerate(node.children)]
        rows = zip(*places, strict=True)
        return list(rows) if node.kind == "tuple_of" else list(map(list, rows))

    def _decode_sequences(self, node: Node, array: pa.Array) -> list[Any]:
        _expect(pa.types.is_large_list(array.type) or pa.types.is_list(array.type), "lists")
        (child,) = node.children
        flat = self.decode(child, array.flatten(), _REFUSED)
        offsets = array.offsets.to_numpy()
        cuts = pairwise((offsets - offsets[0]).tolist())
        if node.kind == "tuple":
            return [tuple(flat[start:stop]) for start, stop in cuts]
        return [flat[start:stop] for start, stop in cuts]


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"the form asks for {what}")


def _decode_plain(kind: str, array: pa.Array) -> list[Any]:
    arrow = _ARROW_TYPES[kind]
    if array.type != arrow:
        # Strings and bytes have several layouts, and other tools write others than we do.
        _expect(str(array.type).removesuffix("_view") == str(arrow).removeprefix("large_"), str(arrow))
        array = array.cast(arrow)
    if kind in ("int", "float"):
        numbers: list[Any] = array.to_numpy().tolist()
        return numbers
    values: list[Any] = array.to_pylist()
    if kind == "np.str":
        return list(map(np.str_, values))
    return list(map(np.bytes_, values)) if kind == "np.bytes" else values


def _decode_arrays(node: Node, array: pa.Array, name: str) -> list[Any]:
    dtype = named_dtype(node.dtype)
    if dtype.kind == "b" and pa.types.is_boolean(array.type):
        return list(array.to_numpy(zero_copy_only=False))
    n = len(array)
    if node.shape:
        _expect(pa.types.is_fixed_size_list(array.type), "lists of one length")
        array = array.flatten()
    halves = dtype.kind == "c" and bool(node.shape)
    values = TensorColumn.from_arrow(array, f"<f{dtype.itemsize // 2}" if halves else node.dtype, name).values
    # A copy, since what it came from may be read-only and these are the user's own objects.
    rows = np.array(values).view(dtype).reshape(n, *node.shape)
    if node.kind == "array" and not node.shape:
        return [rows[i : i + 1].reshape(()) for i in range(n)]
    return list(rows)


def _string_dtype(missing: str) -> Any:
    if not missing:
        return np.dtypes.StringDType()
    return np.dtypes.StringDType(na_object={"None": None, "nan": np.nan}[missing])
